"""Parser for the subset of Lark that can be written as a regular expression: rules and terminals as syntax trees."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec

from syringa.grammar.lark import tokenize
from syringa.prompt.grammar.lark import escape_regex

_SKIPPED = ("whitespace", "comment", "modifier")
_OPERATORS = frozenset(("->", "..", *":|()[]*+?~{},."))
_REPEATS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class LarkError(Exception):
    """A grammar that cannot be parsed, or that uses a construct outside the subset."""


class Pattern(msgspec.Struct, frozen=True):
    """A regular expression."""

    pattern: str


class RuleReference(msgspec.Struct, frozen=True):
    name: str


class Concatenation(msgspec.Struct, frozen=True):
    parts: tuple[Node, ...]


class Alternation(msgspec.Struct, frozen=True):
    parts: tuple[Node, ...]


class Repetition(msgspec.Struct, frozen=True):
    part: Node
    least: int
    most: int | None


Node = Pattern | RuleReference | Concatenation | Alternation | Repetition


class LarkGrammar(msgspec.Struct):
    rules: dict[str, Node] = {}
    imports: dict[str, str] = {}  # name in this grammar to name in `common`
    ignored: list[Node] = []  # operands of `%ignore`


def parse(text: str) -> LarkGrammar:
    """Parse a grammar. Raises `LarkError` for a construct outside the subset."""
    return _Parser(list(_parser_tokens(text))).grammar()


def _parser_tokens(text: str) -> Iterator[tuple[str, str]]:
    line = 1
    for token in tokenize(text):
        if token.kind in _SKIPPED:
            continue
        if token.kind in ("special", "unterminated") or (token.kind == "operator" and token.text not in _OPERATORS):
            raise LarkError(f"line {line} has {token.text[0]!r}, which cannot be used in a custom tool")
        yield "directive" if token.kind == "embedded" else token.kind, token.text
        line += token.text.count("\n")
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
                raise LarkError(f"expected the name of a rule before {text!r}")
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
        if self._peek() == ("operator", "."):
            self._expect(".")
            name = self._name()
            alias = name
            if self._peek() == ("operator", "->"):
                self._expect("->")
                alias = self._name()
            grammar.imports[alias] = name
            return
        self._expect("(")
        while True:
            name = self._name()
            grammar.imports[name] = name
            if self._next() != ("operator", ","):
                return

    def _either(self, *, line: bool = False) -> Node:
        parts = [self._sequence(line)]
        while self._peek(line) == ("operator", "|"):
            self._next()
            parts.append(self._sequence(line))
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _sequence(self, line: bool) -> Node:
        parts = []
        while True:
            kind, text = self._peek(line)
            if (
                kind == "newline"
                or kind == "directive"
                or (kind == "operator" and text in "|)]")
                or self._begins_rule()
            ):
                break
            if text == "->":  # an alias for the parse tree, which no text depends on
                self._next()
                self._name()
                continue
            parts.append(self._item())
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _item(self) -> Node:
        node = self._atom()
        text = self._peek()[1]
        if text in _REPEATS:
            self._next()
            return Repetition(node, *_REPEATS[text])
        if text == "~":
            self._next()
            least = most = self._number()
            if self._peek() == ("operator", ".."):
                self._next()
                most = self._number()
            return Repetition(node, least, most)
        return self._braces(node) if text == "{" else node

    def _braces(self, node: Node) -> Node:
        self._expect("{")
        least = self._number() if self._peek()[0] == "number" else 0
        most: int | None = least
        if self._peek() == ("operator", ","):
            self._next()
            most = self._number() if self._peek()[0] == "number" else None
        self._expect("}")
        return Repetition(node, least, most)

    def _atom(self) -> Node:
        kind, text = self._next()
        if kind == "string":
            return self._range(text) if self._peek() == ("operator", "..") else Pattern(_string(text))
        if kind == "regex":
            return Pattern(_regex(text))
        if kind == "name":
            return RuleReference(text)
        if text in "([":
            node = self._either()
            self._expect(")" if text == "(" else "]")
            return node if text == "(" else Repetition(node, 0, 1)
        raise LarkError(f"{text!r} cannot be used in a custom tool")

    def _range(self, first: str) -> Node:
        self._expect("..")
        kind, last = self._next()
        ends = [json.loads(each) for each in (first, last) if kind == "string" and each[-1] == '"']
        if len(ends) != 2 or any(len(each) != 1 for each in ends):
            raise LarkError("a range needs one character on each side")
        low, high = (rf"\x{{{ord(each):x}}}" for each in ends)
        return Pattern(f"[{low}-{high}]")

    def _begins_rule(self) -> bool:
        at = self._skip()
        following = [text for kind, text in self._tokens[at + 1 : at + 4] if kind != "newline"]
        is_name = at < len(self._tokens) and self._tokens[at][0] == "name"
        return is_name and (following[:1] == [":"] or (following[:1] == ["."] and following[2:3] == [":"]))

    def _priority(self) -> None:
        if self._peek() == ("operator", "."):
            self._next()
            self._number()

    def _skip(self) -> int:
        """Return the position of the next token that is not a newline."""
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
        pattern = escape_regex(json.loads(text.removesuffix("i")))
    except ValueError:
        raise LarkError(f"{text} is not a valid string") from None
    return f"(?i:{pattern})" if text.endswith("i") else pattern


def _regex(text: str) -> str:
    pattern, _, flags = text[1:].rpartition("/")
    if set(flags) - {"i", "s"}:
        raise LarkError(f"{text}: only the flags i and s are supported")
    return f"(?{flags}:{pattern})"
