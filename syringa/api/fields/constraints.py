"""The `grammar` and `response_format` fields, and the grammar of the whole output."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from syringa.api.decoding import convert
from syringa.api.fields.schema import object_schema
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.output_formats import ToolCallFormat
from syringa.prompt.chat.tools import ANY_ARGUMENTS, Tool, ToolUse, close_schema
from syringa.prompt.grammar.output_grammar import ReasoningOptions, build_output_grammar
from syringa.prompt.grammar.schema import enforceable_schema
from syringa.prompt.grammar.validation import check_grammar_text
from syringa.types import Grammar

ANY_OBJECT = '{"type":"object"}'
MAX_CHARACTERS = 1_000_000  # of the grammar of the whole output
_TEXT = {"type": ["string", "null"]}
_SCHEMA = {"type": ["object", "boolean"], "description": "A JSON schema."}

GRAMMAR_SCHEMA = {
    "anyOf": [
        object_schema(("type", "value"), type={"enum": ["regex", "lark"]}, value={"type": "string"}),
        object_schema(
            ("type", "value"),
            type={"enum": ["json_schema", "llguidance"]},
            value={"type": ["object", "boolean", "string"], "description": "A JSON object, or its text."},
        ),
    ]
}
FORMAT_SCHEMA = {
    "anyOf": [
        object_schema(("type",), type={"enum": ["text", "json_object"]}),
        object_schema(
            ("type", "json_schema"),
            type={"const": "json_schema"},
            json_schema=object_schema(
                ("schema",), name=_TEXT, description=_TEXT, schema=_SCHEMA, strict={"type": ["boolean", "null"]}
            ),
        ),
    ]
}


class GrammarField(msgspec.Struct, kw_only=True):
    """A constraint on the output. For `json_schema` and `llguidance` the value is a JSON object or its text."""

    type: str
    value: Any


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`text`, `json_object`, or `json_schema` with a schema."""

    type: str
    json_schema: Any = None


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


def to_grammar(grammar: Any, response_format: Any, ignored: list[str] | None = None) -> Grammar | None:
    """Return the constraint of a request. The paths of parts that are not enforced are appended to `ignored`."""
    ignored = [] if ignored is None else ignored
    format_grammar = None if response_format is None else _from_format(response_format, ignored)
    if grammar is None:
        return format_grammar
    if format_grammar is not None:
        raise InvalidRequest("grammar and response_format cannot be combined.", param="grammar")
    given = convert(grammar, GrammarField, path="grammar", ignored=ignored)
    match given.type:
        case "regex" | "lark":
            if not isinstance(given.value, str):
                raise InvalidRequest("grammar.value: expected a string.", param="grammar.value")
            return _check_client_grammar(Grammar(given.type, given.value))
        case "json_schema":
            return schema_grammar(_json_value(given.value), "grammar.value", strict=False, ignored=ignored)
        case "llguidance":
            return _check_client_grammar(Grammar(given.type, _encode(_json_value(given.value))))
    raise InvalidRequest("grammar.type: expected regex, json_schema, lark or llguidance.", param="grammar.type")


def schema_grammar(schema: Any, path: str, *, strict: bool, ignored: list[str], close: bool = False) -> Grammar:
    """Return a JSON schema as a grammar.

    Keywords that cannot be enforced are refused under `strict`, otherwise their paths are appended to `ignored`.
    `close` excludes undeclared properties where the schema does not mention them.
    """
    try:
        kept, left_out, unknown = enforceable_schema(schema)
    except InvalidRequest as error:
        where = path + (error.param or "")
        raise InvalidRequest(f"{where}: {error.message}", param=where, code=error.code) from None
    if strict and left_out:
        names = ", ".join(path + each for each in left_out[:20])
        raise InvalidRequest(
            f"Cannot be enforced although strict is true: {names}. Remove it from the schema, or remove strict.",
            param=path + left_out[0],
        )
    ignored += [path + each for each in left_out + unknown]
    return Grammar("json_schema", _encode(close_schema(kept) if close and isinstance(kept, dict) else kept))


async def compose_grammar(
    model: ServedModel,
    *,
    tenant: str,
    cache_salt: str | None,
    reasoning: ReasoningOptions | None = None,
    constraint: Grammar | None = None,
    tools: ToolUse | None = None,
    format: ToolCallFormat = "plain",
    source_field: str = "tools",
    unenforced: list[str] | None = None,
) -> Grammar | None:
    """Return the grammar of the whole output: reasoning, then text under a constraint, or tool calls.

    Raises `InvalidRequest`, with `source_field` or the path of a tool's schema as `param`, if it cannot be compiled.
    The schemas of best-effort tools are dropped instead, and the names of these tools appended to `unenforced`.
    """

    async def compose(tools: ToolUse | None) -> Grammar | None:
        grammar = constraint
        if reasoning is not None or tools is not None:
            grammar = await asyncio.to_thread(
                build_output_grammar,
                model.tokenizer.lark_vocabulary,
                reasoning=reasoning,
                constraint=constraint,
                tools=tools,
                tool_call_format=format,
            )
        return None if grammar is None else await check(grammar, source_field)

    async def check(grammar: Grammar, param: str) -> Grammar:
        if len(grammar.value) > MAX_CHARACTERS:
            raise InvalidRequest(
                f"Invalid grammar: at most {MAX_CHARACTERS} characters, got {len(grammar.value)}.",
                param=param,
                code="invalid_grammar",
            )
        try:
            return msgspec.structs.replace(grammar, memory=await model.check_grammar(grammar, tenant, cache_salt))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=param, code=error.code) from None

    async def enforceable(tool: Tool) -> Tool:
        try:
            await check(Grammar("json_schema", json.dumps(tool.schema)), tool.path)
            return tool
        except InvalidRequest as error:
            if not tool.best_effort:
                raise InvalidRequest(f"{tool.path}: {error.message}", param=tool.path, code=error.code) from None
        if unenforced is not None:
            unenforced.append(tool.name)
        return msgspec.structs.replace(tool, schema=ANY_ARGUMENTS, strict=False)

    try:
        return await compose(tools)
    except InvalidRequest:
        if tools is None:
            raise
        known = [await enforceable(tool) if tool.name in tools.callable else tool for tool in tools.tools]
        if known == list(tools.tools):
            raise
    return await compose(msgspec.structs.replace(tools, tools=known))


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


def _check_client_grammar(grammar: Grammar) -> Grammar:
    """Return a grammar written by the client if it is within the limits. Raises `InvalidRequest`."""
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
    raise InvalidRequest("grammar.value: expected a JSON object, or its text.", param="grammar.value")
