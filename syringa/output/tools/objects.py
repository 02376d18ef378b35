"""Calls that are JSON objects with a name and arguments, behind a mark or at the start of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from syringa.output.stages import Part
from syringa.output.tools.call import BLANKS, CallReader
from syringa.output.tools.stage import CallStage, begins, new_id


class ObjectFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`begin` [`opening`] object (`separator` object)* `end`.

    Without a `begin` an answer that starts with an object is calls, and no other. `separator` is any of some
    characters; None: there is one object. `end` only counts where the `opening`, if there is one, was there too.
    """

    begin: str = ""
    opening: str = ""
    separator: str | None = None
    end: str = ""
    tag: str = ""  # may stand before any object, and means nothing
    keys: frozenset[str] | None = None  # that may come before a name; None: any


class ObjectCalls(CallStage):
    """Parses any of these formats."""

    format: ObjectFormat

    def __init__(self, choice: int, parameters: Mapping[str, Any] | None = None) -> None:
        format = self.format
        marks = {mark for mark in (format.begin, format.tag, format.end) if mark}
        super().__init__(choice, marks, (format.begin,) if format.begin else ())
        self._functions = parameters or {}
        self._opened = False  # whether the opening was there
        self._reader = CallReader()
        self._read = 0  # how much of what is held the reader has had
        if not format.begin:
            self._state = self._start

    def _new_id(self, reader: CallReader) -> str:
        return new_id()

    def _is_call(self, name: str) -> bool:
        return True

    def _is_text(self) -> bool:
        # Without a mark, what has not become a call was text.
        return super()._is_text() or (not self.format.begin and self.calls == 0)

    def _start(self, out: list[Part]) -> bool:
        found = self._next_object(self._held.text)
        if found is None:
            return False
        return found or self._refuse(0, out)

    def _begin(self, out: list[Part]) -> bool:
        format, text = self.format, self._held.text
        at = self._origin + len(format.begin)
        rest = text[at:].lstrip(BLANKS)
        if not rest:
            return False
        self._opened = bool(format.opening) and rest.startswith(format.opening)
        if self._opened:
            at = len(text) - len(rest) + len(format.opening)
        self._read_from(at)
        return True

    def _next_object(self, rest: str) -> bool | None:
        """Whether an object begins at the start of `rest`, the end of what is held; None while that is open."""
        rest = rest.lstrip(BLANKS)
        if self.format.tag:
            tagged = begins(rest, self.format.tag)
            if tagged is None:
                return None
            rest = rest[len(self.format.tag) :].lstrip(BLANKS) if tagged else rest
        if not rest:
            return None
        if rest[0] != "{":
            return False
        self._read_from(len(self._held.text) - len(rest))
        return True

    def _read_from(self, at: int) -> None:
        self._reader, self._read = CallReader(self.format.keys), at
        self._state = self._name

    def _name(self, out: list[Part]) -> bool:
        """In an object of which nothing has been told: if it breaks, it was text."""
        reader = self._reader
        self._read = reader.feed(self._held.text, self._read)
        if reader.name is not None and self._is_call(reader.name):
            self._tell(reader.name, self._new_id(reader), out)
            self._state = self._arguments
            return True
        if reader.name is not None or reader.broken:
            first = self._begins_with_mark()
            return self._refuse(self._origin + len(self.format.begin) if first else 0, out)
        return False

    def _begins_with_mark(self) -> bool:
        begin = self.format.begin
        return bool(begin) and self._held.text.startswith(begin, self._origin)

    def _arguments(self, out: list[Part]) -> bool:
        reader = self._reader
        self._read = reader.feed(self._held.text, self._read)
        self._held.drop(self._read, out)
        self._read = self._origin = 0
        self._argue(reader.take(), out)
        if reader.broken:
            self._state = self._skip
        elif reader.done:
            self._state = self._close
        return reader.broken or reader.done

    def _close(self, out: list[Part]) -> bool:
        """After an object: the end, or the next one."""
        format = self.format
        rest = self._held.text.lstrip(BLANKS)
        if format.end and (self._opened or not format.opening):
            ended = begins(rest, format.end)
            if ended is None:
                return False
            if ended:
                self._held.drop(len(self._held.text) - len(rest) + len(format.end), out)
                return self._rest(out)
        if format.separator is None or (format.opening and not self._opened):
            return self._rest(out)
        found = self._next_object(rest.lstrip(BLANKS + format.separator))
        if found is None:
            return False
        return found or self._rest(out)

    def _skip(self, out: list[Part]) -> bool:
        """In a call that broke after it was told of."""
        end = self.format.end
        if not self._skip_past((end,) if end else (), out):
            return False
        self._held.drop(len(end), out)
        return self._rest(out)
