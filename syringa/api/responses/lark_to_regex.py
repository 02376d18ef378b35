"""Conversion of a Lark grammar to a regular expression.

The input of a custom tool is part of a tool call in the model's own format, usually a JSON string. Such a string can be
constrained by a regular expression, but not by a grammar, so rules are expanded. A rule that refers to itself at its
beginning or end becomes a repetition; one that refers to itself in the middle is expanded to a limited depth, so that
whatever matches the result matches the grammar.
"""

from __future__ import annotations

import contextlib

from syringa.api.responses.lark_parser import (
    Alternation,
    Concatenation,
    LarkError,
    LarkGrammar,
    Node,
    Pattern,
    Repetition,
    RuleReference,
    parse,
)
from syringa.errors import InvalidRequest

_MAX_LENGTH = 20_000  # characters; compiling more takes too long
_MAX_WRITTEN = 10 * _MAX_LENGTH
_DEPTHS = (6, 4, 3, 2, 1)
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}


def lark_to_regex(definition: str, path: str) -> str:
    """Return a pattern that the whole input has to match. Raises `InvalidRequest` if there is none."""
    try:
        grammar = parse(definition)
        if "start" not in grammar.rules:
            raise LarkError("there is no rule named start")
        for depth in _DEPTHS:
            with contextlib.suppress(_TooLong):
                pattern = _RegexWriter(grammar, depth).rule("start")
                if pattern is not None and len(pattern) <= _MAX_LENGTH:
                    return pattern
        raise LarkError("too long when expanded to a regular expression, or nothing matches it")
    except LarkError as error:
        raise InvalidRequest(f"{path}: {error}.", param=path, code="invalid_grammar") from None
    except RecursionError:
        raise InvalidRequest(f"{path}: nested too deeply.", param=path, code="invalid_grammar") from None


class _TooLong(Exception):
    """The pattern is too long at this depth; a smaller depth may work."""


class _RegexWriter:
    """Writes rules as patterns. None stands for a rule that would exceed the depth, which no text matches."""

    def __init__(self, grammar: LarkGrammar, depth: int) -> None:
        self._grammar, self._depth = grammar, depth
        self._inside: list[str] = []
        self._written = 0
        self._ignored = ""
        ignored = [self.write(each) for each in grammar.ignored]
        self._ignored = f"(?:{'|'.join(each for each in ignored if each)})*" if ignored else ""

    def rule(self, name: str) -> str | None:
        if name in self._grammar.imports:
            return self._common(self._grammar.imports[name])
        if name not in self._grammar.rules:
            raise LarkError(f"{name} is not defined")
        if self._inside.count(name) >= self._depth:
            return None
        self._inside.append(name)
        pattern = self._repeated(name, self._grammar.rules[name])
        self._inside.pop()
        return pattern

    def write(self, node: Node) -> str | None:
        pattern = self._write(node)
        # Patterns that are discarded later count too, since writing them takes time.
        self._written += 1 + len(pattern or "")
        if self._written > _MAX_WRITTEN:
            raise _TooLong
        return pattern

    def _write(self, node: Node) -> str | None:
        if isinstance(node, Pattern):
            return node.pattern
        if isinstance(node, RuleReference):
            return self.rule(node.name)
        if isinstance(node, Alternation):
            return _alternatives([self.write(each) for each in node.parts])
        if isinstance(node, Repetition):
            return self._repeat(node)
        return self._sequence(node.parts)

    def _repeat(self, node: Repetition) -> str | None:
        pattern = self.write(node.part)
        if pattern is None:
            return "" if node.least == 0 else None
        once = f"(?:{pattern})"
        most = "" if node.most is None else str(node.most)
        if not self._allows_ignored or node.most == 1:
            return f"{once}{{{node.least},{most}}}"
        # Ignored text may stand between two repetitions, but not before the first.
        if node.most == 0:
            return ""
        more = f"{{{max(0, node.least - 1)},{'' if node.most is None else node.most - 1}}}"
        several = f"{once}(?:{self._ignored}{once}){more}"
        return several if node.least else f"(?:{several})?"

    def _sequence(self, parts: tuple[Node, ...]) -> str | None:
        patterns = [self.write(each) for each in parts]
        between = self._ignored if self._allows_ignored else ""
        written = [each for each in patterns if each is not None]
        return between.join(f"(?:{each})" for each in written) if len(written) == len(patterns) else None

    def _repeated(self, name: str, node: Node) -> str | None:
        """Write a rule that refers to itself at the beginning or the end of its alternatives as a repetition."""
        parts = node.parts if isinstance(node, Alternation) else (node,)
        split = [each.parts if isinstance(each, Concatenation) else (each,) for each in parts]
        itself = RuleReference(name)
        between = self._ignored if self._allows_ignored else ""
        for last in (True, False):
            again = [each for each in split if len(each) > 1 and each[-1 if last else 0] == itself]
            rest = [each for each in split if each not in again and each != (itself,)]
            if not again:
                continue
            steps = [self._sequence(each[:-1] if last else each[1:]) for each in again]
            step, once = _alternatives(steps), _alternatives([self._sequence(each) for each in rest])
            if once is None or step is None:
                return once
            more = f"(?:(?:{step}){between})*" if last else f"(?:{between}(?:{step}))*"
            return f"{more}(?:{once})" if last else f"(?:{once}){more}"
        return self.write(node)

    @property
    def _allows_ignored(self) -> bool:
        """Whether ignored text may stand between parts, which is so in rules and not in terminals."""
        return bool(self._ignored) and not any(each.strip("_")[:1].isupper() for each in self._inside)

    def _common(self, name: str) -> str:
        if name not in _COMMON:
            raise LarkError(f"common.{name} is not supported; use one of {', '.join(_COMMON)}")
        return _COMMON[name]


def _alternatives(patterns: list[str | None]) -> str | None:
    written = [each for each in patterns if each is not None]
    return "|".join(f"(?:{each})" for each in written) if written else None
