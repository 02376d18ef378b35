"""Structured output of the real model, sampled at a temperature at which it writes noise without constraints.

Nearly all responses end within their token limit, and those that do are valid.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.conftest import KEY
from tests.e2e.server import Server
from tests.tiers import examples

pytestmark = [pytest.mark.model, pytest.mark.slow]

CHOICES = 4  # per request
DRAWS = examples(200) // CHOICES * CHOICES
AT_ONCE = 8  # requests


def word(length: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": length}


def number(least: int, most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def some(items: Any, most: int, **rest: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most, **rest}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def text(**rest: Any) -> dict[str, Any]:
    return {"type": "string", **rest}


PERSON = record(name=word(10), age=number(0, 120))
ADDRESS = text(pattern="^[a-z]{1,8}@[a-z]{1,8}\\.(com|org)$")

ANSWERS: list[dict[str, Any]] = [
    record(people=some(PERSON, 2, minItems=1), place=record(city=word(10), at=record(x=number(-9, 9)))),
    some({"enum": ["red", "green", "blue", None, 7]}, 6, minItems=2),
    record(shape={"anyOf": [record(radius=number(1, 99)), record(sides=some(number(1, 9), 3)), {"type": "null"}]}),
    {"$defs": {"tag": text(minLength=1, maxLength=8)}, **record(tags=some({"$ref": "#/$defs/tag"}, 4), note=word(20))},
    record(plate=text(pattern="^[A-Z]{2}-[0-9]{3}$"), phone=text(pattern="^\\+?[0-9]{5,9}$"), paid={"type": "boolean"}),
    record(day=text(format="date"), at=text(format="date-time"), id=text(format="uuid"), ip=text(format="ipv4")),
    record(ratio={"type": "number", "minimum": 0, "maximum": 1}, count=number(-500, 500), dozen={"const": 12}),
    {**PERSON, "properties": PERSON["properties"] | {"nick": word(6)}},
    {**record(id=number(1, 99)), "additionalProperties": number(0, 9), "maxProperties": 2},
    {
        "$defs": {"node": record(value=number(0, 9), next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]})}
        | {"leaf": record(value=number(0, 9))},
        "$ref": "#/$defs/node",
    },
]

PARAMETERS: dict[str, dict[str, Any]] = {
    "get_weather": record(city=word(12), unit={"enum": ["celsius", "fahrenheit"]}, days=some(number(1, 14), 3)),
    "send_mail": {
        "$defs": {"address": ADDRESS},
        **record(to=some({"$ref": "#/$defs/address"}, 2, minItems=1), subject=word(16), urgent={"type": "boolean"}),
    },
    "book": record(guests=some(PERSON, 2, minItems=1), day=text(format="date")),
    "ping": record(),
}


def tools(*, strict: bool) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "description": name, "parameters": schema, "strict": strict}}
        for name, schema in PARAMETERS.items()
    ]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


CALLS: list[dict[str, Any]] = [
    {"tools": tools(strict=False), "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": tools(strict=True), "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": tools(strict=True), "tool_choice": "required"},
    {"tools": tools(strict=False), "tool_choice": named("send_mail")},
    {"tools": tools(strict=True), "tool_choice": named("book")},
]

ASKED = ["What is the weather in Paris?", "Write to ann@home.org that I am late.", "Book a room for Ann and Bob."]


def draw(server: Server, asked: list[str], ways: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return `DRAWS` choices, each with the body of its request."""
    bodies = [
        {
            "messages": [{"role": "user", "content": asked[seed % len(asked)]}],
            "temperature": 1.5,
            "max_completion_tokens": 512,
            "seed": seed,
            "n": CHOICES,
            **ways[seed % len(ways)],
        }
        for seed in range(DRAWS // CHOICES)
    ]
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=300) as http:

        def post(body: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert "x-syringa-ignored" not in answer.headers
            return [(choice, body) for choice in answer.json()["choices"]]

        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = [each for some in pool.map(post, bodies) for each in some]
    assert len(found) == DRAWS
    return found


def valid(value: str, schema: dict[str, Any]) -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.validate(json.loads(value), schema, jsonschema.Draft202012Validator, format_checker=checker)


def test_sampled_tool_calls_match_their_schemas(shared_server: Server) -> None:
    complete = calls = 0
    for choice, body in draw(shared_server, ASKED, CALLS):
        if choice["finish_reason"] == "length":
            continue
        complete += 1
        made = [call["function"] for call in choice["message"]["tool_calls"]]
        calls += len(made)
        assert made
        for call in made:
            valid(call["arguments"], PARAMETERS[call["name"]])
        wanted = body["tool_choice"]
        assert choice["finish_reason"] == ("tool_calls" if wanted == "required" else "stop")
        assert choice["message"]["content"] is None
        if wanted != "required":
            assert [call["name"] for call in made] == [wanted["function"]["name"]]
        if not body.get("parallel_tool_calls", True):
            assert len(made) == 1
    print(f"{complete} of {DRAWS} choices are complete, with {calls} calls, all of them valid")
    assert complete >= DRAWS * 0.85


def test_sampled_answers_match_their_schemas(shared_server: Server) -> None:
    ways = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}
        for schema in ANSWERS
    ]
    complete = 0
    for choice, body in draw(shared_server, ["Give me an example."], ways):
        if choice["finish_reason"] == "length":
            continue
        assert choice["finish_reason"] == "stop"
        complete += 1
        valid(choice["message"]["content"], body["response_format"]["json_schema"]["schema"])
    print(f"{complete} of {DRAWS} choices are complete, all of them valid")
    assert complete >= DRAWS * 0.85
