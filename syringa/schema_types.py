"""The types of value that a JSON schema allows.

In tool-call formats that write strings without quotes, the schema decides whether `5` is a number or a string. The
grammar and the parser of a call have to agree on it, so both use this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Types = frozenset[str]
ALL: Types = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_NONE: Types = frozenset()
_MAX_DEPTH = 100  # of nested references and alternatives


def type_of(value: Any) -> str:
    """Return the narrowest type of a JSON value; a number without a fraction is an integer, however it is written."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case list() | tuple():
            return "array"
    return "object"


class SchemaTypes:
    """The types allowed by one schema. Each reference is resolved only once: schemas come from clients."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._values: dict[str, Types] = {}
        self._properties: dict[tuple[str, str | None], Types | None] = {}

    def allowed(self, schema: Any, depth: int = 0) -> Types:
        """Return the types that `schema`, a part of the root, allows. Unresolvable references allow any type."""
        if schema is False:
            return _NONE
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return ALL
        found = _declared(schema.get("type"))
        if "const" in schema:
            found &= with_integers([type_of(schema["const"])])
        if isinstance(schema.get("enum"), list):
            found &= with_integers(type_of(each) for each in schema["enum"])
        if isinstance(schema.get("$ref"), str):
            found &= self._referenced(schema["$ref"], depth)
        for each in _list_at(schema, "allOf"):
            found &= self.allowed(each, depth + 1)
        for key in ("anyOf", "oneOf"):
            if alternatives := _list_at(schema, key):
                found &= _NONE.union(*(self.allowed(each, depth + 1) for each in alternatives))
        return found

    def parameter(self, name: str | None) -> Types:
        """Return the types of one property of the root; None as the name stands for any property it does not name.

        A property without any constraint may have all types.
        """
        return self._property(self._root, name, 0) or ALL

    def _referenced(self, reference: str, depth: int) -> Types:
        if reference not in self._values:
            self._values[reference] = _NONE  # for circular references
            self._values[reference] = self.allowed(resolve(self._root, reference), depth + 1)
        return self._values[reference]

    def _property(self, schema: Any, name: str | None, depth: int) -> Types | None:
        """Return the types of a property; None if the schema does not constrain it."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            found = [self.allowed(properties[name])]
        else:
            found = self._undeclared_types(schema)
        inner = [self._property(each, name, depth + 1) for each in _list_at(schema, "allOf")]
        if isinstance(schema.get("$ref"), str):
            inner.append(self._referenced_property(schema["$ref"], name, depth))
        found += [each for each in inner if each is not None]
        for key in ("anyOf", "oneOf"):
            inner = [self._property(each, name, depth + 1) for each in _list_at(schema, key)]
            if constrained := [each for each in inner if each is not None]:
                found.append(_NONE.union(*constrained))
        return ALL.intersection(*found) if found else None

    def _referenced_property(self, reference: str, name: str | None, depth: int) -> Types | None:
        key = (reference, name)
        if key not in self._properties:
            self._properties[key] = None
            self._properties[key] = self._property(resolve(self._root, reference), name, depth + 1)
        return self._properties[key]

    def _undeclared_types(self, schema: Mapping[str, Any]) -> list[Types]:
        """Return the types of a property that is not declared by name, or an empty list if they are not constrained.

        Name patterns are not evaluated: they come from clients, and matching has no time bound.
        """
        patterns = schema.get("patternProperties")
        found = [self.allowed(each) for each in patterns.values()] if isinstance(patterns, Mapping) else []
        rest = schema.get("additionalProperties")
        if isinstance(rest, Mapping):
            found.append(self.allowed(rest))
        elif found and rest is not False:
            found.append(ALL)
        return [_NONE.union(*found)] if found else []


def resolve(root: Any, reference: str) -> Any:
    """Return the target of a reference inside a schema; None if there is none."""
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        return None
    node = root
    for part in reference[2:].split("/"):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, Mapping) and part in node:
            node = node[part]
        elif isinstance(node, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(node):
            node = node[int(part[:9])]
        else:
            return None
    return node


def with_integers(names: Iterable[str]) -> Types:
    """Return the types with `integer` added where `number` is present."""
    found = frozenset(names)
    return found | {"integer"} if "number" in found else found


def _declared(kind: Any) -> Types:
    if isinstance(kind, str):
        return with_integers([kind])
    return with_integers(str(each) for each in kind) if isinstance(kind, list) else ALL


def _list_at(schema: Mapping[str, Any], key: str) -> list[Any]:
    return schema[key] if isinstance(schema.get(key), list) else []
