"""The access log, and what must never be logged."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from syringa import logs
from syringa.config import Config
from syringa.http.middleware import access_log
from syringa.http.middleware.access_log import logger
from tests.chat_models import plain_model
from tests.client import client, server
from tests.fake_engine import FakeEngine

SECRET = "a secret text"


class RecordingHandler(logging.Handler):
    """Records log lines as JSON, as a log collector would receive them."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logs.JsonFormatter())
        self.addFilter(logs.add_request_id)
        self.lines: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))


@pytest.fixture
def log() -> Iterator[list[dict[str, Any]]]:
    ours = logging.getLogger("syringa")
    handler, level = RecordingHandler(), ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield handler.lines
    ours.removeHandler(handler)
    ours.setLevel(level)
    logs.PROMPTS.setLevel(logging.CRITICAL + 1)


def lines_of(log: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [line for line in log if line["logger"] == name]


async def test_access_log_has_one_line_per_request(log: list[dict[str, Any]]) -> None:
    async with client(FakeEngine("hello"), Config(api_key=("the-key",))) as http:
        headers = {"authorization": "Bearer the-key", "x-request-id": "mine", "x-custom": SECRET}
        body = {"prompt": SECRET, "user": SECRET}
        await http.post("/v1/completions", params={"token": SECRET}, json=body, headers=headers)
        await http.post("/v1/completions", json=body)
        await http.get("/nowhere/a%0Ab", headers=headers)
        await http.get("/health")
    done, unknown, lost, health = lines_of(log, "syringa.access")
    assert {**done, "time": "", "seconds": 0, "message": "", "organization": "", "key": ""} == {
        "time": "", "level": "info", "logger": "syringa.access", "message": "", "request_id": "mine", "method": "POST",
        "path": "/v1/completions", "status": 200, "seconds": 0, "model": "fake", "outcome": "ok",
        "input_tokens": len(SECRET), "output_tokens": 6, "organization": "", "key": "",
    }  # fmt: skip
    assert done["seconds"] > 0
    assert (unknown["status"], lost["status"]) == (401, 404)
    assert "model" not in unknown
    assert "\n" not in lost["message"]
    assert (health["level"], health["path"]) == ("debug", "/health")
    logged = json.dumps(log)
    for each in (SECRET, "the-key", "hello"):
        assert each not in logged


async def test_access_log_records_a_stream_when_it_has_ended(log: list[dict[str, Any]]) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with server(engine) as http:
        body = {"prompt": "x", "stream": True, "max_tokens": 1000, "ignore_eos": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                break
            assert not [line for line in lines_of(log, "syringa.access") if line["method"] == "POST"]
        for _ in range(3000):
            await asyncio.sleep(0.01)
            if found := [line for line in lines_of(log, "syringa.access") if line["method"] == "POST"]:
                break
    assert (found[0]["status"], found[0]["outcome"]) == (200, "cancelled")


async def test_error_log_names_the_request_and_quotes_no_content(log: list[dict[str, Any]]) -> None:
    engine = FakeEngine("hello")
    engine.fail, engine.fail_first = ValueError(SECRET), True
    async with client(engine) as http:
        for stream in (False, True):
            body = {"prompt": SECRET, "stream": stream}
            await http.post("/v1/completions", json=body, headers={"x-request-id": "r1"})
        engine.fail_first = False
        await http.post("/v1/completions", json={"prompt": "x", "stream": True}, headers={"x-request-id": "r1"})
    errors = [line for line in log if line["level"] == "error"]
    assert len(errors) == 3
    for line in errors:
        assert line["request_id"] == "r1"
        assert "ValueError" in line["exception"]
    assert SECRET not in json.dumps(log)


async def test_prompts_and_outputs_are_logged_only_if_enabled(log: list[dict[str, Any]]) -> None:
    logs.PROMPTS.setLevel(logging.INFO)
    async with client(FakeEngine("hello")) as http:
        for stream in (False, True):
            await http.post("/v1/completions", json={"prompt": SECRET, "stream": stream})
        await http.post("/v1/completions", json={"prompt": "x" * 50_000})
    logged = [line["message"] for line in lines_of(log, "syringa.prompts")]
    assert SECRET in logged[0]
    assert logged[1] == logged[3] == "answer: hello"
    assert len(logged[4]) < 10_100
    assert "characters" in logged[4]


async def test_access_log_formats_nothing_if_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a line was formatted")

    monkeypatch.setattr(access_log, "_describe_caller", fail)
    monkeypatch.setattr(logger, "disabled", False)
    level = logging.getLogger("syringa").level
    logging.getLogger("syringa").setLevel(logging.WARNING)
    try:
        async with client(FakeEngine("hello")) as http:
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    finally:
        logging.getLogger("syringa").setLevel(level)


async def test_tokens_of_mcp_servers_in_a_message_are_never_logged(log: list[dict[str, Any]]) -> None:
    logs.PROMPTS.setLevel(logging.INFO)
    body = {
        "messages": [{"role": "user", "content": "a question"}],
        "max_tokens": 5,
        "mcp_servers": [{"type": "url", "url": "https://a.example", "name": "a", "authorization_token": SECRET}],
    }
    async with client(model=plain_model()) as http:
        assert (await http.post("/v1/messages", json=body)).status_code == 200
    assert "a question" in json.dumps(log)
    assert SECRET not in json.dumps(log)
