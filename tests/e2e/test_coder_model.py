"""Tool calls of a model that writes them in a code block although its template has a format for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.client import events
from tests.e2e.server import Server, serve
from tests.larger_model import coder_model, needs_larger_model

pytestmark = needs_larger_model

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Get the current weather of a city.", "parameters": PARAMETERS}
ASK: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [{"type": "function", "function": WEATHER}],
    "temperature": 0,
    "max_tokens": 200,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = ("--model", str(coder_model()), "--max-model-len", "2048", "--requests-per-minute", "0")
    with serve(*settings, ready=False) as running:
        running.wait_ready(1200)
        yield running


def ask(server: Server, **fields: Any) -> httpx.Response:
    answer = httpx.post(server.url + "/v1/chat/completions", json=ASK | fields, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer


def test_coder_model_calls_a_tool_under_auto(server: Server) -> None:
    body = ask(server, return_token_ids=True).json()
    (choice,) = body["choices"]
    tokens = {"model": body["model"], "tokens": choice["token_ids"]}
    written = httpx.post(server.url + "/detokenize", json=tokens, timeout=60).json()["prompt"]
    print(f"the model wrote {written!r}")
    assert written.startswith("```json"), "the model no longer writes a code block: this test shows nothing"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"])["city"].startswith("Paris")
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


def test_coder_model_streams_a_call_without_content(server: Server) -> None:
    *chunks, done = events(ask(server, stream=True).text)
    assert done == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert not any(delta.get("content") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0]["function"]["name"] == "get_weather"
    assert json.loads("".join(call["function"]["arguments"] for call in calls))["city"].startswith("Paris")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_coder_model_answers_with_a_code_block_that_is_no_call(server: Server) -> None:
    question = "Write a JSON object with the name and the age of a person, in a code block. Do not call a function."
    (choice,) = ask(server, messages=[{"role": "user", "content": question}]).json()["choices"]
    print(choice["message"]["content"])
    assert "```json" in choice["message"]["content"]
    assert choice["message"]["tool_calls"] == []
