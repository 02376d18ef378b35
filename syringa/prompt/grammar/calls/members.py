"""What an object may have in it: the properties that a schema names, in its order, and others."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from syringa.prompt.grammar.calls.flat import Flat, all_of, flatten
from syringa.prompt.grammar.calls.texts import unanchored
from syringa.prompt.grammar.lark import quoted


class Named(msgspec.Struct, frozen=True):
    """A property by name."""

    name: str
    schema: Any
    required: bool


class Others(msgspec.Struct, frozen=True):
    """Properties whose names are like `pattern`, if there is one, and like none of `unlike`: regular expressions."""

    schema: Any
    pattern: str | None
    unlike: tuple[str, ...]


class Members(msgspec.Struct, frozen=True):
    named: list[Named]
    others: list[Others]
    least: int = 0  # of the others
    most: int | None = None


def members(flat: Flat, root: Any) -> Members | None:
    """The properties of an object; None if no object fits.

    Where properties are named, others may come only if the schema says so: a model would make them up.
    """
    parts = flat.get("objects", [])
    required = flat.get("required", [])
    names = dict.fromkeys(name for part in parts for name in part.get("properties", {}))
    names |= dict.fromkeys(required)
    named = []
    for name in names:
        schema = all_of(_of(part, name) for part in parts)
        if flatten(schema, root):
            named.append(Named(name, schema, name in required))
        elif name in required:
            return None
    silent = not any("additionalProperties" in part or "patternProperties" in part for part in parts)
    others = [] if names and silent else _others(parts, list(names))
    always = sum(each.required for each in named)
    least, most = flat.get("minProperties", 0) - len(named), flat.get("maxProperties")
    return Members(named, others, max(0, int(least)), None if most is None else max(0, int(most) - always))


def _of(part: dict[str, Any], name: str) -> Any:
    """What one part of a schema says of a property."""
    said = [part["properties"][name]] if name in part.get("properties", {}) else []
    said += [each for pattern, each in part.get("patternProperties", {}).items() if _is_like(name, pattern)]
    return all_of(said) if said else part.get("additionalProperties", True)


def _others(parts: list[dict[str, Any]], names: list[str]) -> list[Others]:
    """Each pattern apart from the rest. Names that are like several patterns are left out."""
    patterns: dict[str, list[Any]] = {}
    for part in parts:
        for pattern, schema in part.get("patternProperties", {}).items():
            patterns.setdefault(pattern, []).append(schema)
    rest = [part.get("additionalProperties", True) for part in parts]
    known = tuple(map(quoted, names))
    found = []
    for pattern, schemas in patterns.items():
        unlike = (*known, *(unanchored(each) for each in patterns if each != pattern))
        # A part that does not have the pattern takes such names for additional ones.
        missing = [
            part.get("additionalProperties", True) for part in parts if pattern not in part.get("patternProperties", {})
        ]
        found.append(Others(all_of([*schemas, *missing]), unanchored(pattern), unlike))
    if False not in rest:
        found.append(Others(all_of(rest), None, (*known, *map(unanchored, patterns))))
    return found


@cache
def _bytes() -> LLTokenizer:
    return LLTokenizer("byte")


def _is_like(name: str, pattern: str) -> bool:
    """By llguidance, since patterns are clients' and Python could take for ever."""
    matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_lark(f"start: /{unanchored(pattern)}/"), log_level=0)
    encoded = _bytes().tokenize_bytes(name.encode())
    return not matcher.is_error() and matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()
