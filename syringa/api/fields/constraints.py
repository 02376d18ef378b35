"""`grammar` and `response_format`: two ways to constrain the text, one constraint for the engine."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from syringa.api.decoding import convert
from syringa.api.fields.annotations import record
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest, SyringaError
from syringa.output_formats import CallFormat
from syringa.prompt.chat.tools import ToolUse, closed
from syringa.prompt.grammar.answer import Thinking, answer_grammar
from syringa.prompt.grammar.compile_pool import in_workshop
from syringa.prompt.grammar.lark_limits import check_grammar_text
from syringa.prompt.grammar.schema import enforceable
from syringa.prompt.grammar.validation import validate
from syringa.types import Grammar

ANY_OBJECT = '{"type":"object"}'
_TEXT = {"type": ["string", "null"]}
_SCHEMA = {"type": ["object", "boolean"], "description": "A JSON schema."}

GRAMMAR_SCHEMA = {
    "anyOf": [
        record(("type", "value"), type={"enum": ["regex", "lark"]}, value={"type": "string"}),
        record(
            ("type", "value"),
            type={"enum": ["json_schema", "llguidance"]},
            value={"type": ["object", "boolean", "string"], "description": "An object, or its JSON text."},
        ),
    ]
}
FORMAT_SCHEMA = {
    "anyOf": [
        record(("type",), type={"enum": ["text", "json_object"]}),
        record(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=record(
                ("schema",), name=_TEXT, description=_TEXT, schema=_SCHEMA, strict={"type": ["boolean", "null"]}
            ),
        ),
    ]
}


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


def to_grammar(grammar: Any, response_format: Any, ignored: list[str] | None = None) -> Grammar | None:
    """The one constraint that a request asks for. What is not honoured of it is added to `ignored`."""
    ignored = [] if ignored is None else ignored
    shape = None if response_format is None else _from_format(response_format, ignored)
    if grammar is None:
        return shape
    if shape is not None:
        raise InvalidRequest("grammar and response_format cannot both constrain the answer.", param="grammar")
    given = convert(grammar, GrammarField, path="grammar", ignored=ignored)
    match given.type:
        case "regex" | "lark":
            if not isinstance(given.value, str):
                raise InvalidRequest("grammar.value: expected a string.", param="grammar.value")
            return _own_grammar(Grammar(given.type, given.value))
        case "json_schema":
            return schema_grammar(_json_value(given.value), "grammar.value", strict=False, ignored=ignored)
        case "llguidance":
            return _own_grammar(Grammar(given.type, _encode(_json_value(given.value))))
    raise InvalidRequest("grammar.type: expected regex, json_schema, lark or llguidance.", param="grammar.type")


def schema_grammar(schema: Any, path: str, *, strict: bool, ignored: list[str], close: bool = False) -> Grammar:
    """A JSON schema as a grammar. What cannot be enforced is refused under `strict`, otherwise added to `ignored`.

    `close`: an object has no properties but those that are declared, where the schema is silent on others.
    """
    try:
        kept, left_out, unknown = enforceable(schema)
    except InvalidRequest as error:
        where = path + (error.param or "")
        raise InvalidRequest(f"{where}: {error.message}", param=where, code=error.code) from None
    if strict and left_out:
        names = ", ".join(path + each for each in left_out[:20])
        raise InvalidRequest(
            f"This cannot be enforced, and strict is true: {names}. Leave it out of the schema, or leave out strict.",
            param=path + left_out[0],
        )
    ignored += [path + each for each in left_out + unknown]
    return Grammar("json_schema", _encode(closed(kept) if close and isinstance(kept, dict) else kept))


def check_grammar(grammar: Grammar, param: str) -> None:
    """Refuses a grammar that cannot be compiled, under the name of the field that it came from."""
    try:
        validate(grammar)
    except SyringaError as error:
        raise InvalidRequest(error.message, param=param, code=error.code) from None


async def compose(
    model: ServedModel,
    *,
    thinking: Thinking | None = None,
    constraint: Grammar | None = None,
    tools: ToolUse | None = None,
    format: CallFormat = "plain",
    asked: str = "tools",
) -> Grammar | None:
    """The grammar of all that the model may write. Raises `InvalidRequest` for what llguidance refuses of it.

    `asked`: where in the request it comes from.
    """

    def compiled() -> Grammar | None:
        grammar = answer_grammar(
            model.tokenizer.spelling, thinking=thinking, constraint=constraint, tools=tools, format=format
        )
        if grammar is not None and grammar is not constraint:
            check_grammar(grammar, asked)
        return grammar

    if thinking is None and tools is None:
        return constraint
    return await in_workshop(compiled, asked)


def _from_format(given: Any, ignored: list[str]) -> Grammar | None:
    shape = convert(given, ResponseFormat, path="response_format", ignored=ignored)
    if shape.type != "json_schema" and shape.json_schema is not None:
        ignored.append("response_format.json_schema")
    match shape.type:
        case "text":
            return None
        case "json_object":
            return Grammar("json_schema", ANY_OBJECT)
        case "json_schema":
            path = "response_format.json_schema"
            named = convert(shape.json_schema, JsonSchema, path=path, ignored=ignored)
            if not isinstance(named.schema, dict | bool):
                raise InvalidRequest(f"{path}.schema: expected a JSON schema.", param=f"{path}.schema")
            return schema_grammar(
                named.schema, f"{path}.schema", strict=bool(named.strict), ignored=ignored, close=True
            )
    raise InvalidRequest(
        "response_format.type: expected text, json_object or json_schema.", param="response_format.type"
    )


def _own_grammar(grammar: Grammar) -> Grammar:
    """One that the client wrote, and that is not out of all bounds."""
    check_grammar_text(grammar, "grammar.value")
    return grammar


def _encode(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest("grammar.value: nested too deeply.", param="grammar.value") from None


def _json_value(value: Any) -> dict[str, Any] | bool:
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if isinstance(found, dict | bool):
            return found
    except (ValueError, RecursionError):
        pass
    raise InvalidRequest("grammar.value: expected an object, or its JSON text.", param="grammar.value")
