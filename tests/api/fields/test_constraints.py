"""Tests of `grammar` and `response_format`: what is enforced, refused under `strict`, or reported as ignored."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import close_schema
from syringa.types import Grammar
from tests.chat_models import plain_model
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


ENDLESS: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
OPTIONAL = {"type": "object", "properties": {str(each): {} for each in range(10_000)}}
AT = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (json_schema_format(ENDLESS), f"{AT}.properties.a"),
        (json_schema_format(OPTIONAL), f"{AT}.properties"),
        (json_schema_format({"$ref": "#"}), AT),
        (json_schema_format({"x-guidance": {"lenient": True}, "not": {}}, strict=True), f"{AT}.not"),
        (json_schema_format({"x-guidance": {"lenient": True}}, strict=True), f"{AT}.x-guidance"),
        ({"grammar": {"type": "json_schema", "value": ENDLESS}}, "grammar.value.properties.a"),
        ({"grammar": {"type": "lark", "value": f"start: %json {json.dumps(ENDLESS)}"}}, "grammar.value.properties.a"),
        ({"grammar": {"type": "lark", "value": "start: start"}}, "grammar.value"),
        (
            {"grammar": {"type": "llguidance", "value": {"grammars": [{"lark_grammar": "start: start"}]}}},
            "grammar.value.grammars[0].lark_grammar",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": ENDLESS}}],
                "tool_choice": "required",
            },
            "tools[0].function.parameters.properties.a",
        ),
    ],
    ids=lambda value: str(value)[:70],
)
async def test_grammars_that_nothing_matches_are_rejected_with_path(body: dict[str, Any], param: str) -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


async def test_llguidance_options_in_schemas_are_reported() -> None:
    async with client() as http:
        answer = await http.post(
            "/v1/completions", json=json_schema_format({"type": "string", "x-guidance": {"lenient": True}})
        )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-syringa-ignored"] == f"{AT}.x-guidance"


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


class RecordingCheck:
    """A grammar check that refuses grammars with one of the given texts."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.checked: list[tuple[Grammar, str, str | None]] = []

    async def __call__(self, grammar: Grammar, tenant: str, salt: str | None) -> int:
        self.checked.append((grammar, tenant, salt))
        if any(text in grammar.value for text in self.refused):
            raise InvalidRequest("The grammar is too complex.", code="invalid_grammar")
        return 4711


def checked_client(check: RecordingCheck, engine: FakeEngine | None = None) -> httpx.AsyncClient:
    model = plain_model()
    model.check_grammar = check
    return client(engine, model=model)


HOSTILE = {"type": "integer", "multipleOf": 9999991}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
LARK = f"start: %json {json.dumps(HOSTILE)}"


def function_tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (json_schema_format(HOSTILE), AT),
        ({"grammar": {"type": "lark", "value": LARK}}, "grammar.value"),
        ({"grammar": {"type": "json_schema", "value": HOSTILE}}, "grammar.value"),
        (
            {"tools": [function_tool("f", {}), function_tool("g", HOSTILE)], "tool_choice": "required"},
            "tools[1].function.parameters",
        ),
        ({"tools": [function_tool("g", HOSTILE, strict=True)]}, "tools[0].function.parameters"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_grammar_that_exceeds_limits_is_refused_before_stream(
    body: dict[str, Any], param: str, stream: bool
) -> None:
    engine = FakeEngine("x")
    async with checked_client(RecordingCheck("9999991"), engine) as http:
        answer = await http.post("/v1/chat/completions", json=body | MESSAGES | {"stream": stream})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_grammar")
    assert "too complex" in error["message"]
    assert not engine.requests


@pytest.mark.parametrize(
    "body",
    [
        {"stream": True, "text": {"format": {"type": "json_schema", "name": "x", "schema": HOSTILE}}},
        {"background": True, "text": {"format": {"type": "json_schema", "name": "x", "schema": HOSTILE}}},
    ],
    ids=str,
)
async def test_response_with_grammar_that_exceeds_limits_is_refused(body: dict[str, Any]) -> None:
    async with checked_client(RecordingCheck("9999991")) as http:
        answer = await http.post("/v1/responses", json={"input": "hi", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "text.format.schema"


async def test_grammar_is_checked_once_for_organization_and_salt() -> None:
    engine, check = FakeEngine("x"), RecordingCheck()
    async with checked_client(check, engine) as http:
        answer = await http.post("/v1/completions", json={**json_schema_format(PLAIN), "cache_salt": "salt"})
    assert answer.status_code == 200, answer.text
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.memory == 4711
    assert check.checked == [(msgspec.structs.replace(grammar, memory=0), "", "salt")]


async def test_best_effort_tool_schema_is_dropped_if_it_cannot_be_compiled() -> None:
    """The schemas of other tools still apply: functions from elsewhere often have odd schemas."""
    engine, check = FakeEngine("x"), RecordingCheck("9999991")
    tools = [function_tool("f", {"type": "boolean"}), function_tool("g", HOSTILE)]
    async with checked_client(check, engine) as http:
        answer = await http.post("/v1/chat/completions", json={**MESSAGES, "tools": tools})
    assert answer.status_code == 200, answer.text
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert "boolean" in grammar.value
    assert "9999991" not in grammar.value


async def test_response_tool_without_strict_is_not_strict_if_its_schema_cannot_be_compiled() -> None:
    parameters = {"type": "object", "properties": {"a": HOSTILE}, "required": ["a"], "additionalProperties": False}
    fine = {**parameters, "properties": {"a": {}}}
    tools = [{"type": "function", "name": name, "parameters": p} for name, p in (("f", fine), ("g", parameters))]
    async with checked_client(RecordingCheck("9999991")) as http:
        answer = await http.post("/v1/responses", json={"input": "hi", "tools": tools})
    assert answer.status_code == 200, answer.text
    assert [tool["strict"] for tool in answer.json()["tools"]] == [True, False]


async def test_long_grammar_is_refused_without_being_compiled() -> None:
    check = RecordingCheck()
    async with checked_client(check) as http:
        answer = await http.post("/v1/completions", json=json_schema_format({"enum": ["x" * 1_000_001]}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == AT
    assert not check.checked
