from __future__ import annotations

from typing import Any

import pytest

from syringa.prompt.grammar.schema import enforceable_schema
from syringa.prompt.grammar.schema_disjoint import DisjointChecker


def tagged(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}, **more}, "required": ["kind"]}


INTEGER, STRING = {"type": "integer"}, {"type": "string"}
CLOSED = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
ROOT: dict[str, Any] = {
    "$defs": {"cat": tagged("cat"), "dog": {"allOf": [tagged("dog")]}, "self": {"$ref": "#/$defs/self"}}
}
REFERENCES = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]

DISJOINT: dict[str, list[Any]] = {
    "types": [INTEGER, STRING, {"type": ["null", "boolean"]}],
    "constants": [{"const": "a"}, {"const": "b"}, {"const": 1}],
    "values": [{"enum": ["a", 1]}, {"enum": ["b", True]}],
    "value and type": [{"const": "a"}, INTEGER],
    "tags": [tagged("a"), tagged("b"), tagged("c")],
    "references": REFERENCES,
    "nothing": [False, {}],
    "alternatives": [{"anyOf": [INTEGER, {"type": "null"}]}, STRING],
    "closed": [CLOSED, {"type": "object", "properties": {"b": {}}, "required": ["b"]}],
    "nested": [
        {"type": "object", "properties": {"a": tagged("x")}, "required": ["a"]},
        {"type": "object", "properties": {"a": tagged("y")}},
    ],
}
OVERLAPPING: dict[str, list[Any]] = {
    "numbers": [INTEGER, {"type": "number"}],
    "anything": [{}, STRING],
    "the same value": [{"const": 1}, {"const": 1.0}],
    "optional tags": [{"type": "object", "properties": {"kind": {"const": each}}} for each in "ab"],
    "other types": [{"properties": {"k": {"const": "a"}}, "required": ["k"]}, {"properties": {"k": {"const": "b"}}}],
    "one of several": [INTEGER, STRING, STRING],
    "loop": [{"$ref": "#/$defs/self"}, {"$ref": "#/$defs/self"}],
    "open": [{**CLOSED, "additionalProperties": True}, {"type": "object", "properties": {"b": {}}, "required": ["b"]}],
    "unknown reference": [{"$ref": "http://elsewhere"}, {"$ref": "#/nowhere"}],
}


@pytest.mark.parametrize("name", DISJOINT)
def test_disjoint_checker_accepts_alternatives_that_exclude_each_other(name: str) -> None:
    assert DisjointChecker(ROOT).are_disjoint(DISJOINT[name])
    assert DisjointChecker(ROOT).are_disjoint(DISJOINT[name][::-1])


@pytest.mark.parametrize("name", OVERLAPPING)
def test_disjoint_checker_reports_alternatives_that_may_overlap(name: str) -> None:
    assert not DisjointChecker(ROOT).are_disjoint(OVERLAPPING[name])
    assert not DisjointChecker(ROOT).are_disjoint(OVERLAPPING[name][::-1])


def test_disjoint_checker_gives_up_on_too_many_alternatives() -> None:
    assert not DisjointChecker({}).are_disjoint([{"const": each} for each in range(1_000)])


def test_one_of_references_with_a_tag_is_enforced() -> None:
    """Unions with a discriminator are common; llguidance does not follow their references."""
    kept, removed, _ = enforceable_schema({**ROOT, "oneOf": REFERENCES})
    assert not removed
    assert kept["anyOf"] == REFERENCES
    assert "oneOf" not in kept
