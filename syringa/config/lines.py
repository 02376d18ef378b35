"""On which line of a TOML file each key stands: `tomllib` does not say.

This reads text that `tomllib` has accepted, so it only has to find its way, not to judge. What it finds is held against
what `tomllib` found: where the two differ, nothing is known, because a wrong line is worse than none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_TEXT = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'",
    re.DOTALL,
)
_OTHER_VALUE = re.compile(r"[^,\]}#\n]+")


def find_lines(text: str) -> dict[Path, int]:
    """The line of each key, table and item, by its path: `("models", 1, "dtype")`. Empty if anything is in doubt."""
    try:
        found = _Reader(text).read()
        if _leaves(tomllib.loads(text)) == {path for path, kind in found.kinds.items() if kind == "leaf"}:
            return found.lines
    except (ValueError, IndexError, RecursionError):
        pass
    return {}


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """The line of the innermost part of `path` that the file has: of the table, for a key that is not there."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return None


def _leaves(value: Any, path: Path = ()) -> set[Path]:
    parts: Iterator[tuple[str | int, Any]]
    if isinstance(value, dict):
        parts = iter(value.items())
    elif isinstance(value, list):
        parts = iter(enumerate(value))
    else:
        return {path}
    return {leaf for name, inner in parts for leaf in _leaves(inner, (*path, name))}


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.lines: dict[Path, int] = {}
        self.kinds: dict[Path, str] = {}
        self._counts: dict[Path, int] = {}  # items of each array of tables

    def read(self) -> _Reader:
        table: Path = ()
        self._skip(_BLANK)
        while self.at < len(self.text):
            if self._next("["):
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)
        return self

    def _header(self) -> Path:
        line, array = self._line(), self._next("[", 1)
        self.at += 2 if array else 1
        path = self._inside(self._key())
        self.at += 2 if array else 1
        if array:
            count = self._counts.get(path, 0)
            self._counts[path] = count + 1
            self.lines.setdefault(path, line)
            path = (*path, count)
        self._note(path, line, "table")
        return path

    def _inside(self, keys: list[str]) -> Path:
        """The path of a header's keys: one that leads through an array of tables means the last of them."""
        path: Path = ()
        for index, key in enumerate(keys):
            path = (*path, key)
            if path in self._counts and index < len(keys) - 1:
                path = (*path, self._counts[path] - 1)
        return path

    def _pair(self, table: Path) -> None:
        line = self._line()
        path = table
        for key in self._key():
            path = (*path, key)
            self._note(path, line, "table")
        self.at += 1  # the sign
        self._skip(_SPACE)
        self._value(path, line)

    def _key(self) -> list[str]:
        keys = []
        while True:
            self._skip(_SPACE)
            if self.text[self.at] in "\"'":
                keys.append(str(tomllib.loads("x = " + self._take(_TEXT))["x"]))
            else:
                keys.append(self._take(_BARE_KEY))
            self._skip(_SPACE)
            if not self._next("."):
                return keys
            self.at += 1

    def _value(self, path: Path, line: int) -> None:
        if self._next("["):
            self._items(path)
        elif self._next("{"):
            self._inline(path)
        else:
            self._take(_TEXT if self.text[self.at] in "\"'" else _OTHER_VALUE)
            self._note(path, line, "leaf")

    def _items(self, path: Path) -> None:
        self.at += 1
        count = 0
        self._skip(_BLANK)
        while not self._next("]"):
            line = self._line()
            self._note((*path, count), line, "table")
            self._value((*path, count), line)
            count += 1
            self._skip(_BLANK)
            if self._next(","):
                self.at += 1
                self._skip(_BLANK)
        self.at += 1

    def _inline(self, path: Path) -> None:
        self.at += 1
        self._skip(_BLANK)
        while not self._next("}"):
            self._pair(path)
            self._skip(_BLANK)
            if self._next(","):
                self.at += 1
                self._skip(_BLANK)
        self.at += 1

    def _note(self, path: Path, line: int, kind: str) -> None:
        self.lines.setdefault(path, line)
        self.kinds[path] = kind

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _next(self, sign: str, ahead: int = 0) -> bool:
        return self.text.startswith(sign, self.at + ahead)

    def _skip(self, pattern: re.Pattern[str]) -> None:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def _take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if not found:
            raise ValueError(self.at)
        self.at = found.end()
        return found.group()
