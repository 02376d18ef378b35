"""A grammar that cannot be compiled within the limits is refused, and the worker never sees it."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import KEY
from tests.e2e.server import Server

pytestmark = pytest.mark.model

PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}}, "required": ["name"]}


def body(schema: object, **more: object) -> dict[str, object]:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"prompt": "A name:", "max_tokens": 16, "response_format": format, **more}


def test_server_refuses_schema_that_cannot_be_compiled_before_stream(shared_server: Server) -> None:
    """The verdict arrives later than the first keep-alive comment of a stream would."""
    hostile = {"type": "integer", "multipleOf": 9999991}
    with httpx.Client(base_url=shared_server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as http:
        refused = http.post("/v1/completions", json=body(hostile, stream=True))
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == ("invalid_grammar", "response_format.json_schema.schema")
        answer = http.post("/v1/completions", json=body(PERSON))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"].startswith('{"name":"')
