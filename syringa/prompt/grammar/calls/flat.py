"""JSON schemas without references and combinations, for formats that are not JSON and have to write a schema out.

`flatten` gives the alternatives of a schema. Each is a dictionary of keywords as in a schema, but for these: `types`,
the set of types; `values`, what `enum` and `const` leave; `patterns`, `formats` and `multiples`, which all hold;
`objects` and `arrays`, the parts of the schema that speak of properties and of items, which all hold.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from syringa.errors import InvalidRequest
from syringa.schema_types import ALL, resolve, type_of, widened

Flat = dict[str, Any]

_MOST_ALTERNATIVES = 64
_LISTS = {"pattern": "patterns", "format": "formats", "multipleOf": "multiples"}
_OBJECTS = ("properties", "patternProperties", "additionalProperties")
_ARRAYS = ("prefixItems", "items", "additionalItems")
_MERGE: dict[str, Callable[[Any, Any], Any]] = {
    "types": lambda a, b: a & b,
    "values": lambda a, b: [each for each in a if dumped(each) in set(map(dumped, b))],
    "required": lambda a, b: list(dict.fromkeys([*a, *b])),
    **dict.fromkeys(("patterns", "formats", "multiples", "objects", "arrays"), lambda a, b: [*a, *b]),
    **dict.fromkeys(("minLength", "minItems", "minProperties", "minimum", "exclusiveMinimum"), max),
    **dict.fromkeys(("maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum"), min),
}


def flatten(schema: Any, root: Any, seen: frozenset[str] = frozenset()) -> list[Flat]:
    """The alternatives of a schema, a part of `root`; none if nothing fits it."""
    if schema is False:
        return []
    if not isinstance(schema, dict):
        return [{"types": ALL}]
    found = _possible([_own(schema)])
    if isinstance(schema.get("$ref"), str):
        if schema["$ref"] in seen:
            return []  # it refers to nothing but itself
        found = _both(found, flatten(resolve(root, schema["$ref"]), root, seen | {schema["$ref"]}))
    for each in _listed(schema, "allOf"):
        found = _both(found, flatten(each, root, seen))
    for key in ("anyOf", "oneOf"):
        if alternatives := _listed(schema, key):
            found = _both(found, [flat for each in alternatives for flat in flatten(each, root, seen)])
    return found


def all_of(schemas: Iterable[Any]) -> Any:
    """One schema for several that all hold."""
    kept = {dumped(each): each for each in schemas if each is not True and each != {}}
    if len(kept) == 1:
        return next(iter(kept.values()))
    return {"allOf": list(kept.values())} if kept else {}


def is_free(flat: Flat) -> bool:
    """Whether any value fits."""
    return flat.keys() == {"types"} and flat["types"] == ALL


def dumped(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _own(schema: dict[str, Any]) -> Flat:
    """A schema's own keywords."""
    flat: Flat = {"types": ALL}
    kind = schema.get("type")
    if isinstance(kind, str | list):
        flat["types"] = widened([kind] if isinstance(kind, str) else kind) & ALL
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if "const" in schema:
        values = [each for each in values or [schema["const"]] if dumped(each) == dumped(schema["const"])]
    if values is not None:
        flat["values"] = values = [each for each in values if type_of(each) in flat["types"]]
        flat["types"] = flat["types"] & widened(map(type_of, values))
    for key, name in _LISTS.items():
        if key in schema:
            flat[name] = [schema[key]]
    for name, keys in (("objects", _OBJECTS), ("arrays", _ARRAYS)):
        if part := {key: schema[key] for key in keys if key in schema}:
            flat[name] = [part]
    flat |= {key: schema[key] for key in _MERGE if key in schema}
    return flat


def _both(some: list[Flat], others: list[Flat]) -> list[Flat]:
    if len(some) * len(others) > _MOST_ALTERNATIVES:
        raise InvalidRequest(f"tools: a schema has more than {_MOST_ALTERNATIVES} combinations of alternatives.")
    merged = []
    for one, other in itertools.product(some, others):
        shared = {key: _MERGE[key](one[key], other[key]) for key in one.keys() & other.keys()}
        merged.append({**one, **other, **shared})
    return _possible(merged)


def _possible(flats: list[Flat]) -> list[Flat]:
    return [flat for flat in flats if flat["types"] and flat.get("values") != []]


def _listed(schema: dict[str, Any], key: str) -> list[Any]:
    return schema[key] if isinstance(schema.get(key), list) else []
