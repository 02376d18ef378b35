"""What clients get when a model worker dies, and what is logged of a request that has crashed workers."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from syringa.errors import RequestSuspected, WorkerLost
from syringa.service.usage.accounting import RequestAccounting
from syringa.types import EngineDelta, EngineRequest
from tests.chat_models import plain_model
from tests.client import client, server
from tests.fake_engine import FakeEngine

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "a secret"}], "max_tokens": 20, "seed": 7}
PATHS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": ["a secret", "another"], "max_tokens": 20, "seed": 7}),
    ("/v1/responses", {"input": "a secret", "store": False, "max_output_tokens": 20, "seed": 7}),
]


class LossyEngine(FakeEngine):
    """The worker of its first requests dies after some tokens."""

    def __init__(self, losses: int) -> None:
        super().__init__("hello")
        self.losses = losses

    async def deltas(self, request: EngineRequest) -> AsyncGenerator[EngineDelta]:
        lost, self.losses = self.losses > 0, self.losses - 1
        count = 0
        async with contextlib.aclosing(super().deltas(request)) as deltas:
            async for delta in deltas:
                yield delta
                count += 1
                if lost and count == 3:
                    raise WorkerLost("The model worker ended while it was answering.", begun=True)


def without_ids(body: dict[str, Any]) -> str:
    """Return the text and usage of a body."""
    return json.dumps([body.get("choices") or body["output"][0]["content"], body["usage"]])


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_request_without_stream_is_run_again_when_its_worker_dies(path: str, body: dict[str, Any]) -> None:
    ended: list[RequestAccounting] = []
    async with server(FakeEngine("hello"), model=plain_model()) as http:
        expected = (await http.post(path, json=body)).json()
    engine = LossyEngine(1)
    async with server(engine, model=plain_model(), observe=ended.append) as http:
        answer = await http.post(path, json=body)
        assert answer.status_code == 200
        assert without_ids(answer.json()) == without_ids(expected)
    usage = expected["usage"]
    (accounting,) = ended
    assert accounting.outcome == "ok"
    assert accounting.stats.usage.prompt_tokens + accounting.stats.usage.completion_tokens == usage["total_tokens"]


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_request_without_stream_is_run_again_once(path: str, body: dict[str, Any]) -> None:
    async with client(LossyEngine(9), model=plain_model()) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_unavailable"
    assert float(answer.headers["retry-after"]) > 0


async def test_begun_stream_ends_with_an_error_when_its_worker_dies() -> None:
    engine = LossyEngine(1)
    async with client(engine, model=plain_model()) as http:
        answer = await http.post("/v1/chat/completions", json=CHAT | {"stream": True})
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(lines[-1][6:])["error"]["code"] == "engine_unavailable"
    assert len(engine.requests) == 1


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
