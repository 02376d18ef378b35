"""Schemas that are too expensive to compile, or without valid values, are rejected before compilation."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.schema import MAX_NODES, MAX_OPTIONAL_PROPERTIES, enforceable_schema
from syringa.prompt.grammar.schema_overlap import MAX_PATTERNS

MANY = range(20)


def pattern(index: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f".*a{{{index}}}.*b"}


def chained(count: int) -> dict[str, Any]:
    defs = {f"d{each}": {**pattern(each), "$ref": f"#/$defs/d{each + 1}"} for each in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**defs, f"d{count}": {}}}


ENFORCED_FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "allOf": ({"allOf": [pattern(each) for each in MANY]}, ""),
    "nested": ({"allOf": [{"allOf": [pattern(3 * a + b) for b in range(3)]} for a in range(6)]}, ""),
    "formats": ({"allOf": [{"type": "string", "format": each} for each in ENFORCED_FORMATS]}, ""),
    "references": (chained(20), ""),
    "escaped references": (
        {
            "allOf": [{"$ref": f"#/%24defs/%64{each}"} for each in MANY],
            "$defs": {f"d{each}": pattern(each) for each in MANY},
        },
        "",
    ),
    "anchors": (
        {
            "allOf": [{"$ref": f"#a{each}"} for each in MANY],
            "$defs": {f"d{each}": {**pattern(each), "$anchor": f"a{each}"} for each in MANY},
        },
        "",
    ),
    "addresses": (
        {
            "allOf": [{"$ref": "http://x/a#/$defs/y"}],
            "$defs": {"x": {"$id": "http://x/a", "$defs": {"y": {"allOf": [pattern(each) for each in MANY]}}}},
        },
        "",
    ),
    "a property": ({"allOf": [{"properties": {"x": pattern(each)}} for each in MANY]}, ".properties.x"),
    "other properties": (
        {"allOf": [{"additionalProperties": pattern(each)} for each in MANY]},
        ".additionalProperties",
    ),
    "by pattern": (
        {"allOf": [{"patternProperties": {"^x": pattern(each)}} for each in MANY]},
        ".patternProperties.^x",
    ),
    "named and by pattern": (
        {"properties": {"x": {}}, "patternProperties": {f"^x{each}": pattern(each) for each in MANY}},
        ".properties.x",
    ),
    "items": ({"properties": {"l": {"allOf": [{"items": pattern(each)} for each in MANY]}}}, ".properties.l.items"),
    "one item": ({"allOf": [{"prefixItems": [{}, pattern(each)]} for each in MANY]}, ".prefixItems[1]"),
    "in an alternative": ({"anyOf": [{"type": "null"}, {"allOf": [pattern(each) for each in MANY]}]}, ""),
    "across alternatives": ({"allOf": [{"anyOf": [pattern(2 * a), pattern(2 * a + 1)]} for a in range(7)]}, ""),
    "names by pattern": ({"patternProperties": {f"^a{each}$": {} for each in range(50)}}, ""),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_patterns_on_one_value_are_bounded(name: str) -> None:
    schema, path = TOO_MUCH[name]
    started = time.process_time()
    with pytest.raises(InvalidRequest, match=r"at most|more than") as caught:
        enforceable_schema(schema)
    assert caught.value.param == path
    assert time.process_time() - started < 0.5


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


FINE: dict[str, Any] = {
    "few": {"allOf": [{"type": "string", "pattern": f"^[a-z]{{{each},40}}$"} for each in range(MAX_PATTERNS)]},
    "the same": {"allOf": [pattern(1) for _ in MANY]},
    "apart": record(**{f"p{each}": pattern(each) for each in MANY}),
    "alternatives": {"anyOf": [record(id=pattern(each)) for each in MANY]},
    "inheritance": {
        "allOf": [
            record(**{f"a{each}": {"type": "string", "format": ENFORCED_FORMATS[each]} for each in range(10)}),
            record(**{f"b{each}": pattern(each) for each in MANY}),
        ]
    },
    "by pattern": {"type": "object", "patternProperties": {f"^a{each}_": pattern(each) for each in MANY}},
    "list": record(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]}),
    "optional": {"type": "object", "properties": {"next": {"$ref": "#"}}},
    "alternative": {"anyOf": [{"$ref": "#"}, {"type": "string"}]},
    "tree": {"type": "array", "items": {"$ref": "#"}},
    "mutual": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "string"}]},
            "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]},
        },
    },
    "optional properties": {"properties": {str(each): {"type": "string"} for each in range(MAX_OPTIONAL_PROPERTIES)}},
}


@pytest.mark.parametrize("name", FINE)
def test_ordinary_schemas_pass(name: str) -> None:
    before = json.dumps(FINE[name])
    assert json.dumps(enforceable_schema(FINE[name])[0]) == before


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, ""),
        ({"anyOf": [{"$ref": "#"}]}, ""),
        ({"allOf": [{"$ref": "#"}, {"type": "string"}]}, ""),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, ""),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, ".properties.x"),
        (record(a={"$ref": "#"}), ".properties.a"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, ".items"),
    ],
    ids=str,
)
def test_endless_recursion_is_rejected(schema: Any, path: str) -> None:
    with pytest.raises(InvalidRequest, match="refers to itself") as caught:
        enforceable_schema(schema)
    assert caught.value.param == path


def test_schema_size_is_checked_first() -> None:
    optional = {"items": {"properties": {str(each): {"type": "string"} for each in range(10_000)}}}
    names = [str(each) for each in range(MAX_NODES)]
    nodes = {"properties": {each: {"type": "string"} for each in names}, "required": names}
    started = time.process_time()
    with pytest.raises(InvalidRequest, match="400 properties can be optional, got 10000") as caught:
        enforceable_schema(optional)
    assert caught.value.param == ".items.properties"
    with pytest.raises(InvalidRequest, match="more than 5000 parts"):
        enforceable_schema(nodes)
    assert time.process_time() - started < 5


def test_paths_are_built_on_demand() -> None:
    name = "n" * 1000
    schema: dict[str, Any] = {"not": {}}
    for _ in range(30):
        schema = record(**{name: schema})
    path = enforceable_schema(schema)[1][0]
    assert path.startswith(f".properties.{name[:63]}…")
    assert len(path) < 3000


@pytest.mark.parametrize(
    "schema",
    [
        {f"word{each}": 1 for each in range(2000)},
        {"$ref": "#/$defs/d0", "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}},
        {"allOf": [{"anyOf": [{"properties": {f"{a}{b}": {}}} for b in range(40)]} for a in range(40)]},
    ],
    ids=["unknown words", "a long chain", "combinations"],
)
def test_other_large_schemas_are_checked_quickly(schema: Any) -> None:
    started = time.process_time()
    with contextlib.suppress(InvalidRequest):
        enforceable_schema(schema)
    assert time.process_time() - started < 3
