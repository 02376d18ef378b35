"""A Lark grammar as a regular expression.

The input of a custom tool stands inside of a call, in a model's own format, most often as a JSON string. A text there
can be held to a regular expression, whatever the format; a grammar inside of a string cannot be expressed. So rules are
written out. One that refers to itself at its beginning or its end is a repetition; where it refers to itself in the
middle, it is written out to some depth: what fits the result always fits the grammar.
"""

from __future__ import annotations

import contextlib

from syringa.api.responses.lark_grammar import Either, LarkError, LarkGrammar, Name, Node, Repeat, Sequence, Text, parse
from syringa.errors import InvalidRequest

_LONGEST = 20_000  # characters; compiling more takes too long
_MOST_WRITTEN = 10 * _LONGEST
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


def lark_pattern(definition: str, path: str) -> str:
    """A pattern that the whole input has to match. Raises `InvalidRequest` where there is none."""
    try:
        grammar = parse(definition)
        if "start" not in grammar.rules:
            raise LarkError("there is no rule named start")
        for depth in _DEPTHS:
            with contextlib.suppress(_TooLong):
                pattern = _Writer(grammar, depth).rule("start")
                if pattern is not None and len(pattern) <= _LONGEST:
                    return pattern
        raise LarkError("written out as a regular expression it is too long, or nothing fits it")
    except LarkError as error:
        raise InvalidRequest(f"{path}: {error}.", param=path, code="invalid_grammar") from None
    except RecursionError:
        raise InvalidRequest(f"{path}: nested too deeply.", param=path, code="invalid_grammar") from None


class _TooLong(Exception):
    """Perhaps not, with less depth."""


class _Writer:
    """None stands for what no text fits, because it would go deeper than allowed."""

    def __init__(self, grammar: LarkGrammar, depth: int) -> None:
        self._grammar, self._depth = grammar, depth
        self._inside: list[str] = []
        self._written = 0
        self._blank = ""
        blanks = [self.write(each) for each in grammar.ignored]
        self._blank = f"(?:{'|'.join(each for each in blanks if each)})*" if blanks else ""

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
        # Most of what is written may be thrown away again; trying counts, too.
        self._written += 1 + len(pattern or "")
        if self._written > _MOST_WRITTEN:
            raise _TooLong
        return pattern

    def _write(self, node: Node) -> str | None:
        if isinstance(node, Text):
            return node.pattern
        if isinstance(node, Name):
            return self.rule(node.name)
        if isinstance(node, Either):
            return _either([self.write(each) for each in node.parts])
        if isinstance(node, Repeat):
            return self._repeat(node)
        return self._sequence(node.parts)

    def _repeat(self, node: Repeat) -> str | None:
        pattern = self.write(node.part)
        if pattern is None:
            return "" if node.least == 0 else None
        once = f"(?:{pattern})"
        most = "" if node.most is None else str(node.most)
        if not self._spaced or node.most == 1:
            return f"{once}{{{node.least},{most}}}"
        # Between two there may be what is ignored, but not before the first.
        if node.most == 0:
            return ""
        more = f"{{{max(0, node.least - 1)},{'' if node.most is None else node.most - 1}}}"
        several = f"{once}(?:{self._blank}{once}){more}"
        return several if node.least else f"(?:{several})?"

    def _sequence(self, parts: tuple[Node, ...]) -> str | None:
        patterns = [self.write(each) for each in parts]
        between = self._blank if self._spaced else ""
        written = [each for each in patterns if each is not None]
        return between.join(f"(?:{each})" for each in written) if len(written) == len(patterns) else None

    def _repeated(self, name: str, node: Node) -> str | None:
        """A rule that refers to itself only at the end, or only at the beginning, of its alternatives repeats."""
        parts = node.parts if isinstance(node, Either) else (node,)
        split = [each.parts if isinstance(each, Sequence) else (each,) for each in parts]
        me = Name(name)
        between = self._blank if self._spaced else ""
        for last in (True, False):
            again = [each for each in split if len(each) > 1 and each[-1 if last else 0] == me]
            rest = [each for each in split if each not in again and each != (me,)]
            if not again:
                continue
            steps = [self._sequence(each[:-1] if last else each[1:]) for each in again]
            step, once = _either(steps), _either([self._sequence(each) for each in rest])
            if once is None or step is None:
                return once
            more = f"(?:(?:{step}){between})*" if last else f"(?:{between}(?:{step}))*"
            return f"{more}(?:{once})" if last else f"(?:{once}){more}"
        return self.write(node)

    @property
    def _spaced(self) -> bool:
        """Whether what is ignored may stand between the parts: in rules, and not inside of terminals."""
        return bool(self._blank) and not any(each.strip("_")[:1].isupper() for each in self._inside)

    def _common(self, name: str) -> str:
        if name not in _COMMON:
            raise LarkError(f"common.{name} is not known; there are {', '.join(_COMMON)}")
        return _COMMON[name]


def _either(patterns: list[str | None]) -> str | None:
    written = [each for each in patterns if each is not None]
    return "|".join(f"(?:{each})" for each in written) if written else None
