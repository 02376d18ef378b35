"""Which types of value a JSON schema allows. Formats of calls that write texts without quotes leave it to the schema
whether `5` is a number or a text, so the grammar of a call and its parser have to read a schema alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Types = frozenset[str]
ALL: Types = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_NOTHING: Types = frozenset()
_DEEPEST = 100  # references and alternatives inside each other


def type_of(value: Any) -> str:
    """The narrowest type of a JSON value: a number without a fraction is an integer, however it is written."""
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
    """Reads one schema. Every reference is followed once, however many ways lead to it: clients write schemas."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._values: dict[str, Types] = {}
        self._properties: dict[tuple[str, str | None], Types | None] = {}

    def allowed(self, schema: Any, depth: int = 0) -> Types:
        """The types of the values that may fit `schema`, a part of the root. What cannot be resolved allows any."""
        if schema is False:
            return _NOTHING
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return ALL
        found = _declared(schema.get("type"))
        if "const" in schema:
            found &= with_integers([type_of(schema["const"])])
        if isinstance(schema.get("enum"), list):
            found &= with_integers(type_of(each) for each in schema["enum"])
        if isinstance(schema.get("$ref"), str):
            found &= self._referenced(schema["$ref"], depth)
        for each in _listed(schema, "allOf"):
            found &= self.allowed(each, depth + 1)
        for key in ("anyOf", "oneOf"):
            if alternatives := _listed(schema, key):
                found &= _NOTHING.union(*(self.allowed(each, depth + 1) for each in alternatives))
        return found

    def parameter(self, name: str | None) -> Types:
        """The types that one of a function's arguments may have, by the schema of them all; None: one that it does not
        name. Of which nothing is known, it may have any."""
        return self._property(self._root, name, 0) or ALL

    def _referenced(self, reference: str, depth: int) -> Types:
        if reference not in self._values:
            self._values[reference] = _NOTHING  # until it is known, for references in a circle
            self._values[reference] = self.allowed(resolve(self._root, reference), depth + 1)
        return self._values[reference]

    def _property(self, schema: Any, name: str | None, depth: int) -> Types | None:
        """None where the schema does not say anything of it."""
        if not isinstance(schema, Mapping) or depth > _DEEPEST:
            return None
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            found = [self.allowed(properties[name])]
        else:
            found = self._undeclared(schema)
        inner = [self._property(each, name, depth + 1) for each in _listed(schema, "allOf")]
        if isinstance(schema.get("$ref"), str):
            inner.append(self._referenced_property(schema["$ref"], name, depth))
        found += [each for each in inner if each is not None]
        for key in ("anyOf", "oneOf"):
            inner = [self._property(each, name, depth + 1) for each in _listed(schema, key)]
            if said := [each for each in inner if each is not None]:
                found.append(_NOTHING.union(*said))
        return ALL.intersection(*found) if found else None

    def _referenced_property(self, reference: str, name: str | None, depth: int) -> Types | None:
        key = (reference, name)
        if key not in self._properties:
            self._properties[key] = None
            self._properties[key] = self._property(resolve(self._root, reference), name, depth + 1)
        return self._properties[key]

    def _undeclared(self, schema: Mapping[str, Any]) -> list[Types]:
        """The types of a property that is not declared by name, as far as something is said of those. Patterns of names
        are not tried: they are the client's, and could take for ever."""
        patterns = schema.get("patternProperties")
        said = [self.allowed(each) for each in patterns.values()] if isinstance(patterns, Mapping) else []
        rest = schema.get("additionalProperties")
        if isinstance(rest, Mapping):
            said.append(self.allowed(rest))
        elif said and rest is not False:
            said.append(ALL)
        return [_NOTHING.union(*said)] if said else []


def resolve(root: Any, reference: str) -> Any:
    """What a reference inside a schema points to; None where it does not point to anything in it."""
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
    """With the integers among the numbers."""
    found = frozenset(names)
    return found | {"integer"} if "number" in found else found


def _declared(kind: Any) -> Types:
    if isinstance(kind, str):
        return with_integers([kind])
    return with_integers(str(each) for each in kind) if isinstance(kind, list) else ALL


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    return schema[key] if isinstance(schema.get(key), list) else []
