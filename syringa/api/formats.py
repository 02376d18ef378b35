"""`grammar` and `response_format`: two ways to constrain the text, one constraint for the engine."""

from __future__ import annotations

from typing import Any

import msgspec

from syringa.api.common import convert
from syringa.errors import InvalidRequest, SyringaError
from syringa.prompt.grammar import validate
from syringa.types import Grammar

_ANY_OBJECT = '{"type":"object"}'


class GrammarField(msgspec.Struct, kw_only=True):
    """A constraint on the text. For `json_schema` and `llguidance` the value is an object or its JSON text."""

    type: str
    value: Any


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`text`, `json_object`, or `json_schema` with the schema."""

    type: str
    json_schema: Any = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


def to_grammar(grammar: Any, response_format: Any) -> Grammar | None:
    """The one constraint that a request asks for."""
    shape = None if response_format is None else _from_format(response_format)
    if grammar is None:
        return shape
    if shape is not None:
        raise InvalidRequest("grammar and response_format cannot both constrain the answer.", param="grammar")
    given = convert(grammar, GrammarField, path="grammar")
    match given.type:
        case "regex" | "lark":
            if not isinstance(given.value, str):
                raise InvalidRequest("grammar.value: expected a string.", param="grammar.value")
            return Grammar(given.type, given.value)
        case "json_schema" | "llguidance":
            return Grammar(given.type, _json_text(given.value))
    raise InvalidRequest("grammar.type: expected regex, json_schema, lark or llguidance.", param="grammar.type")


def check_grammar(grammar: Grammar, param: str) -> None:
    """Refuses a grammar that cannot be compiled, under the name of the field that it came from."""
    try:
        validate(grammar)
    except SyringaError as error:
        raise InvalidRequest(error.message, param=error.param or param, code=error.code) from None


def _from_format(given: Any) -> Grammar | None:
    shape = convert(given, ResponseFormat, path="response_format")
    match shape.type:
        case "text":
            return None
        case "json_object":
            return Grammar("json_schema", _ANY_OBJECT)
        case "json_schema":
            named = convert(shape.json_schema, JsonSchema, path="response_format.json_schema")
            if not isinstance(named.schema, dict | bool):
                param = "response_format.json_schema.schema"
                raise InvalidRequest(f"{param}: expected a JSON schema.", param=param)
            return Grammar("json_schema", _encode(named.schema))
    raise InvalidRequest(
        "response_format.type: expected text, json_object or json_schema.", param="response_format.type"
    )


def _json_text(value: Any) -> str:
    if isinstance(value, dict | bool):
        return _encode(value)
    try:
        if isinstance(value, str) and isinstance(msgspec.json.decode(value), dict | bool):
            return value
    except (msgspec.DecodeError, RecursionError):
        pass
    raise InvalidRequest("grammar.value: expected an object, or its JSON text.", param="grammar.value")


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
