"""Whether the alternatives of a `oneOf` exclude each other, so that it means the same as `anyOf`.

llguidance knows `oneOf` only where it can verify this itself, and does not follow references.
"""

from __future__ import annotations

import json
from typing import Any

from syringa.prompt.grammar.schema_recursion import dict_at, list_at, referenced

_MAX_WORK = 20_000  # comparisons of two schemas, for all alternatives of a schema
_MAX_DEPTH = 8
_TYPES = frozenset({"null", "boolean", "object", "array", "string", "number"})


class DisjointChecker:
    """Compare subschemas of `root`. The answer is "no" where it is not certain, or would take too long."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._work = 0
        self._values: dict[int, frozenset[str] | None] = {}  # by the id of a schema

    def are_disjoint(self, alternatives: list[Any]) -> bool:
        """Return whether no value matches two of the schemas."""
        pairs = ((a, b) for index, a in enumerate(alternatives) for b in alternatives[:index])
        return all(self._excludes(a, b, 0) for a, b in pairs)

    def _excludes(self, a: Any, b: Any, depth: int) -> bool:
        if a is False or b is False:
            return True
        self._work += 1
        if not isinstance(a, dict) or not isinstance(b, dict) or depth > _MAX_DEPTH or self._work > _MAX_WORK:
            return False
        if self._own_keywords_exclude(a, b, depth):
            return True
        for one, other in ((a, b), (b, a)):
            parts = [*list_at(one, "allOf"), referenced(one, self._root)]
            if any(self._excludes(part, other, depth + 1) for part in parts):
                return True
            groups = [group for key in ("anyOf", "oneOf") if (group := list_at(one, key))]
            if any(all(self._excludes(each, other, depth + 1) for each in group) for group in groups):
                return True
        return False

    def _own_keywords_exclude(self, a: dict[str, Any], b: dict[str, Any], depth: int) -> bool:
        values, others = self._values_of(a), self._values_of(b)
        if values is not None and others is not None:
            self._work += min(len(values), len(others)) // 8
            return values.isdisjoint(others)
        common = _types(a) & _types(b)
        if common != {"object"}:
            return not common
        required = {name for node in (a, b) for name in list_at(node, "required") if isinstance(name, str)}
        return any(self._excludes(_property(a, name), _property(b, name), depth + 1) for name in sorted(required))

    def _values_of(self, node: dict[str, Any]) -> frozenset[str] | None:
        """Return the values that a schema lists, as JSON; None if it lists none, or too many."""
        key = id(node)
        if key not in self._values:
            listed = _listed(node)
            self._work += 0 if listed is None else len(listed) // 4
            known = listed is not None and self._work <= _MAX_WORK
            self._values[key] = frozenset(map(_canonical, listed or ())) if known else None
        return self._values[key]


def _listed(node: dict[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    listed = node.get("enum")
    return listed if isinstance(listed, list) else None


def _canonical(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 1.0 is the same value as 1
    return json.dumps(value, sort_keys=True)


def _types(node: dict[str, Any]) -> frozenset[str]:
    """Return the types that a value may have."""
    if (listed := _listed(node)) is not None:
        return frozenset(map(_type_of, listed))
    declared = node.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list):
        return _TYPES
    return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str))


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _property(node: dict[str, Any], name: str) -> Any:
    """Return the schema of a property; True if it may have any value."""
    properties = dict_at(node, "properties")
    if name in properties:
        return properties[name]
    return node.get("additionalProperties", True) if not dict_at(node, "patternProperties") else True
