"""Base class of the tool-call parsers: buffering of undecided text and emission of tool-call events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.ids import random_id
from syringa.output.detokenizer import TextSegment
from syringa.output.stages import PendingText, Segment, partial_match_length
from syringa.output.tools.fenced_calls import read_call_head
from syringa.output.tools.json_reader import WHITESPACE, JsonValueReader
from syringa.output_formats import FENCE_BEGIN, FENCE_END

ToolSchemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's arguments, by function name."""


class ToolCallParser(Protocol):
    """A stage that turns tool calls in the text into events.

    Tokens that belong to a call come back as segments without text, so that every token is still counted once and in
    order. No text follows a call: where a model goes on with some, the parser has `ended`, and drops it.
    """

    calls: int
    """Number of calls started so far."""

    ended: bool
    """Whether the choice ends here: text follows the calls."""

    dropped: int
    """Number of tokens that were dropped since then; they are in no segment."""

    def feed(self, segments: list[TextSegment]) -> list[Segment]: ...

    def flush(self) -> list[Segment]: ...


class BaseToolParser:
    """State machine over the pending text.

    The state is the method that takes the next step: it consumes pending text, and returns False if more input is
    needed. Whitespace before the first call, between calls and after the last one is dropped. In any format, calls of
    `functions` may also be written in a code block.
    """

    def __init__(
        self, choice: int, markers: Iterable[str], openers: Sequence[str], functions: Collection[str] = ()
    ) -> None:
        self.calls = 0
        self.ended = False
        self.dropped = 0
        self._choice = choice
        self._markers = frozenset(markers)  # read as text where they are special tokens
        self._functions = functions
        self._openers = (*openers, FENCE_BEGIN) if functions else openers  # markers a call may begin with
        self._fenced_arguments = JsonValueReader("{")  # of the current call in a code block
        self._pending = PendingText()
        self._only_whitespace = True  # since the start or the last call
        self._origin = 0  # where the current call begins in the pending text
        self._state: Callable[[list[Segment]], bool] = self._find_call

    def feed(self, segments: list[TextSegment]) -> list[Segment]:
        out: list[Segment] = []
        for segment in segments:
            if self.ended:
                self.dropped += segment.tokens
            elif segment.special and segment.text not in self._markers:
                self._pending.add_special(segment, out)
            else:
                self._pending.add(segment)
                while self._pending.text and self._state(out):
                    pass
        return out

    def flush(self) -> list[Segment]:
        """Classify the rest. A truncated call keeps what was emitted; without a complete name it is dropped."""
        out: list[Segment] = []
        length = len(self._pending.text)
        if self._pending_is_text() and not self.calls:
            self._pending.emit_text(length, out)
        else:
            self._pending.discard(length, out)
        self._pending.flush_special(out)
        return out

    def _pending_is_text(self) -> bool:
        """Return whether the pending text is answer text if no more input comes."""
        return self._state in (self._find_call, self._begin_fenced_call)

    def _find_call(self, out: list[Segment]) -> bool:
        """Look for a marker that may begin a call."""
        text = self._pending.text
        start = find_first(self._openers, text)
        if start >= 0:
            self._origin = start
            if text[:start].strip() or not self._only_whitespace:
                if not self._emit_text(start, out):
                    return False
                self._origin = 0
            fenced = self._functions and self._pending.text.startswith(FENCE_BEGIN, self._origin)
            self._state = self._begin_fenced_call if fenced else self._begin_call
            return True
        decided = len(text) - max((partial_match_length(text, marker) for marker in self._openers), default=0)
        if not (self._only_whitespace and not text[:decided].strip()):
            self._emit_text(decided, out)
        return False

    def _begin_call(self, out: list[Segment]) -> bool:
        """Read what follows the opener at `_origin`."""
        raise NotImplementedError

    def _reject_call(self, count: int, out: list[Segment]) -> bool:
        """Emit the first `count` characters as text: they were no call."""
        self._state = self._find_call
        return self._emit_text(count, out)

    def _emit_text(self, count: int, out: list[Segment]) -> bool:
        """Emit text if no call precedes it; otherwise end the choice and return False."""
        if self.calls:
            self.ended = True
            self.dropped = self._pending.drop()
            return False
        self._only_whitespace = False
        self._pending.emit_text(count, out)
        return True

    def _end_calls(self, out: list[Segment]) -> bool:
        """Continue with text or another call."""
        self._state, self._only_whitespace = self._find_call, True
        return True

    def _begin_fenced_call(self, out: list[Segment]) -> bool:
        """Read what follows the code block marker at `_origin`."""
        at = self._origin + len(FENCE_BEGIN)
        rest = self._pending.text[at:].lstrip(WHITESPACE)
        if rest.startswith("["):
            at = len(self._pending.text) - len(rest) + 1
        read = self._read_fenced_head(at, out)
        return self._reject_call(self._origin + len(FENCE_BEGIN), out) if read is False else bool(read)

    def _read_fenced_head(self, at: int, out: list[Segment]) -> bool | None:
        """Start the call whose object begins at `at`; return False if there is none, None if undecided."""
        head = read_call_head(self._pending.text, at, self._functions)
        if not isinstance(head, tuple):
            return head
        name, arguments_at = head
        self._emit_start(name, new_call_id(), out)
        self._pending.discard(arguments_at + 1, out)
        self._fenced_arguments = JsonValueReader("{")
        self._state = self._read_fenced_arguments
        return True

    def _read_fenced_arguments(self, out: list[Segment]) -> bool:
        value = self._fenced_arguments
        self._pending.discard(value.feed(self._pending.text), out)
        self._emit_arguments(value.take(), out)
        if value.complete:
            self._state = self._after_fenced_arguments
        elif value.broken:
            self._state = self._skip_fence
        return value.complete or value.broken

    def _after_fenced_arguments(self, out: list[Segment]) -> bool:
        """Read the end of the object, and of the code block or the start of the next object."""
        text = self._pending.text.lstrip(WHITESPACE)
        rest = text[1:].lstrip(WHITESPACE + ",") if text.startswith("}") else text
        if not rest or not text:
            return False
        read = self._read_fenced_head(len(self._pending.text) - len(rest), out) if rest.startswith("{") else False
        if read is False:
            self._state = self._skip_fence
            return True
        return bool(read)

    def _skip_fence(self, out: list[Segment]) -> bool:
        """Skip the rest of a code block with calls."""
        if not self._discard_until((FENCE_END,), out):
            return False
        self._pending.discard(len(FENCE_END), out)
        return self._end_calls(out)

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
