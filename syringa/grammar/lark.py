"""Tokenizer for Lark grammars in llguidance's syntax, and special tokens replaced by their ids."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from syringa.errors import InvalidRequest
from syringa.types import Grammar

LarkTokenKind = Literal[
    "string",
    "comment",
    "regex",
    "special",
    "embedded",
    "directive",
    "modifier",
    "name",
    "number",
    "newline",
    "whitespace",
    "unterminated",
    "operator",
]

_STRING = r'"(?:[^"\\\n]|\\.)*+"'
_COMMENT = r"(?:\#|//)[^\n]*"
_REGEX = r"/(?:[^/\\]|\\.)++/"
_SPECIAL = r"<[^<>\s]+>"
# Every character belongs to a token, and an unterminated string or regex takes the rest: tokenizing is linear in the
# length of the text.
_TOKEN = re.compile(
    rf"""
      (?P<string> {_STRING} i? )
    | (?P<comment> {_COMMENT} )
    | (?P<regex> {_REGEX} [imslux]* )
    | (?P<special> {_SPECIAL} )
    | (?P<embedded> %(?:json|regex|llguidance)\b )
    | (?P<directive> %[A-Za-z][A-Za-z0-9_]* )
    | (?P<modifier> [!?]+(?=[_a-z]) )
    | (?P<name> _*[A-Za-z](?:[A-Za-z0-9_]|-(?!>))* )
    | (?P<number> [0-9]+ )
    | (?P<newline> \n )
    | (?P<whitespace> [^\S\n]+ )
    | (?P<unterminated> ["/] .* )
    | (?P<operator> -> | \.\. | . )
    """,
    re.VERBOSE | re.DOTALL,
)
# The same text in one match up to the next special token.
_UP_TO_SPECIAL = re.compile(
    rf"""
    ( (?: [^"/\#<]++ | {_STRING} | {_COMMENT} | {_REGEX} | <(?![^<>\s]+>) | ["/].*+ )*+ )
    ( {_SPECIAL} )?
    """,
    re.VERBOSE | re.DOTALL,
)


class LarkToken(NamedTuple):
    kind: LarkTokenKind
    text: str
    end: int  # offset in the grammar just after the token


def tokenize(text: str) -> Iterator[LarkToken]:
    """Yield every token of a grammar, whitespace and comments included; joined, their texts are the grammar.

    `embedded` is the keyword of embedded JSON or regex (`%json`); the JSON after it is tokenized too. `modifier` is the
    `!` or `?` before the name of a rule at the beginning of a line; elsewhere `?` is an operator.
    """
    line_start = True
    for found in _TOKEN.finditer(text):
        kind: LarkTokenKind = found.lastgroup  # type: ignore[assignment] # every alternative is a named group
        if kind == "modifier" and not line_start:
            kind = "operator"
        if kind == "newline":
            line_start = True
        elif kind not in ("whitespace", "comment"):
            line_start = False
        yield LarkToken(kind, found.group(), found.end())


def resolve_special_tokens(grammar: Grammar, ids: Mapping[str, int]) -> Grammar:
    """Return the grammar with its special tokens (`<|im_end|>`) by id (`<[2]>`).

    Raises `InvalidRequest` for a special token that the vocabulary does not have.
    """
    if grammar.kind == "lark":
        return Grammar("lark", _resolve(grammar.value, ids))
    if grammar.kind != "llguidance" or "lark_grammar" not in grammar.value:
        return grammar
    try:
        whole = msgspec.json.decode(grammar.value)
        for each in whole["grammars"]:
            if isinstance(each.get("lark_grammar"), str):
                each["lark_grammar"] = _resolve(each["lark_grammar"], ids)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return grammar  # llguidance reports what is wrong with it
    return Grammar("llguidance", json.dumps(whole))


def _resolve(text: str, ids: Mapping[str, int]) -> str:
    return _UP_TO_SPECIAL.sub(lambda found: found[1] + (_token_by_id(found[2], ids) if found[2] else ""), text)


def _token_by_id(name: str, ids: Mapping[str, int]) -> str:
    if name[1] == "[":  # already by id
        return name
    if name not in ids:
        raise InvalidRequest(
            f"Invalid grammar: this model has no special token {name}.", param="grammar", code="invalid_grammar"
        )
    return f"<[{ids[name]}]>"
