from __future__ import annotations

from typing import Any

import pytest

from syringa.schema_types import ALL, SchemaTypes, type_of

DEFS = {"text": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "null"}]}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({}, ALL),
        (True, ALL),
        (False, set()),
        ({"type": "string"}, {"string"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, 2.5, None]}, {"string", "number", "integer", "null"}),
        ({"const": [1]}, {"array"}),
        ({"type": ["string", "null"], "enum": ["a"]}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, {"string", "object"}),
        ({"oneOf": [{"const": 1}, {"$ref": "#/$defs/text"}]}, {"string", "integer"}),
        ({"allOf": [{"type": ["string", "null"]}, {"$ref": "#/$defs/text"}]}, {"string"}),
        ({"$ref": "#/$defs/text", "type": ["string", "null"]}, {"string"}),
        ({"$ref": "#/$defs/loop"}, {"null"}),
        ({"$ref": "#/$defs/gone"}, ALL),
        ({"$ref": "https://example.com/x"}, ALL),
        ({"type": "integer", "allOf": "nonsense", "anyOf": None}, {"integer"}),
    ],
)
def test_allowed_types_of_a_schema(schema: Any, types: set[str]) -> None:
    assert SchemaTypes({"$defs": DEFS}).allowed(schema) == types


@pytest.mark.parametrize(
    ("schema", "name", "types"),
    [
        ({"properties": {"a": {"type": "string"}}}, "a", {"string"}),
        ({"properties": {"a": {"type": "string"}}}, "b", ALL),
        ({"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "null"}}, "b", {"null"}),
        ({"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "string"}}, None, {"string"}),
        ({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False}, "a", {"null"}),
        ({"patternProperties": {"^a": {"type": "null"}}}, "a", ALL),
        ({"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"a": {"type": "boolean"}}}}}, "a", {"boolean"}),
        (
            {"anyOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"type": "null"}}}, {}]},
            "a",
            {"string", "null"},
        ),
        (
            {"allOf": [{"properties": {"a": {"type": ["string", "null"]}}}, {"properties": {"a": {"const": ""}}}]},
            "a",
            {"string"},
        ),
        ({"allOf": [{"properties": {"a": {"type": "null"}}}, {"properties": {"a": {"const": ""}}}]}, "a", ALL),
        ({"$ref": "#"}, "a", ALL),
        (None, "a", ALL),
    ],
)
def test_types_of_a_parameter(schema: Any, name: str | None, types: set[str]) -> None:
    assert SchemaTypes(schema).parameter(name) == types


def test_shared_definitions_are_resolved_once() -> None:
    defs: dict[str, Any] = {"n0": {"type": "string"}}
    for index in range(1, 30):
        defs[f"n{index}"] = {"anyOf": [{"$ref": f"#/$defs/n{index - 1}"}] * 4}
    assert SchemaTypes({"$defs": defs}).allowed({"$ref": "#/$defs/n20"}) == {"string"}


def test_type_of_returns_the_narrowest_type() -> None:
    assert [type_of(each) for each in (None, True, "", 1, 1.0, 1.5, [], {})] == [
        "null",
        "boolean",
        "string",
        "integer",
        "integer",
        "number",
        "array",
        "object",
    ]
