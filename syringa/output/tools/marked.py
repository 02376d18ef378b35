"""Calls in which marks part the name from the arguments: `begin` name `arguments` {…} `end`. See `CallMarks`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from syringa.output.stages import Part
from syringa.output.tools.call import BLANKS, JsonValue
from syringa.output.tools.stage import CallStage, begins, first_of, new_id
from syringa.output_formats import CallMarks

_NAME = re.compile(r"[\w.\-]+")
_LONGEST_HEAD = 200  # characters of a name, and an id where it stands beside it
_FENCE = "```json"


class MarkedCalls(CallStage):
    """Parses any of these formats. A call that stands outside of its section is one all the same."""

    marks: CallMarks
    name_ends: Sequence[str] = ()  # what a name may end before, if more than the mark for arguments
    other_marks: Sequence[str] = ()

    def __init__(self, choice: int, parameters: Mapping[str, Any] | None = None) -> None:
        marks = self.marks
        around = [mark for mark in (marks.section, marks.begin) if mark]
        ends = [mark for mark in (marks.end, marks.section_end) if mark]
        super().__init__(choice, {*around, *ends, marks.arguments, *self.other_marks}, around)
        fences = ["```"] if marks.code else []
        self._stops = (*ends, *around, *fences)  # none of them is part of arguments
        self._name_ends = self.name_ends or (marks.arguments,)
        self._lead = _FENCE if marks.code else marks.arguments
        self._value = JsonValue("{")

    def _identify(self, head: str) -> tuple[str, str]:
        """The name and the id in what stands before the arguments."""
        return head.strip(), new_id()

    def _begin(self, out: list[Part]) -> bool:
        """The marks before a call, and its name."""
        marks, text = self.marks, self._held.text
        first = marks.section if marks.section and text.startswith(marks.section, self._origin) else ""
        rest = text[self._origin + len(first) :]
        rest = rest.lstrip(BLANKS) if first else rest
        begun = begins(rest, marks.begin)
        if begun is None:
            return False
        length = self._origin + len(first or marks.begin)
        if not begun:
            return self._refuse(length, out)
        head = rest[len(marks.begin) :]
        end = first_of(self._name_ends, head)
        if end < 0:
            return not _could_be_head(head) and self._refuse(length, out)
        name, id = self._identify(head[:end])
        if not _NAME.fullmatch(name) or not _could_be_head(head[:end]):
            return self._refuse(length, out)
        self._held.drop(len(text) - len(head) + end, out)
        self._tell(name, id, out)
        self._state = self._before_arguments
        return True

    def _before_arguments(self, out: list[Part]) -> bool:
        rest = self._held.text.lstrip(BLANKS)
        led = begins(rest, self._lead)
        if led is None:
            return False
        self._held.drop(len(self._held.text) - len(rest) + (len(self._lead) if led else 0), out)
        self._state = self._first_of_arguments
        return True

    def _first_of_arguments(self, out: list[Part]) -> bool:
        rest = self._held.text.lstrip(BLANKS)
        stopped = [begins(rest, stop) for stop in self._stops]
        if True in stopped:
            self._argue("{}", out)
            self._state = self._close
            return True
        if None in stopped:
            return False
        self._held.drop(len(self._held.text) - len(rest), out)
        self._value = JsonValue(rest[0])
        if self._value.broken:
            self._state = self._skip
            return True
        self._held.drop(1, out)
        self._state = self._arguments
        return self._arguments(out)

    def _arguments(self, out: list[Part]) -> bool:
        value = self._value
        self._held.drop(value.feed(self._held.text), out)
        self._argue(value.take_arguments(), out)
        if value.whole:
            self._state = self._close
        elif value.broken:
            self._state = self._skip
        return value.whole or value.broken

    def _close(self, out: list[Part]) -> bool:
        """After the arguments: the end of the code block, and of the call."""
        rest = self._held.text.lstrip(BLANKS + "`" if self.marks.code else BLANKS)
        ended = begins(rest, self.marks.end) if self.marks.end else False
        if ended is None:
            return False
        if ended:
            self._held.drop(len(self._held.text) - len(rest) + len(self.marks.end), out)
        self._state = self._between
        return True

    def _between(self, out: list[Part]) -> bool:
        """After a call: perhaps the end of the section. Some models write that twice."""
        if not self.marks.section_end:
            return self._rest(out)
        rest = self._held.text.lstrip(BLANKS)
        ended = begins(rest, self.marks.section_end)
        if ended is None:
            return False
        if not ended:
            return self._rest(out)
        self._held.drop(len(self._held.text) - len(rest) + len(self.marks.section_end), out)
        return True

    def _skip(self, out: list[Part]) -> bool:
        """In a call that broke after it was told of."""
        if not self._skip_past(self._stops, out):
            return False
        self._state = self._close
        return True


def _could_be_head(head: str) -> bool:
    """Whether what stands behind the mark that begins a call may go on to be a name with its marks."""
    head = head.strip()
    return len(head) <= _LONGEST_HEAD and "\n" not in head
