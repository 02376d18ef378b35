"""Calls sampled at random from a grammar parse to arguments that follow the schema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import TextSegment
from syringa.output.tools.formats import create_tool_parser
from syringa.output_formats import GEMMA_FORMATS, TAGGED_FORMATS, ToolCallFormat
from syringa.prompt.chat.tools import Tool, close_schema
from syringa.prompt.grammar.schema import enforceable_schema
from tests.prompt.grammar.matching import byte_tokenizer, call_grammar, use
from tests.prompt.grammar.tools.unquoted_formats import FORMATS, MARKERS, draw

_ENUM = {"enum": ["red", "dark blue", "5", "true", "</parameter>", "", 5, None, [1, "x"], {"a": 1.5}]}
_TREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
SCHEMAS: dict[str, dict[str, Any]] = {
    "strings": _object(
        ["a", "c"],
        a={"type": "string", "minLength": 2, "maxLength": 4},
        b={"type": "string", "pattern": "b+"},
        c={"type": "string", "pattern": r"^(x|\d{2,3})\s[^a/]$"},
        d={"allOf": [{"type": "string", "maxLength": 6}, {"pattern": "^a|z$"}], "minLength": 3},
        e={"const": "a\nb"},
        f={"type": "string", "enum": ["one", "</arg_value>two", "<escape>"]},
    ),
    "numbers": _object(
        ["a"],
        a={"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
        b={"type": "number", "minimum": 0, "maximum": 1},
        c={"type": "boolean"},
        d={"type": "null"},
        e={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
    ),
    "unions": _object(
        ["a", "b"],
        a={"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 10, "maximum": 99}]},
        b={"type": ["string", "number", "null"], "maxLength": 3},
        c=_ENUM,
        d={"oneOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-z]{1,3}$"}]},
        e={
            "anyOf": [
                {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
                {"type": "string", "maxLength": 2},
            ]
        },
        f={"type": ["boolean", "string", "object", "array"], "maxLength": 5, "maxItems": 1, "maxProperties": 1},
    ),
    "nested": _object(
        ["a", "b"],
        a=_object(["x"], x={"type": "string", "maxLength": 2}, y={"type": "integer"}, z={"type": "boolean"}),
        b={"type": "array", "items": _object([], p={"type": "string", "maxLength": 2}), "minItems": 1, "maxItems": 3},
        c={
            "type": "array",
            "prefixItems": [{"type": "string", "maxLength": 2}, {"type": "null"}],
            "items": {"type": "boolean"},
            "minItems": 1,
            "maxItems": 4,
        },
        d={"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": False},
        e={"type": "array", "prefixItems": [{"const": 1}, {"const": 2}, {"const": 3}], "maxItems": 2},
    ),
    "references": {
        **_object(["tree"], tree={"$ref": "#/$defs/tree"}, again={"$ref": "#/properties/tree"}),
        "$defs": {"tree": _TREE},
    },
    "alternatives": {
        "anyOf": [
            {**_object(["a"], a={"type": "string", "maxLength": 3}), "additionalProperties": False},
            {**_object(["a", "b"], a={"type": "integer", "maximum": 99}, b={"$ref": "#/$defs/b"})},
        ],
        "$defs": {"b": {"type": "string", "maxLength": 2}},
    },
    "together": {
        "allOf": [_object(["a"], a={"type": "string"}), _object([], a={"maxLength": 3}, b={"type": "integer"})],
    },
    "others": {
        "type": "object",
        "properties": {"known": {"type": "integer"}},
        "patternProperties": {"^x_": {"type": "boolean"}},
        "additionalProperties": {"type": "string", "maxLength": 3},
    },
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "anything": _object(["a"], a={}, b=True),
    "formats": _object(list(_FORMATS), **{name: {"type": "string", "format": name} for name in _FORMATS}),
}


def endings(format: ToolCallFormat) -> list[str]:
    """Return texts that random sampling would rarely reach."""
    if format in GEMMA_FORMATS:
        markers = GEMMA_FORMATS[format]
        return [markers.quote, markers.end, "}", "]"]
    tags = TAGGED_FORMATS[format]
    pad = "\n" if tags.padded else ""
    return [f"{pad}{tags.value_end}", tags.value_end, tags.end, tags.call_end or tags.end]


def parsed(format: ToolCallFormat, text: str, schema: dict[str, Any], chance: random.Random) -> list[dict[str, Any]]:
    parser = create_tool_parser(format, 0, {"f": schema})
    parts = []
    while text:
        length = chance.choice((1, 3, 20, len(text)))
        parts += parser.feed([TextSegment(text[:length])])
        text = text[length:]
    parts += parser.flush()
    calls: list[str] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            calls.append("")
        elif isinstance(part, ToolCallDelta):
            calls[part.call] += part.arguments
        else:
            assert isinstance(part, TextSegment)
            assert not part.text, text
    return [json.loads(each) for each in calls]


@pytest.mark.parametrize("markers", ["spelled", "special"])
@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("format", FORMATS)
def test_parsed_arguments_of_sampled_calls_follow_the_schema(format: ToolCallFormat, name: str, markers: str) -> None:
    given = SCHEMAS[name]
    schema, left_out, _ = enforceable_schema(close_schema(given))
    assert not left_out
    tool = Tool(name="f", parameters=given, schema=schema)
    tokenizer = byte_tokenizer(*(MARKERS[format] if markers == "special" else ()))
    grammar = call_grammar(use("required", tool, names="f"), format, tokenizer)
    check = jsonschema.Draft202012Validator(given, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    done = 0
    for seed in range(25):
        text = draw(grammar, tokenizer, seed, endings(format))
        if text is None:
            continue
        calls = parsed(format, text, given, random.Random(seed))
        assert calls
        for arguments in calls:
            problems = [error.message for error in check.iter_errors(arguments)]
            assert not problems, (text, arguments, problems)
        done += 1
    assert done >= 5
