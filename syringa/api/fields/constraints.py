"""The constraint of a request, and the grammar of the whole output.

A request has one constraint at most: `grammar`, OpenAI's `response_format`, llama.cpp's `json_schema`, vLLM's
`structured_outputs`, or one of its older `guided_…` fields.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from syringa.api.decoding import convert
from syringa.api.fields.constraint_fields import (
    ConstraintFields,
    GrammarField,
    JsonSchema,
    ResponseFormat,
    StructuredOutputs,
)
from syringa.api.fields.grammars import (
    choice_grammar,
    lark_grammar,
    lark_or_gbnf_grammar,
    llguidance_grammar,
    read_json,
    read_whitespace_pattern,
    regex_grammar,
    schema_grammar,
    tag_grammar,
)
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.output_formats import ToolCallFormat
from syringa.prompt.chat.tools import ANY_ARGUMENTS, Tool, ToolUse, close_schema
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.grammar.output_grammar import ReasoningOptions, build_output_grammar
from syringa.prompt.grammar.schema import close_objects
from syringa.types import Grammar

ANY_OBJECT = {"type": "object"}
MAX_CHARACTERS = 1_000_000  # of the grammar of the whole output
_FIELDS = (
    *("grammar", "response_format", "json_schema", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_JSON_KINDS = ("json", "json_object", "structural_tag")  # those that the options on JSON apply to
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_FORMAT_FIELDS = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}
# Constraints on text that a parser of tool calls could take for a call.
_WITHOUT_TOOLS = (
    *("grammar", "guided_regex", "guided_grammar"),
    *("structured_outputs.regex", "structured_outputs.grammar", "structured_outputs.structural_tag"),
)


def constraint_name(fields: ConstraintFields) -> str | None:
    """Return the field with the constraint of a request, such as `structured_outputs.json`; None if it has none.

    Raises `InvalidRequest` if it has two.
    """
    names = [name for name in _FIELDS if getattr(fields, name) not in (None, "")]
    if "response_format" in names and (fields.response_format or {}).get("type") == "text":
        names.remove("response_format")
    if "structured_outputs" in names:
        given = fields.structured_outputs or {}
        # `json_object: false` asks for nothing.
        kinds = [
            kind for kind in _KINDS if given.get(kind) is not None and (kind, given[kind]) != ("json_object", False)
        ]
        if not kinds:
            raise InvalidRequest(
                f"structured_outputs: expected one of {', '.join(_KINDS)}.", param="structured_outputs"
            )
        at = names.index("structured_outputs")
        names[at : at + 1] = [f"structured_outputs.{kind}" for kind in kinds]
    if len(names) > 1:
        raise InvalidRequest(f"{names[0]} and {names[1]} cannot be combined.", param=names[0])
    return names[0] if names else None


def constraint_path(fields: ConstraintFields) -> str:
    """Return the path of the value from which the constraint of a request is made."""
    name = constraint_name(fields)
    if name == "grammar" and isinstance(fields.grammar, dict):
        return "grammar.value"
    if name == "response_format":
        given = fields.response_format or {}
        match given.get("type"):
            case "json_schema":
                return "response_format.json_schema.schema"
            case "json_object" if given.get("schema"):
                return "response_format.schema"
    return name or "response_format"


def check_tools_with_constraint(fields: ConstraintFields) -> None:
    """Raise `InvalidRequest` if the constraint of a request cannot be combined with tools."""
    name = constraint_name(fields)
    tag = name == "response_format" and (fields.response_format or {}).get("type") == "structural_tag"
    if name in _WITHOUT_TOOLS or tag:
        raise InvalidRequest(f"{name} and tools cannot be combined.", param=name)


async def read_constraint(fields: ConstraintFields, vocabulary: LarkVocabulary, ignored: list[str]) -> Grammar | None:
    """Return the constraint of a request. The paths of parts that are not enforced are appended to `ignored`."""
    if fields.guided_decoding_backend is not None:
        ignored.append("guided_decoding_backend")
    name = constraint_name(fields)
    if name is None:
        if fields.response_format is not None:
            _read_format(fields, vocabulary, "", ignored)
        if fields.guided_whitespace_pattern is not None:
            ignored.append("guided_whitespace_pattern")
        return None
    return await asyncio.to_thread(_to_grammar, name, fields, vocabulary, ignored)


def _to_grammar(name: str, fields: ConstraintFields, vocabulary: LarkVocabulary, ignored: list[str]) -> Grammar | None:
    if fields.structured_outputs is not None:
        if fields.guided_whitespace_pattern is not None:
            ignored.append("guided_whitespace_pattern")
        return _read_structured_outputs(fields.structured_outputs, name, vocabulary, ignored)
    whitespace = ""
    if fields.guided_whitespace_pattern is not None:
        whitespace = read_whitespace_pattern(fields.guided_whitespace_pattern, "guided_whitespace_pattern")
        if name not in ("response_format", "json_schema", "guided_json"):
            ignored.append("guided_whitespace_pattern")
    match name:
        case "grammar":
            return _read_grammar(fields.grammar, ignored)
        case "response_format":
            return _read_format(fields, vocabulary, whitespace, ignored)
        case "guided_regex":
            return regex_grammar(fields.guided_regex, name)
        case "guided_choice":
            return choice_grammar(fields.guided_choice or [], name)
        case "guided_grammar":
            return lark_or_gbnf_grammar(fields.guided_grammar, name)
    schema = read_json(getattr(fields, name), name)
    return schema_grammar(schema, name, ignored=ignored, close=close_schema, whitespace=whitespace)


def _read_grammar(given: Any, ignored: list[str]) -> Grammar:
    if isinstance(given, str):
        return lark_or_gbnf_grammar(given, "grammar")
    field = convert(given, GrammarField, path="grammar", ignored=ignored)
    path = "grammar.value"
    match field.type:
        case "regex":
            return regex_grammar(field.value, path)
        case "lark":
            return lark_grammar(field.value, path)
        case "json_schema":
            return schema_grammar(read_json(field.value, path), path, ignored=ignored)
        case "llguidance":
            return llguidance_grammar(field.value, path)
    raise InvalidRequest("grammar.type: expected regex, json_schema, lark or llguidance.", param="grammar.type")


def _read_format(
    fields: ConstraintFields, vocabulary: LarkVocabulary, whitespace: str, ignored: list[str]
) -> Grammar | None:
    given = fields.response_format
    shape = convert(given, ResponseFormat, path="response_format", ignored=ignored)
    if shape.type not in _FORMAT_FIELDS:
        raise InvalidRequest(
            f"response_format.type: expected one of {', '.join(_FORMAT_FIELDS)}.", param="response_format.type"
        )
    for name in ("json_schema", "schema", "format", "structures", "triggers"):
        if name not in _FORMAT_FIELDS[shape.type] and getattr(shape, name) is not None:
            ignored.append(f"response_format.{name}")
    schema = ANY_OBJECT if shape.schema is None or shape.schema == {} else shape.schema
    path, strict = "response_format.schema", False
    match shape.type:
        case "text":
            return None
        case "structural_tag":
            value = {name: getattr(shape, name) for name in _FORMAT_FIELDS["structural_tag"]}
            return tag_grammar(
                value, "response_format", vocabulary, ignored=ignored, close=close_schema, whitespace=whitespace
            )
        case "json_schema":
            path = "response_format.json_schema"
            named = convert(shape.json_schema, JsonSchema, path=path, ignored=ignored)
            path, schema, strict = f"{path}.schema", named.schema, bool(named.strict)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{path}: expected a JSON schema.", param=path)
    return schema_grammar(schema, path, strict=strict, ignored=ignored, close=close_schema, whitespace=whitespace)


def _read_structured_outputs(
    given: dict[str, Any], name: str, vocabulary: LarkVocabulary, ignored: list[str]
) -> Grammar:
    options = convert(given, StructuredOutputs, path="structured_outputs", ignored=ignored)
    kind = name.partition(".")[2]
    if options.whitespace_pattern and options.disable_any_whitespace:
        path = "structured_outputs.whitespace_pattern"
        raise InvalidRequest(f"{path} and structured_outputs.disable_any_whitespace cannot be combined.", param=path)
    if options.disable_fallback is not None:
        ignored.append("structured_outputs.disable_fallback")
    if kind not in _JSON_KINDS:
        ignored += [f"structured_outputs.{option}" for option in _OPTIONS if getattr(options, option)]
    whitespace = options.whitespace_pattern or ""
    if whitespace:
        whitespace = read_whitespace_pattern(whitespace, "structured_outputs.whitespace_pattern")
    close = {None: close_schema, True: close_objects, False: None}[options.disable_additional_properties]
    match kind:
        case "regex":
            return regex_grammar(options.regex, name)
        case "choice":
            return choice_grammar(options.choice or [], name)
        case "grammar":
            return lark_or_gbnf_grammar(options.grammar, name)
        case "structural_tag":
            return tag_grammar(
                options.structural_tag, name, vocabulary, ignored=ignored, close=close, whitespace=whitespace
            )
    schema = ANY_OBJECT if kind == "json_object" else read_json(options.json, name)
    return schema_grammar(schema, name, ignored=ignored, close=close, whitespace=whitespace)


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
