"""Schemas without valid values are rejected before compilation, with their path."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.schema import MAX_NODES, MAX_OPTIONAL_PROPERTIES, enforceable_schema


def pattern(index: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f".*a{{{index}}}.*b"}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


FINE: dict[str, Any] = {
    "alternatives": {"anyOf": [record(id=pattern(each)) for each in range(20)]},
    "inheritance": {"allOf": [record(a={"type": "string"}), record(b=pattern(1))]},
    "by pattern": {"type": "object", "patternProperties": {f"^a{each}_": pattern(each) for each in range(20)}},
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
        ({"type": "array", "minItems": 2, "prefixItems": [{}, {"$ref": "#"}]}, ".prefixItems[1]"),
        (record(a=record(b={"anyOf": [{"$ref": "#"}, {"$ref": "#/properties/a"}]})), ".properties.a.properties.b"),
        ({"anyOf": [record(a={"$ref": "#"}), record(b={"$ref": "#"})]}, ".anyOf[0].properties.a"),
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
    with pytest.raises(InvalidRequest, match="400 properties can be optional, got 10000") as caught:
        enforceable_schema(optional)
    assert caught.value.param == ".items.properties"
    with pytest.raises(InvalidRequest, match="more than 5000 parts"):
        enforceable_schema(nodes)


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
def test_large_schemas_are_checked_without_combinatorial_work(schema: Any) -> None:
    with contextlib.suppress(InvalidRequest):  # within the time limit of a test
        enforceable_schema(schema)
