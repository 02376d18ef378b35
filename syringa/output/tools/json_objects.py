"""Parser of calls that are JSON objects with a name and arguments, after a marker or at the start of an answer."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from syringa.output.stages import Segment
from syringa.output.tools.base import BaseToolParser, ToolSchemas, new_call_id, starts_with
from syringa.output.tools.json_reader import WHITESPACE, JsonCallReader


class JsonCallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`begin` [`opening`] object (`separator` object)* `end`.

    Without a `begin`, only an answer that starts with an object is parsed as calls. `separator` is a set of characters;
    None means a single object. `end` is expected only if the `opening`, where the format has one, was present.
    """

    begin: str = ""
    opening: str = ""
    separator: str | None = None
    end: str = ""
    tag: str = ""  # optional before each object, without meaning
    keys: frozenset[str] | None = None  # allowed before the name; None: any
    known_functions_only: bool = False  # other names are text, where the functions are known
    call_id: Callable[[str | None], str] = lambda own: new_call_id()  # from the id in the object, if it has one


class JsonToolParser(BaseToolParser):
    """Parser of any `JsonCallFormat`."""

    def __init__(self, format: JsonCallFormat, choice: int, schemas: ToolSchemas | None = None) -> None:
        markers = {marker for marker in (format.begin, format.tag, format.end) if marker}
        super().__init__(choice, markers, (format.begin,) if format.begin else (), schemas or {})
        self._format = format
        self._opened = False  # whether the opening was present
        self._reader = JsonCallReader()
        self._read = 0  # characters of the pending text that the reader has seen
        if not format.begin:
            self._state = self._start

    def _is_call(self, name: str) -> bool:
        return not self._format.known_functions_only or not self._functions or name in self._functions

    def _pending_is_text(self) -> bool:
        # Without a begin marker, pending text that has not become a call is text.
        return super()._pending_is_text() or (not self._format.begin and self.calls == 0)

    def _start(self, out: list[Segment]) -> bool:
        found = self._find_object(self._pending.text)
        if found is False:
            self._state = self._find_call  # for a call in a code block
        return found is not None

    def _begin_call(self, out: list[Segment]) -> bool:
        format, text = self._format, self._pending.text
        at = self._origin + len(format.begin)
        rest = text[at:].lstrip(WHITESPACE)
        if not rest:
            return False
        self._opened = bool(format.opening) and rest.startswith(format.opening)
        if self._opened:
            at = len(text) - len(rest) + len(format.opening)
        self._read_from(at)
        return True

    def _find_object(self, rest: str) -> bool | None:
        """Return whether an object begins at the start of `rest`, a suffix of the pending text; None if undecided."""
        rest = rest.lstrip(WHITESPACE)
        if self._format.tag:
            tagged = starts_with(rest, self._format.tag)
            if tagged is None:
                return None
            rest = rest[len(self._format.tag) :].lstrip(WHITESPACE) if tagged else rest
        if not rest:
            return None
        if rest[0] != "{":
            return False
        self._read_from(len(self._pending.text) - len(rest))
        return True

    def _read_from(self, at: int) -> None:
        self._reader, self._read = JsonCallReader(self._format.keys), at
        self._state = self._read_name

    def _read_name(self, out: list[Segment]) -> bool:
        """Read up to the name. Nothing has been emitted yet, so a broken object is text."""
        reader = self._reader
        self._read = reader.feed(self._pending.text, self._read)
        if reader.name is not None and self._is_call(reader.name):
            self._emit_start(reader.name, self._format.call_id(reader.id), out)
            self._state = self._read_arguments
            return True
        if reader.name is not None or reader.broken:
            begin = self._format.begin
            has_marker = bool(begin) and self._pending.text.startswith(begin, self._origin)
            return self._reject_call(self._origin + len(begin) if has_marker else 0, out)
        return False

    def _read_arguments(self, out: list[Segment]) -> bool:
        reader = self._reader
        self._read = reader.feed(self._pending.text, self._read)
        self._pending.discard(self._read, out)
        self._read = self._origin = 0
        self._emit_arguments(reader.take(), out)
        if reader.broken:
            self._state = self._skip_broken
        elif reader.done:
            self._state = self._after_object
        return reader.broken or reader.done

    def _after_object(self, out: list[Segment]) -> bool:
        """Read the end marker or the next object."""
        format = self._format
        rest = self._pending.text.lstrip(WHITESPACE)
        if format.end and (self._opened or not format.opening):
            ended = starts_with(rest, format.end)
            if ended is None:
                return False
            if ended:
                self._pending.discard(len(self._pending.text) - len(rest) + len(format.end), out)
                return self._end_calls(out)
        if format.separator is None or (format.opening and not self._opened):
            return self._end_calls(out)
        found = self._find_object(rest.lstrip(WHITESPACE + format.separator))
        if found is None:
            return False
        return found or self._end_calls(out)

    def _skip_broken(self, out: list[Segment]) -> bool:
        """Skip the rest of a call that broke after its start was emitted."""
        end = self._format.end
        if not self._discard_until((end,) if end else (), out):
            return False
        self._pending.discard(len(end), out)
        return self._end_calls(out)
