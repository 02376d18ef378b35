"""Reasoning parser for formats with a marker before and after the reasoning section."""

from __future__ import annotations

from enum import Enum, auto

from syringa.output.detokenizer import TextSegment
from syringa.output.stages import PendingText, Segment, partial_match_length
from syringa.output_formats import ReasoningMarkers


class _State(Enum):
    START = auto()  # nothing but whitespace so far
    OPENING = auto()  # after the begin marker, nothing but whitespace since
    REASONING = auto()
    GAP = auto()  # after the end marker, nothing but whitespace since
    ANSWER = auto()


class ReasoningParser:
    """Split the reasoning section from the answer.

    The section must start with the begin marker, unless the prompt has `opened` it; later begin markers are answer
    text. Whitespace inside and after the markers is dropped.
    """

    def __init__(self, markers: ReasoningMarkers, *, opened: bool = False) -> None:
        self._begin, self._end = markers.begin.rstrip(), markers.end
        self._opened = opened
        self._state = _State.START
        self._pending = PendingText()

    def feed(self, segments: list[TextSegment]) -> list[Segment]:
        out: list[Segment] = []
        for segment in segments:
            if self._state is _State.ANSWER:
                out.append(segment)
            elif segment.special and segment.text not in self._begin and segment.text not in self._end:
                self._pending.add_special(segment, out)
            else:
                self._pending.add(segment)
                while self._advance(out):
                    pass
        return out

    def flush(self) -> list[Segment]:
        """Classify the pending text, which can no longer become a marker."""
        out: list[Segment] = []
        length = len(self._pending.text)
        if self._state in (_State.OPENING, _State.REASONING) or (self._state is _State.START and self._opened):
            shown = len(self._pending.text.rstrip())
            self._pending.emit_reasoning(shown, out)
            self._pending.discard(length - shown, out, reasoning=True)
        elif self._state is _State.GAP:
            self._pending.discard(length, out)
        else:
            self._pending.emit_text(length, out)
        self._pending.flush_special(out)
        return out

    def _advance(self, out: list[Segment]) -> bool:
        """Take one step in the pending text; return False if more input is needed."""
        match self._state:
            case _State.START:
                return self._start(out)
            case _State.OPENING:
                return self._skip_whitespace(out, _State.REASONING)
            case _State.REASONING:
                return self._read_reasoning(out)
            case _State.GAP:
                return self._skip_whitespace(out, _State.ANSWER)
            case _State.ANSWER:
                self._pending.emit_text(len(self._pending.text), out)
                self._pending.flush_special(out)
                return False

    def _start(self, out: list[Segment]) -> bool:
        text = self._pending.text.lstrip()
        whitespace = len(self._pending.text) - len(text)
        if text.startswith(self._begin):
            # Some models write the begin marker again although the prompt has opened the section.
            self._pending.discard(whitespace + len(self._begin), out, reasoning=True)
            self._state = _State.OPENING
            return True
        if self._begin.startswith(text):
            return False
        self._state = _State.OPENING if self._opened else _State.ANSWER
        return True

    def _read_reasoning(self, out: list[Segment]) -> bool:
        text = self._pending.text
        end = text.find(self._end)
        if end >= 0:
            shown = len(text[:end].rstrip())
            self._pending.emit_reasoning(shown, out)
            self._pending.discard(end - shown + len(self._end), out, reasoning=True)
            self._state = _State.GAP
            return True
        decided = len(text) - partial_match_length(text, self._end)
        self._pending.emit_reasoning(len(text[:decided].rstrip()), out)
        return False

    def _skip_whitespace(self, out: list[Segment], following: _State) -> bool:
        whitespace = len(self._pending.text) - len(self._pending.text.lstrip())
        self._pending.discard(whitespace, out, reasoning=following is _State.REASONING)
        if not self._pending.text:
            return False
        self._state = following
        return True
