"""`grammar` and `response_format`: what of a schema is enforced, refused under `strict`, or named as ignored."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from syringa.api.fields import constraints
from syringa.prompt.chat.tools import closed
from syringa.prompt.grammar import compile_pool
from syringa.prompt.grammar.compile_pool import Workshop
from tests.client import client
from tests.fake_engine import FakeEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "not": {"type": "null"}}
PLAIN = {"type": "object", "properties": {"a": {"type": "array"}}}


def shaped(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        (shaped(SCHEMA), "response_format.json_schema.schema"),
        (shaped(SCHEMA, strict=False), "response_format.json_schema.schema"),
        ({"grammar": {"type": "json_schema", "value": SCHEMA}}, "grammar.value"),
        ({"grammar": {"type": "json_schema", "value": json.dumps(SCHEMA)}}, "grammar.value"),
    ],
)
async def test_the_rest_is_enforced_and_the_header_names_what_is_not(body: dict[str, Any], prefix: str) -> None:
    engine = FakeEngine("x")
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-syringa-ignored"] == f"{prefix}.not, {prefix}.properties.a.uniqueItems"
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    # A response format has no properties beyond those that it declares.
    assert json.loads(grammar.value) == (PLAIN if "grammar" in body else closed(PLAIN))


async def test_strict_refuses_and_names_them_all() -> None:
    engine = FakeEngine("x")
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json=shaped(SCHEMA, strict=True))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == "response_format.json_schema.schema.not"
    assert "response_format.json_schema.schema.properties.a.uniqueItems" in error["message"]
    assert not engine.requests


async def test_strict_takes_what_can_be_enforced() -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json=shaped(PLAIN, strict=True))
    assert answer.status_code == 200
    assert "x-syringa-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"grammar": {"type": "regex", "value": "a", "flags": "i"}}, "grammar.flags"),
        ({"response_format": {"type": "text", "zork": 1}}, "response_format.zork"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        (shaped({}, zork=1), "response_format.json_schema.zork"),
        (shaped({"requried": ["a"]}), "response_format.json_schema.schema.requried"),
    ],
)
async def test_unknown_fields_inside_are_named(body: dict[str, Any], named: str) -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-syringa-ignored"] == named


MANY: dict[str, Any] = {"allOf": [{"type": "string", "pattern": f".*a{{{each}}}.*b"} for each in range(20)]}
LARK = "start: A\nA: " + " & ".join(f"/(.|\\n)*a{{{each}}}(.|\\n)*b/" for each in range(20))
OPTIONAL = {"type": "object", "properties": {str(each): {} for each in range(10_000)}}
AT = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (shaped(MANY), AT),
        (shaped({"type": "object", "properties": {"x": MANY}}), f"{AT}.properties.x"),
        (shaped(OPTIONAL), f"{AT}.properties"),
        (shaped({"$ref": "#"}), AT),
        (shaped({"x-guidance": {"lenient": True}, "not": {}}, strict=True), f"{AT}.not"),
        (shaped({"x-guidance": {"lenient": True}}, strict=True), f"{AT}.x-guidance"),
        ({"grammar": {"type": "json_schema", "value": MANY}}, "grammar.value"),
        ({"grammar": {"type": "lark", "value": LARK}}, "grammar.value"),
        ({"grammar": {"type": "lark", "value": "start: start"}}, "grammar.value"),
        (
            {"grammar": {"type": "llguidance", "value": {"grammars": [{"lark_grammar": LARK}]}}},
            "grammar.value.grammars[0].lark_grammar",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": MANY}}}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters.properties.x",
        ),
    ],
    ids=lambda value: str(value)[:70],
)
async def test_what_would_take_too_long_is_refused_at_once(body: dict[str, Any], param: str) -> None:
    async with client() as http:
        started = time.process_time()
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]
    assert time.process_time() - started < 5


async def test_options_of_llguidance_are_named() -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json=shaped({"type": "string", "x-guidance": {"lenient": True}}))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-syringa-ignored"] == f"{AT}.x-guidance"


async def test_a_grammar_that_compiles_for_ever_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(compile_pool, "_workshop", Workshop(threads=1, waiting=1, seconds=1))
    monkeypatch.setattr(constraints, "validate", lambda grammar: release.wait(60))
    async with client() as http:
        tasks = [asyncio.create_task(http.post("/v1/completions", json=shaped({}))) for _ in range(3)]
        plain = await http.post("/v1/completions", json={})
        answers = [await task for task in tasks]
    release.set()
    assert plain.status_code == 200
    assert sorted(answer.status_code for answer in answers) == [400, 503, 503]
    slow = next(answer for answer in answers if answer.status_code == 400).json()["error"]
    assert slow["param"] == "response_format.json_schema.schema"
    assert "too long to compile" in slow["message"]


@pytest.mark.parametrize(
    "schema",
    [False, {"type": "string", "pattern": "("}, {"$ref": "http://elsewhere/"}, {"minimum": 10**30}, {"pattern": 5}],
    ids=str,
)
async def test_a_schema_that_does_not_compile_is_a_400(schema: Any) -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json=shaped(schema))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("response_format.json_schema.schema")


@pytest.mark.parametrize("kind", ["json_schema", "llguidance"])
async def test_a_deep_value_is_a_400(kind: str) -> None:
    deep = '{"items":' * 900 + "{}" + "}" * 900
    async with client() as http:
        for value in (deep, json.dumps(deep)):
            body = f'{{"grammar": {{"type": "{kind}", "value": {value}}}}}'
            answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
