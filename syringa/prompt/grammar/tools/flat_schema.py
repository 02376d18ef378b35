"""JSON schemas without references and combinators, for formats that are not JSON and have to spell a schema out.

`flatten` returns the alternatives of a schema. Each is a dictionary of schema keywords, except for: `types`, the set of
types; `values`, what `enum` and `const` leave; `patterns`, `formats` and `multiples`, lists whose members all apply;
`objects` and `arrays`, the parts of the schema about properties and about items, which all apply.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from syringa.errors import InvalidRequest
from syringa.schema_types import ALL, resolve, type_of, with_integers

FlatSchema = dict[str, Any]

_MAX_ALTERNATIVES = 64
_LIST_KEYWORDS = {"pattern": "patterns", "format": "formats", "multipleOf": "multiples"}
_OBJECT_KEYWORDS = ("properties", "patternProperties", "additionalProperties")
_ARRAY_KEYWORDS = ("prefixItems", "items", "additionalItems")
_MERGE: dict[str, Callable[[Any, Any], Any]] = {
    "types": lambda a, b: a & b,
    "values": lambda a, b: [each for each in a if canonical_json(each) in set(map(canonical_json, b))],
    "required": lambda a, b: list(dict.fromkeys([*a, *b])),
    **dict.fromkeys(("patterns", "formats", "multiples", "objects", "arrays"), lambda a, b: [*a, *b]),
    **dict.fromkeys(("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"), max),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"), min),
}


def flatten(schema: Any, root: Any, seen: frozenset[str] = frozenset()) -> list[FlatSchema]:
    """Return the alternatives of a schema within `root`; an empty list if no value is valid."""
    if schema is False:
        return []
    if not isinstance(schema, dict):
        return [{"types": ALL}]
    found = _satisfiable([_own_keywords(schema)])
    if isinstance(schema.get("$ref"), str):
        if schema["$ref"] in seen:
            return []  # a reference only to itself
        found = _intersect(found, flatten(resolve(root, schema["$ref"]), root, seen | {schema["$ref"]}))
    for each in _list_at(schema, "allOf"):
        found = _intersect(found, flatten(each, root, seen))
    for key in ("anyOf", "oneOf"):
        if branches := _list_at(schema, key):
            found = _intersect(found, [flat for each in branches for flat in flatten(each, root, seen)])
    return found


def all_of(schemas: Iterable[Any]) -> Any:
    """Combine several schemas into one that requires them all."""
    kept = {canonical_json(each): each for each in schemas if each is not True and each != {}}
    if len(kept) == 1:
        return next(iter(kept.values()))
    return {"allOf": list(kept.values())} if kept else {}


def allows_any_value(flat: FlatSchema) -> bool:
    return flat.keys() == {"types"} and flat["types"] == ALL


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _own_keywords(schema: dict[str, Any]) -> FlatSchema:
    flat: FlatSchema = {"types": ALL}
    kind = schema.get("type")
    if isinstance(kind, str | list):
        flat["types"] = with_integers([kind] if isinstance(kind, str) else kind) & ALL
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if "const" in schema:
        const = canonical_json(schema["const"])
        values = [each for each in values or [schema["const"]] if canonical_json(each) == const]
    if values is not None:
        flat["values"] = values = [each for each in values if type_of(each) in flat["types"]]
        flat["types"] = flat["types"] & with_integers(map(type_of, values))
    for key, name in _LIST_KEYWORDS.items():
        if key in schema:
            flat[name] = [schema[key]]
    for name, keys in (("objects", _OBJECT_KEYWORDS), ("arrays", _ARRAY_KEYWORDS)):
        if part := {key: schema[key] for key in keys if key in schema}:
            flat[name] = [part]
    flat |= {key: schema[key] for key in _MERGE if key in schema}
    return flat


def _intersect(some: list[FlatSchema], others: list[FlatSchema]) -> list[FlatSchema]:
    if len(some) * len(others) > _MAX_ALTERNATIVES:
        raise InvalidRequest(f"tools: a schema has more than {_MAX_ALTERNATIVES} combinations of alternatives.")
    merged = []
    for one, other in itertools.product(some, others):
        shared = {key: _MERGE[key](one[key], other[key]) for key in one.keys() & other.keys()}
        merged.append({**one, **other, **shared})
    return _satisfiable(merged)


def _satisfiable(flats: list[FlatSchema]) -> list[FlatSchema]:
    return [flat for flat in flats if flat["types"] and flat.get("values") != []]


def _list_at(schema: dict[str, Any], key: str) -> list[Any]:
    return schema[key] if isinstance(schema.get(key), list) else []
