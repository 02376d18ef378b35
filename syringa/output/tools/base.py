"""Base class of the tool-call parsers: buffering of undecided text and emission of tool-call events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.ids import random_id
from syringa.output.detokenizer import TextSegment
from syringa.output.stages import PendingText, Segment, partial_match_length

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's arguments, by function name."""


class ToolCallParser(Protocol):
    """A stage that turns tool calls in the text into events.

    Tokens that belong to a call come back as segments without text, so that every token is still counted once and in
    order.
    """

    calls: int
    """Number of calls started so far."""

    def feed(self, segments: list[TextSegment]) -> list[Segment]: ...

    def flush(self) -> list[Segment]: ...


class BaseToolParser:
    """State machine over the pending text.

    The state is the method that takes the next step: it consumes pending text, and returns False if more input is
    needed. Whitespace before the first call, between calls and after the last one is dropped.
    """

    def __init__(self, choice: int, markers: Iterable[str], openers: Sequence[str]) -> None:
        self.calls = 0
        self._choice = choice
        self._markers = frozenset(markers)  # read as text where they are special tokens
        self._openers = openers  # markers a call may begin with
        self._pending = PendingText()
        self._only_whitespace = True  # since the start or the last call
        self._origin = 0  # where the current call begins in the pending text
        self._state: Callable[[list[Segment]], bool] = self._find_call

    def feed(self, segments: list[TextSegment]) -> list[Segment]:
        out: list[Segment] = []
        for segment in segments:
            if segment.special and segment.text not in self._markers:
                self._pending.add_special(segment, out)
                continue
            self._pending.add(segment)
            while self._pending.text and self._state(out):
                pass
        return out

    def flush(self) -> list[Segment]:
        """Classify the rest. A truncated call keeps what was emitted; without a complete name it is dropped."""
        out: list[Segment] = []
        length = len(self._pending.text)
        after_call = self._only_whitespace and self.calls and not self._pending.text.strip()
        if self._pending_is_text() and not after_call:
            self._pending.emit_text(length, out)
        else:
            self._pending.discard(length, out)
        self._pending.flush_special(out)
        return out

    def _pending_is_text(self) -> bool:
        """Return whether the pending text is answer text if no more input comes."""
        return self._state == self._find_call

    def _find_call(self, out: list[Segment]) -> bool:
        """Look for a marker that may begin a call."""
        text = self._pending.text
        start = find_first(self._openers, text)
        if start >= 0:
            self._origin = start
            if text[:start].strip() or not self._only_whitespace:
                self._pending.emit_text(start, out)
                self._origin, self._only_whitespace = 0, False
            self._state = self._begin_call
            return True
        decided = len(text) - max((partial_match_length(text, marker) for marker in self._openers), default=0)
        if not (self._only_whitespace and not text[:decided].strip()):
            self._only_whitespace = False
            self._pending.emit_text(decided, out)
        return False

    def _begin_call(self, out: list[Segment]) -> bool:
        """Read what follows the opener at `_origin`."""
        raise NotImplementedError

    def _reject_call(self, count: int, out: list[Segment]) -> bool:
        """Emit the first `count` characters as text: they were no call."""
        self._pending.emit_text(count, out)
        self._state, self._only_whitespace = self._find_call, False
        return True

    def _end_calls(self, out: list[Segment]) -> bool:
        """Continue with text or another call."""
        self._state, self._only_whitespace = self._find_call, True
        return True

    def _emit_start(self, name: str, id: str, out: list[Segment]) -> None:
        out.append(ToolCallStart(self._choice, self.calls, id, name))
        self.calls += 1

    def _emit_arguments(self, arguments: str, out: list[Segment]) -> None:
        if arguments:
            out.append(ToolCallDelta(self._choice, self.calls - 1, arguments))

    def _discard_until(self, ends: Sequence[str], out: list[Segment]) -> bool:
        """Drop pending text up to the first of `ends`; return False if there is none yet."""
        text = self._pending.text
        end = find_first(ends, text)
        if end < 0:
            self._pending.discard(
                len(text) - max((partial_match_length(text, marker) for marker in ends), default=0), out
            )
            return False
        self._pending.discard(end, out)
        return True


def new_call_id() -> str:
    return random_id("call_", 12)


def find_first(markers: Sequence[str], text: str) -> int:
    """Return the position of the first marker in the text, or -1."""
    return min((position for marker in markers if (position := text.find(marker)) >= 0), default=-1)


def starts_with(text: str, marker: str) -> bool | None:
    """Return whether the text starts with a marker; None if more input is needed."""
    if text.startswith(marker):
        return True
    return None if marker.startswith(text) else False


def starts_with_any(text: str, markers: Sequence[str]) -> tuple[bool | None, str]:
    """Return whether the text starts with one of the markers, and with which; None if more input is needed."""
    found = [starts_with(text, marker) for marker in markers]
    if True in found:
        return True, markers[found.index(True)]
    return (None if None in found else False), ""
