"""Tool calls of the real model at a high temperature: every complete call matches its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.client import events
from tests.e2e.server import Server, serve
from tests.tiers import slow

pytestmark = pytest.mark.model

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "unit"],
}
MAIL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "to": {"type": "array", "items": {"$ref": "#/$defs/address"}, "minItems": 1, "maxItems": 2},
        "subject": {"type": "string", "maxLength": 30},
        "urgent": {"type": "boolean"},
    },
    "required": ["to", "subject"],
    "$defs": {"address": {"type": "string", "pattern": "^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$"}},
}
SCHEMAS = {"get_weather": WEATHER, "send_mail": MAIL}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASK: dict[str, Any] = {
    "prompt": "User: What is the weather in Paris? Then write to ann@home.org about it.\nAssistant:",
    "tools": TOOLS,
    "temperature": 1.5,
    "max_tokens": 512,
    "seed": 7,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve() as running:
        yield running


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(server.url + "/v1/completions", json=ASK | fields, timeout=300)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def check(choice: dict[str, Any]) -> int:
    for call in choice["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    return len(choice["tool_calls"])


def test_required_tool_choice_always_calls(server: Server) -> None:
    choices = ask(server, tool_choice="required", n=30)["choices"]
    complete = [choice for choice in choices if choice["finish_reason"] != "length"]
    calls = [check(choice) for choice in complete]
    print(f"{len(complete)} of 30 choices are complete, with {sum(calls)} calls, at most {max(calls)} in one")
    assert all(calls)
    assert {choice["finish_reason"] for choice in complete} == {"tool_calls"}
    assert {choice["text"] for choice in complete} == {""}
    assert len(complete) >= 24  # the others fill the context, which depends on the processor


def test_named_function_is_called(server: Server) -> None:
    choice = {"type": "function", "function": {"name": "send_mail"}}
    for each in ask(server, tool_choice=choice, n=4)["choices"]:
        assert check(each) == 1
        assert each["tool_calls"][0]["function"]["name"] == "send_mail"
        assert each["finish_reason"] == "stop"


@pytest.mark.parametrize("strict", [True, *slow(False)])
def test_auto_tool_choice_calls_where_it_fits(server: Server, strict: bool) -> None:
    """After an example the model often calls, and a call is well-formed."""
    tools = [{**tool, "function": {**tool["function"], "strict": strict}} for tool in TOOLS]
    example = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome", "unit": "celsius"}}</tool_call>'
    prompt = f"User: The weather in Rome?\nAssistant: {example}\nUser: The weather in Paris?\nAssistant:"
    body = ask(server, tools=tools, n=24, prompt=prompt, temperature=1.0, max_tokens=200)
    seen = 0
    for choice in body["choices"]:
        assert "<tool_call>" not in choice["text"]  # an incomplete call is not part of the text
        calls = choice["tool_calls"][:-1] if choice["finish_reason"] == "length" else choice["tool_calls"]
        seen += len(calls)
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            assert isinstance(arguments, dict)
            if strict:
                jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])
    assert seen


def test_streamed_tool_calls_equal_the_body(server: Server) -> None:
    asked = {"tool_choice": "required"}
    (whole,) = ask(server, **asked)["choices"]
    answer = httpx.post(server.url + "/v1/completions", json=ASK | asked | {"stream": True}, timeout=300)
    names, arguments = [], [""]
    for chunk in events(answer.text)[:-1]:
        for part in chunk["choices"][0].get("tool_calls", []):
            if "name" in part["function"]:
                names.append(part["function"]["name"])
                arguments[part["index"] :] = [""]
            arguments[part["index"]] += part["function"]["arguments"]
    assert names == [call["function"]["name"] for call in whole["tool_calls"]]
    assert arguments == [call["function"]["arguments"] for call in whole["tool_calls"]]
