"""The words of a Lark grammar, as llguidance cuts it: to look at it before it is compiled, and to name tokens by id."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import msgspec

from syringa.errors import InvalidRequest
from syringa.types import Grammar

Kind = Literal["string", "regex", "comment", "special", "name", "embedded", "line", "sign", "blank", "broken"]

_STRING = r'"(?:[^"\\\n]|\\.)*+"'
_COMMENT = r"(?:\#|//)[^\n]*"
_REGEX = r"/(?:[^/\\]|\\.)++/"
_SPECIAL = r"<[^<>\s]+>"
# Every character belongs to a word, and what is not closed takes the rest: the cut is linear in the text.
_WORD = re.compile(
    rf"""
      (?P<string> {_STRING} i? )
    | (?P<comment> {_COMMENT} )
    | (?P<regex> {_REGEX} [imslux]* )
    | (?P<special> {_SPECIAL} )
    | (?P<embedded> %(?:json|regex|llguidance)\b )
    | (?P<name> [!?_%@]* [A-Za-z0-9] [\w\-]* )
    | (?P<line> \n )
    | (?P<blank> [^\S\n]+ )
    | (?P<broken> ["/] .* )
    | (?P<sign> . )
    """,
    re.VERBOSE | re.DOTALL,
)
# The same in one piece up to the next special token.
_UP_TO_SPECIAL = re.compile(
    rf"""
    ( (?: [^"/\#<]++ | {_STRING} | {_COMMENT} | {_REGEX} | <(?![^<>\s]+>) | ["/].*+ )*+ )
    ( {_SPECIAL} )?
    """,
    re.VERBOSE | re.DOTALL,
)


class Word(NamedTuple):
    kind: Kind
    text: str
    end: int  # where it ends in the grammar


def words(text: str) -> Iterator[Word]:
    """All of a grammar, blanks too. JSON behind `%json` comes in words as well."""
    for found in _WORD.finditer(text):
        assert found.lastgroup is not None
        yield Word(found.lastgroup, found.group(), found.end())  # type: ignore[arg-type]


def by_id(grammar: Grammar, ids: Mapping[str, int]) -> Grammar:
    """The grammar with its special tokens by their ids. Raises `InvalidRequest` for one that is not there."""
    if grammar.kind == "lark":
        return Grammar("lark", _by_id(grammar.value, ids))
    if grammar.kind != "llguidance" or "lark_grammar" not in grammar.value:
        return grammar
    try:
        whole = msgspec.json.decode(grammar.value)
        for each in whole["grammars"]:
            if isinstance(each.get("lark_grammar"), str):
                each["lark_grammar"] = _by_id(each["lark_grammar"], ids)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return grammar  # for llguidance to refuse
    return Grammar("llguidance", json.dumps(whole))


def _by_id(text: str, ids: Mapping[str, int]) -> str:
    return _UP_TO_SPECIAL.sub(lambda found: found[1] + (_token(found[2], ids) if found[2] else ""), text)


def _token(name: str, ids: Mapping[str, int]) -> str:
    if name[1] == "[":  # by ids already
        return name
    if name not in ids:
        raise InvalidRequest(
            f"Invalid grammar: this model has no special token {name}.", param="grammar", code="invalid_grammar"
        )
    return f"<[{ids[name]}]>"
