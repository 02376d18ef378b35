"""The stage interface of the output pipeline, its segment types, and a buffer for undecided text."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import TextSegment


class ReasoningSegment(msgspec.Struct, frozen=True, gc=False):
    """A piece of reasoning text. `tokens` counts as in `TextSegment`; the tokens of the markers are included."""

    text: str
    tokens: int = 1


Segment = TextSegment | ReasoningSegment | ToolCallStart | ToolCallDelta


class Stage(Protocol):
    """A parser that takes text segments and returns classified segments.

    Every token is counted exactly once and in order, also when its text is dropped.
    """

    def feed(self, segments: list[TextSegment]) -> list[Segment]: ...

    def flush(self) -> list[Segment]: ...


class PendingText:
    """Buffer of text that a stage has not classified yet. Special tokens within it keep their position."""

    __slots__ = ("_segments", "text")

    def __init__(self) -> None:
        self.text = ""
        self._segments: deque[TextSegment] = deque()

    def __bool__(self) -> bool:
        return bool(self._segments)

    def add(self, segment: TextSegment) -> None:
        """Append a segment as text."""
        self._segments.append(segment if not segment.special else TextSegment(segment.text, segment.tokens))
        self.text += segment.text

    def add_special(self, segment: TextSegment, out: list[Segment]) -> None:
        """Append a special token that is no marker of the stage, or emit it if nothing is pending before it."""
        if self._segments:
            self._segments.append(segment)
        else:
            out.append(segment)

    def emit_text(self, count: int, out: list[Segment]) -> None:
        """Emit the first `count` characters as answer text."""
        for text, tokens in self._release(count, out):
            out.append(TextSegment(text, tokens))

    def emit_reasoning(self, count: int, out: list[Segment]) -> None:
        """Emit the first `count` characters as reasoning."""
        for text, tokens in self._release(count, out):
            out.append(ReasoningSegment(text, tokens))

    def discard(self, count: int, out: list[Segment], *, reasoning: bool = False) -> None:
        """Drop the first `count` characters; their tokens count as reasoning or as answer."""
        for _, tokens in self._release(count, out):
            if tokens:
                out.append(ReasoningSegment("", tokens) if reasoning else TextSegment("", tokens))

    def drop(self) -> int:
        """Drop everything without a trace, and return the number of its tokens."""
        tokens = sum(segment.tokens for segment in self._segments)
        self._segments.clear()
        self.text = ""
        return tokens

    def flush_special(self, out: list[Segment]) -> None:
        """Emit what is left once all text is gone: special tokens, and tokens without text."""
        out += self._segments
        self._segments.clear()

    def _release(self, count: int, out: list[Segment]) -> Iterator[tuple[str, int]]:
        """Yield the first `count` characters segment by segment; special tokens among them go to `out`."""
        pending = self._segments
        self.text = self.text[count:]
        while pending and (count or pending[0].special or not pending[0].text):
            segment = pending.popleft()
            if segment.special:
                out.append(segment)
                continue
            part = segment.text[:count]
            count -= len(part)
            if len(part) < len(segment.text):
                pending.appendleft(TextSegment(segment.text[len(part) :], 0))
            yield part, segment.tokens


def partial_match_length(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
