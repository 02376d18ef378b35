"""Lark's notation, as far as a regular expression can follow it: rules and terminals as trees."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec

from syringa.prompt.grammar.lark import quoted

_TOKEN = re.compile(
    r"""
    (?P<skip>[ \t\f\r]+ | (?://|\#)[^\n]* | ^[?!]+(?=[_a-z]))
    | (?P<newline>\n)
    | (?P<string>"(?:\\.|[^"\\\n])*"i?)
    | (?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    | (?P<name>_?[a-zA-Z][a-zA-Z0-9_]*)
    | (?P<number>[0-9]+)
    | (?P<directive>%[a-z]+)
    | (?P<mark>->|\.\.|[:|()\[\]*+?~{},.])
    """,
    re.VERBOSE | re.MULTILINE,
)
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class LarkError(Exception):
    """What a grammar says that is not understood."""


class Text(msgspec.Struct, frozen=True):
    """A regular expression."""

    pattern: str


class Name(msgspec.Struct, frozen=True):
    name: str


class Sequence(msgspec.Struct, frozen=True):
    parts: tuple[Node, ...]


class Either(msgspec.Struct, frozen=True):
    parts: tuple[Node, ...]


class Repeat(msgspec.Struct, frozen=True):
    part: Node
    least: int
    most: int | None


Node = Text | Name | Sequence | Either | Repeat


class LarkGrammar(msgspec.Struct):
    rules: dict[str, Node] = {}
    imports: dict[str, str] = {}  # each name, and what `common` calls it
    ignored: list[Node] = []


def parse(text: str) -> LarkGrammar:
    """Raises `LarkError` for what it does not know."""
    return _Parser(list(_tokens(text))).grammar()


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            line = text.count("\n", 0, at) + 1
            raise LarkError(f"line {line} has {text[at]!r}, which cannot be used in a custom tool")
        at = found.end()
        if found.lastgroup is not None and found.lastgroup != "skip":
            yield found.lastgroup, found.group()
    yield "newline", "\n"


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._at = tokens, 0

    def grammar(self) -> LarkGrammar:
        grammar = LarkGrammar()
        while self._at < len(self._tokens):
            kind, text = self._tokens[self._at]
            self._at += 1
            if kind == "directive":
                self._directive(text, grammar)
            elif kind == "name":
                self._priority()
                self._expect(":")
                if text in grammar.rules:
                    raise LarkError(f"{text} is defined twice")
                grammar.rules[text] = self._either()
            elif kind != "newline":
                raise LarkError(f"{text!r} stands where a rule should begin")
        return grammar

    def _directive(self, word: str, grammar: LarkGrammar) -> None:
        if word == "%ignore":
            grammar.ignored.append(self._either(line=True))
        elif word == "%import":
            self._import(grammar)
        else:
            raise LarkError(f"{word} cannot be used in a custom tool")

    def _import(self, grammar: LarkGrammar) -> None:
        if self._next()[1] != "common":
            raise LarkError("only terminals of common can be imported")
        if self._peek() == ("mark", "."):
            self._expect(".")
            name = self._name()
            alias = name
            if self._peek() == ("mark", "->"):
                self._expect("->")
                alias = self._name()
            grammar.imports[alias] = name
            return
        self._expect("(")
        while True:
            name = self._name()
            grammar.imports[name] = name
            if self._next() != ("mark", ","):
                return

    def _either(self, *, line: bool = False) -> Node:
        parts = [self._sequence(line)]
        while self._peek(line) == ("mark", "|"):
            self._next()
            parts.append(self._sequence(line))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self, line: bool) -> Node:
        parts = []
        while True:
            kind, text = self._peek(line)
            if kind == "newline" or kind == "directive" or (kind == "mark" and text in "|)]") or self._begins_rule():
                break
            if text == "->":  # what the tree calls it
                self._next()
                self._name()
                continue
            parts.append(self._item())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _item(self) -> Node:
        node = self._atom()
        text = self._peek()[1]
        if text in _REPEATS:
            self._next()
            return Repeat(node, *_REPEATS[text])
        if text == "~":
            self._next()
            least = most = self._number()
            if self._peek() == ("mark", ".."):
                self._next()
                most = self._number()
            return Repeat(node, least, most)
        return self._braces(node) if text == "{" else node

    def _braces(self, node: Node) -> Node:
        self._expect("{")
        least = self._number() if self._peek()[0] == "number" else 0
        most: int | None = least
        if self._peek() == ("mark", ","):
            self._next()
            most = self._number() if self._peek()[0] == "number" else None
        self._expect("}")
        return Repeat(node, least, most)

    def _atom(self) -> Node:
        kind, text = self._next()
        if kind == "string":
            return self._range(text) if self._peek() == ("mark", "..") else Text(_string(text))
        if kind == "regex":
            return Text(_regex(text))
        if kind == "name":
            return Name(text)
        if text in "([":
            node = self._either()
            self._expect(")" if text == "(" else "]")
            return node if text == "(" else Repeat(node, 0, 1)
        raise LarkError(f"{text!r} cannot be used in a custom tool")

    def _range(self, first: str) -> Node:
        self._expect("..")
        kind, last = self._next()
        ends = [json.loads(each) for each in (first, last) if kind == "string" and each[-1] == '"']
        if len(ends) != 2 or any(len(each) != 1 for each in ends):
            raise LarkError("a range goes from one character to another")
        low, high = (rf"\x{{{ord(each):x}}}" for each in ends)
        return Text(f"[{low}-{high}]")

    def _begins_rule(self) -> bool:
        at = self._skip()
        following = [text for kind, text in self._tokens[at + 1 : at + 4] if kind != "newline"]
        is_name = at < len(self._tokens) and self._tokens[at][0] == "name"
        return is_name and (following[:1] == [":"] or (following[:1] == ["."] and following[2:3] == [":"]))

    def _priority(self) -> None:
        if self._peek() == ("mark", "."):
            self._next()
            self._number()

    def _skip(self) -> int:
        """Where the next token is that is no line break."""
        at = self._at
        while at < len(self._tokens) and self._tokens[at][0] == "newline":
            at += 1
        return at

    def _peek(self, line: bool = False) -> tuple[str, str]:
        at = self._at if line else self._skip()
        return self._tokens[at] if at < len(self._tokens) else ("newline", "\n")

    def _next(self) -> tuple[str, str]:
        self._at = self._skip() + 1
        return self._tokens[self._at - 1] if self._at <= len(self._tokens) else ("newline", "the end")

    def _expect(self, text: str) -> None:
        found = self._next()[1]
        if found != text:
            raise LarkError(f"expected {text!r} before {found!r}")

    def _name(self) -> str:
        kind, text = self._next()
        if kind != "name":
            raise LarkError(f"expected a name before {text!r}")
        return text

    def _number(self) -> int:
        kind, text = self._next()
        if kind != "number" or len(text) > 4:
            raise LarkError(f"expected a small number before {text!r}")
        return int(text)


def _string(text: str) -> str:
    try:
        pattern = quoted(json.loads(text.removesuffix("i")))
    except ValueError:
        raise LarkError(f"{text} is no string") from None
    return f"(?i:{pattern})" if text.endswith("i") else pattern


def _regex(text: str) -> str:
    pattern, _, flags = text[1:].rpartition("/")
    if set(flags) - {"i", "s"}:
        raise LarkError(f"{text}: only the flags i and s are known")
    return f"(?{flags}:{pattern})"
