"""Tests of `grammar` and `response_format`: what is enforced, refused under `strict`, or reported as ignored."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from syringa.api.fields import constraints
from syringa.prompt.chat.tools import close_schema
from syringa.prompt.grammar import compile_pool
from syringa.prompt.grammar.compile_pool import CompilePool
from tests.client import client
from tests.fake_engine import FakeEngine

SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "not": {"type": "null"}}
PLAIN = {"type": "object", "properties": {"a": {"type": "array"}}}


def json_schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}}


@pytest.mark.parametrize(
    ("body", "prefix"),
    [
        (json_schema_format(SCHEMA), "response_format.json_schema.schema"),
        (json_schema_format(SCHEMA, strict=False), "response_format.json_schema.schema"),
        ({"grammar": {"type": "json_schema", "value": SCHEMA}}, "grammar.value"),
        ({"grammar": {"type": "json_schema", "value": json.dumps(SCHEMA)}}, "grammar.value"),
    ],
)
async def test_schema_keywords_that_cannot_be_enforced_are_reported(body: dict[str, Any], prefix: str) -> None:
    engine = FakeEngine("x")
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-syringa-ignored"] == f"{prefix}.not, {prefix}.properties.a.uniqueItems"
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    # A response format has no undeclared properties.
    assert json.loads(grammar.value) == (PLAIN if "grammar" in body else close_schema(PLAIN))


async def test_strict_schema_rejects_unenforceable_keywords() -> None:
    engine = FakeEngine("x")
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json=json_schema_format(SCHEMA, strict=True))
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["param"] == "response_format.json_schema.schema.not"
    assert "response_format.json_schema.schema.properties.a.uniqueItems" in error["message"]
    assert not engine.requests


async def test_strict_schema_accepts_enforceable_keywords() -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json=json_schema_format(PLAIN, strict=True))
    assert answer.status_code == 200
    assert "x-syringa-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"grammar": {"type": "regex", "value": "a", "flags": "i"}}, "grammar.flags"),
        ({"response_format": {"type": "text", "zork": 1}}, "response_format.zork"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        (json_schema_format({}, zork=1), "response_format.json_schema.zork"),
        (json_schema_format({"requried": ["a"]}), "response_format.json_schema.schema.requried"),
    ],
)
async def test_unknown_fields_in_constraints_are_reported(body: dict[str, Any], named: str) -> None:
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
        (json_schema_format(MANY), AT),
        (json_schema_format({"type": "object", "properties": {"x": MANY}}), f"{AT}.properties.x"),
        (json_schema_format(OPTIONAL), f"{AT}.properties"),
        (json_schema_format({"$ref": "#"}), AT),
        (json_schema_format({"x-guidance": {"lenient": True}, "not": {}}, strict=True), f"{AT}.not"),
        (json_schema_format({"x-guidance": {"lenient": True}}, strict=True), f"{AT}.x-guidance"),
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
async def test_expensive_grammars_are_rejected_quickly(body: dict[str, Any], param: str) -> None:
    async with client() as http:
        started = time.process_time()
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]
    assert time.process_time() - started < 5


async def test_llguidance_options_in_schemas_are_reported() -> None:
    async with client() as http:
        answer = await http.post(
            "/v1/completions", json=json_schema_format({"type": "string", "x-guidance": {"lenient": True}})
        )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-syringa-ignored"] == f"{AT}.x-guidance"


async def test_slow_grammar_does_not_block_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(compile_pool, "_pool", CompilePool(threads=1, max_queued=1, timeout_seconds=1))
    monkeypatch.setattr(constraints, "validate_grammar", lambda grammar: release.wait(60))
    async with client() as http:
        tasks = [asyncio.create_task(http.post("/v1/completions", json=json_schema_format({}))) for _ in range(3)]
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
async def test_invalid_schema_is_rejected(schema: Any) -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json=json_schema_format(schema))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith("response_format.json_schema.schema")


@pytest.mark.parametrize("kind", ["json_schema", "llguidance"])
async def test_deeply_nested_grammar_is_rejected(kind: str) -> None:
    deep = '{"items":' * 900 + "{}" + "}" * 900
    async with client() as http:
        for value in (deep, json.dumps(deep)):
            body = f'{{"grammar": {{"type": "{kind}", "value": {value}}}}}'
            answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 400, answer.text
