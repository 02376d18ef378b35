"""The properties an object may have: those its schema names, in the schema's order, and others."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from syringa.prompt.grammar.lark import escape_regex
from syringa.prompt.grammar.tools.flat_schema import FlatSchema, all_of, flatten
from syringa.prompt.grammar.tools.string_terminals import anchored_pattern


class NamedProperty(msgspec.Struct, frozen=True):
    name: str
    schema: Any
    required: bool


class OtherProperties(msgspec.Struct, frozen=True):
    """Properties whose names match `pattern`, if there is one, and none of `excluded`: all regular expressions."""

    schema: Any
    pattern: str | None
    excluded: tuple[str, ...]


class ObjectProperties(msgspec.Struct, frozen=True):
    named: list[NamedProperty]
    others: list[OtherProperties]
    min_others: int = 0
    max_others: int | None = None


def object_properties(flat: FlatSchema, root: Any) -> ObjectProperties | None:
    """Return the properties of an object; None if no object is valid.

    If the schema names properties, others are allowed only if it says so explicitly: models would make them up.
    """
    parts = flat.get("objects", [])
    required = flat.get("required", [])
    names = dict.fromkeys(name for part in parts for name in part.get("properties", {}))
    names |= dict.fromkeys(required)
    named = []
    for name in names:
        schema = all_of(_property_schema(part, name) for part in parts)
        if flatten(schema, root):
            named.append(NamedProperty(name, schema, name in required))
        elif name in required:
            return None
    unspecified = not any("additionalProperties" in part or "patternProperties" in part for part in parts)
    others = [] if names and unspecified else _other_properties(parts, list(names))
    always = sum(each.required for each in named)
    least, most = flat.get("minProperties", 0) - len(named), flat.get("maxProperties")
    return ObjectProperties(named, others, max(0, int(least)), None if most is None else max(0, int(most) - always))


def _property_schema(part: dict[str, Any], name: str) -> Any:
    """Return what one part of a schema requires of a property."""
    schemas = [part["properties"][name]] if name in part.get("properties", {}) else []
    schemas += [each for pattern, each in part.get("patternProperties", {}).items() if _matches(name, pattern)]
    return all_of(schemas) if schemas else part.get("additionalProperties", True)


def _other_properties(parts: list[dict[str, Any]], names: list[str]) -> list[OtherProperties]:
    """Return each pattern separately, and the additional properties. Names that match several patterns are excluded."""
    patterns: dict[str, list[Any]] = {}
    for part in parts:
        for pattern, schema in part.get("patternProperties", {}).items():
            patterns.setdefault(pattern, []).append(schema)
    additional = [part.get("additionalProperties", True) for part in parts]
    known = tuple(map(escape_regex, names))
    found = []
    for pattern, schemas in patterns.items():
        excluded = (*known, *(anchored_pattern(each) for each in patterns if each != pattern))
        # To a part without the pattern, such names are additional properties.
        missing = [
            part.get("additionalProperties", True) for part in parts if pattern not in part.get("patternProperties", {})
        ]
        found.append(OtherProperties(all_of([*schemas, *missing]), anchored_pattern(pattern), excluded))
    if False not in additional:
        found.append(OtherProperties(all_of(additional), None, (*known, *map(anchored_pattern, patterns))))
    return found


@cache
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def _matches(name: str, pattern: str) -> bool:
    """Match with llguidance: patterns come from clients, and Python's `re` has no time bound."""
    tokenizer = _byte_tokenizer()
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(f"start: /{anchored_pattern(pattern)}/"), log_level=0)
    encoded = tokenizer.tokenize_bytes(name.encode())
    return not matcher.is_error() and matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()
