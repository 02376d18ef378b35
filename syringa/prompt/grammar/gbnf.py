"""Conversion of GBNF, llama.cpp's notation for grammars, to llguidance's Lark.

llguidance has a converter too (`gbnf_to_lark`), whose time is quadratic in the number of rules, which fails on `\\u`
escapes and on rules named `start` or alike but for case, and whose results often have no end (see below).

GBNF has no lexer: every way to read a text counts. llguidance matches terminals greedily, so a terminal that could also
take the beginning of what follows it would never end. Hence a grammar without recursion becomes one terminal, and in
others the longest parts without recursion do, except for whitespace, with which terminals often end and others begin.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from syringa.errors import InvalidRequest
from syringa.prompt.grammar.lark import string_literal

_TOKEN = re.compile(
    r"""
      (?P<string> "(?:[^"\\\n]|\\.)*+" | '(?:[^'\\\n]|\\.)*+' )
    | (?P<class> \[(?:[^\]\\\n]|\\.)*+\] )
    | (?P<comment> \#[^\n]* )
    | (?P<define> ::= )
    | (?P<name> [A-Za-z0-9_-]+ )
    | (?P<special> <[^<>\s]+> )
    | (?P<repeat> [*+?] | \{\s*[0-9]{1,9}\s*(?:,\s*(?:[0-9]{1,9}\s*)?)?\} )
    | (?P<any> \. )
    | (?P<operator> [|()] )
    | (?P<space> \s+ )
    | (?P<unterminated> ["'\[].* )
    | (?P<unknown> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_RULE = re.compile(r"^[ \t]*+[A-Za-z0-9_-]++\s*+::=", re.MULTILINE)
_CHARACTER = re.compile(
    r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|(?P<escaped>.))|(?P<plain>.)", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"} | {each: each for each in "\"'\\[]-^/"}
_WHITESPACE = set(" \t\r\n")
_MAX_DEPTH = 100  # of brackets
_MAX_SHOWN = 20  # characters of a token in an error


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Part(NamedTuple):
    """A part of a rule in Lark. `regular`: it may be part of a terminal. `atom`: it is a single literal or name."""

    lark: str
    regular: bool
    atom: bool = False


Rules = dict[str, list[_Token]]


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is written in GBNF rather than Lark: a line begins with `name ::=`."""
    return _RULE.search(text) is not None


def gbnf_to_lark(text: str) -> str:
    """Return the grammar in Lark. Raises `InvalidRequest` with the line of the error in its message."""
    return _Converter(text).convert()


class _Converter:
    def __init__(self, text: str) -> None:
        self._text = text
        self._rules = self._read_rules()
        regular, whitespace_users = self._regular_rules()
        self._terminals = regular if "root" in regular else regular - whitespace_users
        self._used = {"start", "ROOT"}  # names in Lark
        self._names = self._lark_names()
        self._lines: list[str] = []
        self._tokens: list[_Token] = []  # of the current rule, from its end

    def convert(self) -> str:
        for name, body in self._rules.items():
            self._tokens = body[::-1]
            part = self._alternatives(depth=0)
            if self._tokens:
                raise self._error(self._tokens[-1], "there is no bracket to close")
            self._lines.append(f"{self._names[name]}: {part.lark}")
        start = ["start: ROOT"] if "root" in self._terminals else []
        return "\n".join(start + self._lines) + "\n"

    def _read_rules(self) -> Rules:
        """Return the tokens of each rule. A rule goes on up to the name of the next one."""
        tokens = [
            _Token(str(found.lastgroup), found.group(), found.start())
            for found in _TOKEN.finditer(self._text)
            if found.lastgroup not in ("space", "comment")
        ]
        rules: Rules = {}
        body: list[_Token] | None = None
        for index, token in enumerate(tokens):
            if token.kind == "name" and index + 1 < len(tokens) and tokens[index + 1].kind == "define":
                if token.text in rules:
                    raise self._error(token, f"the rule {token.text} is defined twice")
                body = rules[token.text] = []
            elif token.kind == "define":
                if index == 0 or tokens[index - 1].kind != "name":
                    raise self._error(token, "expected the name of a rule before it")
            elif token.kind in ("unknown", "unterminated") or body is None:
                raise self._error(token, "unexpected text")
            else:
                body.append(token)
        if "root" not in rules:
            raise InvalidRequest("the grammar has no rule named root.")
        return rules

    def _regular_rules(self) -> tuple[set[str], set[str]]:
        """Return the rules without recursion and special tokens, and those of them that contain a whitespace rule."""
        users: dict[str, list[str]] = {name: [] for name in self._rules}
        missing: dict[str, int] = {}
        for name, body in self._rules.items():
            references = {token.text: token for token in body if token.kind == "name"}
            missing[name] = len(references) + any(token.kind == "special" for token in body)
            for each, token in references.items():
                if each not in users:
                    raise self._error(token, f"the rule {each} is not defined")
                users[each].append(name)
        ready = [name for name, count in missing.items() if count == 0]
        regular: set[str] = set()
        with_whitespace: set[str] = set()
        while ready:
            name = ready.pop()
            regular.add(name)
            if self._is_whitespace(self._rules[name]):
                with_whitespace.add(name)
            for user in users[name]:
                missing[user] -= 1
                if missing[user] == 0:
                    ready.append(user)
                if name in with_whitespace:
                    with_whitespace.add(user)
        return regular, with_whitespace

    def _is_whitespace(self, body: list[_Token]) -> bool:
        literals = [token for token in body if token.kind in ("string", "class", "any")]
        return bool(literals) and all(
            token.kind != "any" and {each for each, _ in self._characters(token)} <= _WHITESPACE for token in literals
        )

    def _lark_names(self) -> dict[str, str]:
        """Return the names in Lark, where terminals are in upper case and other rules in lower case."""
        names = {"root": "ROOT" if "root" in self._terminals else "start"}
        for name in self._rules:
            if name != "root":
                plain = ("" if name[0].isalpha() else "r_") + name.replace("-", "_")
                names[name] = self._unique(plain.upper() if name in self._terminals else plain.lower())
        return names

    def _unique(self, name: str) -> str:
        """Return a name that is not in use, by a number after it if need be."""
        if name in self._used:
            name = f"{name}_{len(self._used)}"
        while name in self._used:
            name += "_"
        self._used.add(name)
        return name

    def _alternatives(self, depth: int) -> _Part:
        if depth > _MAX_DEPTH:
            raise self._error(self._tokens[-1], "brackets are nested too deeply")
        found = [self._sequence(depth)]
        while self._next_is("|"):
            self._tokens.pop()
            found.append(self._sequence(depth))
        if all(each.regular for each in found):
            return _Part(" | ".join(each.lark for each in found), True, atom=len(found) == 1 and found[0].atom)
        return _Part(" | ".join(self._hoist([each]) if each.regular else each.lark for each in found), False)

    def _sequence(self, depth: int) -> _Part:
        parts: list[_Part] = []
        while self._tokens and not self._next_is("|") and not self._next_is(")"):
            parts.append(self._item(depth))
        if not parts:
            return _Part('""', True, atom=True)
        if all(each.regular for each in parts):
            return _Part(" ".join(each.lark for each in parts), True, atom=len(parts) == 1 and parts[0].atom)
        texts: list[str] = []
        run: list[_Part] = []
        for part in parts:
            if part.regular:
                run.append(part)
            else:
                texts += [self._hoist(run)] if run else []
                texts.append(part.lark)
                run = []
        texts += [self._hoist(run)] if run else []
        return _Part(" ".join(texts), False)

    def _item(self, depth: int) -> _Part:
        token = self._tokens.pop()
        if token.kind == "repeat":
            raise self._error(token, "expected something to repeat")
        if token.text == "(":
            inner = self._alternatives(depth + 1)
            if not self._next_is(")"):
                raise self._error(token, "the bracket is not closed")
            self._tokens.pop()
            part = _Part(f"( {inner.lark} )", inner.regular)
        else:
            regular = token.kind != "special" and (token.kind != "name" or token.text in self._terminals)
            part = _Part(self._atom(token), regular, atom=True)
        if self._tokens and self._tokens[-1].kind == "repeat":
            times = re.sub(r"\s", "", self._tokens.pop().text)
            part = _Part(part.lark + times, part.regular)
        return part

    def _hoist(self, run: list[_Part]) -> str:
        """Return an expression for adjacent regular parts: a single literal or name, or a terminal of their own."""
        if len(run) == 1 and run[0].atom:
            return run[0].lark
        name = self._unique("PART")
        self._lines.append(f"{name}: {' '.join(each.lark for each in run)}")
        return name

    def _next_is(self, operator: str) -> bool:
        return bool(self._tokens) and self._tokens[-1].kind == "operator" and self._tokens[-1].text == operator

    def _atom(self, token: _Token) -> str:
        match token.kind:
            case "string":
                return string_literal("".join(each for each, _ in self._characters(token)))
            case "class":
                return self._character_class(token)
            case "any":
                return r"/(.|\n)/"
            case "name":
                return self._names[token.text]
        return token.text

    def _character_class(self, token: _Token) -> str:
        """Return a class of characters as a regular expression, with everything but letters and digits escaped."""
        characters = self._characters(token)
        negated = characters[:1] == [("^", False)]
        characters = characters[negated:]
        if not characters:
            raise self._error(token, "the class of characters is empty")
        parts, at = [], 0
        while at < len(characters):
            parts.append(_in_class(characters[at][0]))
            if at + 2 < len(characters) and characters[at + 1] == ("-", False):
                parts.append("-" + _in_class(characters[at + 2][0]))
                at += 2
            at += 1
        return f"/[{'^' * negated}{''.join(parts)}]/"

    def _characters(self, token: _Token) -> list[tuple[str, bool]]:
        """Return the characters between the delimiters of a token, and whether each of them is escaped."""
        found = []
        for match in _CHARACTER.finditer(token.text[1:-1]):
            if match["plain"] is not None:
                found.append((match["plain"], False))
                continue
            digits = match["x"] or match["u"] or match["U"]
            code = int(digits, 16) if digits else -1
            if digits and (code > 0x10FFFF or 0xD800 <= code < 0xE000):
                raise self._error(token, f"{match.group()} is not a character")
            if not digits and match["escaped"] not in _ESCAPES:
                raise self._error(token, f"invalid escape {match.group()}")
            found.append((chr(code) if digits else _ESCAPES[match["escaped"]], True))
        return found

    def _error(self, token: _Token, reason: str) -> InvalidRequest:
        line = self._text.count("\n", 0, token.at) + 1
        shown = token.text if len(token.text) <= _MAX_SHOWN else token.text[:_MAX_SHOWN] + "…"
        return InvalidRequest(f"line {line}, at {shown!r}: {reason}.")


def _in_class(character: str) -> str:
    plain = character.isascii() and character.isalnum()
    return character if plain else f"\\x{{{ord(character):x}}}"
