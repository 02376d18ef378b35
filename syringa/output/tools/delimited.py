"""Parser of calls whose name and arguments are separated by markers: `begin` NAME `arguments_begin` {…} `end`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from syringa.output.stages import Segment
from syringa.output.tools.base import BaseToolParser, ToolSchemas, find_first, new_call_id, starts_with
from syringa.output.tools.json_reader import WHITESPACE, JsonValueReader
from syringa.output_formats import DelimitedCallFormat

_NAME = re.compile(r"[\w.\-]+")
_MAX_HEAD_LENGTH = 200  # characters of a name, and of an id next to it
_FENCE = "```json"


def name_and_new_id(head: str, calls: int) -> tuple[str, str]:
    """Return the head as the name, with a new id."""
    return head.strip(), new_call_id()


class DelimitedToolParser(BaseToolParser):
    """Parser of any `DelimitedCallFormat`. Calls outside of a section are parsed as well.

    `name_ends` are the texts that may end a name, by default the marker of the arguments. `inner_markers` are further
    special tokens within a call. `parse_head` returns the name and the id from the text before the arguments and the
    number of earlier calls.
    """

    def __init__(
        self,
        format: DelimitedCallFormat,
        choice: int,
        schemas: ToolSchemas | None = None,
        *,
        name_ends: Sequence[str] = (),
        inner_markers: Sequence[str] = (),
        parse_head: Callable[[str, int], tuple[str, str]] = name_and_new_id,
    ) -> None:
        openers = [marker for marker in (format.section_begin, format.begin) if marker]
        ends = [marker for marker in (format.end, format.section_end) if marker]
        markers = {*openers, *ends, format.arguments_begin, *inner_markers}
        super().__init__(choice, markers, openers, schemas or {})
        self._format = format
        self._parse_head = parse_head
        fences = ["```"] if format.code_block else []
        self._argument_ends = (*ends, *openers, *fences)  # never part of arguments
        self._name_ends = name_ends or (format.arguments_begin,)
        self._arguments_opener = _FENCE if format.code_block else format.arguments_begin
        self._value = JsonValueReader("{")

    def _begin_call(self, out: list[Segment]) -> bool:
        """Read the markers before a call, and its name."""
        format, text = self._format, self._pending.text
        in_section = bool(format.section_begin) and text.startswith(format.section_begin, self._origin)
        section = format.section_begin if in_section else ""
        rest = text[self._origin + len(section) :]
        rest = rest.lstrip(WHITESPACE) if section else rest
        begun = starts_with(rest, format.begin)
        if begun is None:
            return False
        length = self._origin + len(section or format.begin)
        if not begun:
            return self._reject_call(length, out)
        head = rest[len(format.begin) :]
        end = find_first(self._name_ends, head)
        if end < 0:
            return not _could_be_head(head) and self._reject_call(length, out)
        name, id = self._parse_head(head[:end], self.calls)
        if not _NAME.fullmatch(name) or not _could_be_head(head[:end]):
            return self._reject_call(length, out)
        self._pending.discard(len(text) - len(head) + end, out)
        self._emit_start(name, id, out)
        self._state = self._before_arguments
        return True

    def _before_arguments(self, out: list[Segment]) -> bool:
        rest = self._pending.text.lstrip(WHITESPACE)
        opened = starts_with(rest, self._arguments_opener)
        if opened is None:
            return False
        opener_length = len(self._arguments_opener) if opened else 0
        self._pending.discard(len(self._pending.text) - len(rest) + opener_length, out)
        self._state = self._start_arguments
        return True

    def _start_arguments(self, out: list[Segment]) -> bool:
        rest = self._pending.text.lstrip(WHITESPACE)
        ended = [starts_with(rest, end) for end in self._argument_ends]
        if True in ended:
            self._emit_arguments("{}", out)
            self._state = self._end_call
            return True
        if None in ended:
            return False
        self._pending.discard(len(self._pending.text) - len(rest), out)
        self._value = JsonValueReader(rest[0])
        if self._value.broken:
            self._state = self._skip_broken
            return True
        self._pending.discard(1, out)
        self._state = self._read_arguments
        return self._read_arguments(out)

    def _read_arguments(self, out: list[Segment]) -> bool:
        value = self._value
        self._pending.discard(value.feed(self._pending.text), out)
        self._emit_arguments(value.take_arguments(), out)
        if value.complete:
            self._state = self._end_call
        elif value.broken:
            self._state = self._skip_broken
        return value.complete or value.broken

    def _end_call(self, out: list[Segment]) -> bool:
        """Read the end of the code block and of the call."""
        rest = self._pending.text.lstrip(WHITESPACE + "`" if self._format.code_block else WHITESPACE)
        ended = starts_with(rest, self._format.end) if self._format.end else False
        if ended is None:
            return False
        if ended:
            self._pending.discard(len(self._pending.text) - len(rest) + len(self._format.end), out)
        self._state = self._after_call
        return True

    def _after_call(self, out: list[Segment]) -> bool:
        """Read the end of the section, which some models write twice."""
        if not self._format.section_end:
            return self._end_calls(out)
        rest = self._pending.text.lstrip(WHITESPACE)
        ended = starts_with(rest, self._format.section_end)
        if ended is None:
            return False
        if not ended:
            return self._end_calls(out)
        self._pending.discard(len(self._pending.text) - len(rest) + len(self._format.section_end), out)
        return True

    def _skip_broken(self, out: list[Segment]) -> bool:
        """Skip the rest of a call that broke after its start was emitted."""
        if not self._discard_until(self._argument_ends, out):
            return False
        self._state = self._end_call
        return True


def _could_be_head(head: str) -> bool:
    """Return whether the text after the begin marker may still become a name."""
    head = head.strip()
    return len(head) <= _MAX_HEAD_LENGTH and "\n" not in head
