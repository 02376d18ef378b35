"""What clients get when a model worker dies, and what is logged of a request that has crashed workers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from syringa.errors import RequestSuspected, WorkerLost
from tests.chat_models import plain_model
from tests.client import client
from tests.fake_engine import FakeEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 20, "seed": 7}
PATHS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": ["a secret", "another"], "max_tokens": 20, "seed": 7}),
    ("/v1/responses", {"input": "a secret", "store": False, "max_output_tokens": 20, "seed": 7}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_request_whose_workers_keep_dying_fails(path: str, body: dict[str, Any], stream: bool) -> None:
    """The engine has moved it as often as it may."""
    engine = FakeEngine("hello")
    engine.fail = WorkerLost("The model worker ended while it was answering.")
    async with client(engine, model=plain_model()) as http:
        answer = await http.post(path, json=body | {"stream": stream})
    if stream:
        assert answer.status_code == 200
        assert ("response.failed" if path == "/v1/responses" else "engine_unavailable") in answer.text
    else:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        assert float(answer.headers["retry-after"]) > 0


async def test_suspected_request_is_logged_with_its_parameters_only(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("hello")
    engine.fail, engine.fail_first = RequestSuspected("It is not run again."), True
    body = CHAT | {
        "temperature": 0.25,
        "logit_bias": {"5": 1},
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"title": "a secret"}}},
    }
    async with client(engine, model=plain_model()) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "request_suspected"
    assert "retry-after" not in answer.headers
    (record,) = [each for each in caplog.records if "suspected" in each.getMessage()]
    assert record.levelno == logging.ERROR
    assert "secret" not in record.getMessage()
    fields = record.fields  # type: ignore[attr-defined]
    assert fields["endpoint"] == "/v1/chat/completions"
    assert fields["max_tokens"] == 20
    assert fields["sampling"]["temperature"] == 0.25
    assert fields["sampling"]["seed"] == 7
    assert fields["sampling"]["logit_bias"] == 1
    assert fields["sampling"]["grammar"].startswith(("lark, ", "llguidance, ", "json_schema, "))
    assert record.request_id == answer.headers["x-request-id"]  # type: ignore[attr-defined]
