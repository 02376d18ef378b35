"""Parser of the harmony format of gpt-oss, in which the output is a sequence of messages with headers.

`<|channel|>analysis<|message|>…<|end|>` is reasoning, a message in the `commentary` channel with a recipient
`to=functions.name` is a tool call with its arguments as content, and `final`, or commentary without a recipient, is
text. The prompt ends after `<|start|>assistant`, so the output begins inside a header.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.ids import random_id
from syringa.output.detokenizer import TextSegment
from syringa.output.stages import PendingText, Segment, partial_match_length

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class _State(Enum):
    HEADER = auto()
    REASONING = auto()
    TEXT = auto()
    TOOL_CALL = auto()


class HarmonyParser:
    """Parse reasoning, tool calls and text in one stage."""

    def __init__(self, choice: int) -> None:
        self.calls = 0
        self.ended = False
        self.dropped = 0
        self._choice = choice
        self._state = _State.HEADER
        self._pending = PendingText()
        self._in_first_header = True

    def feed(self, segments: list[TextSegment]) -> list[Segment]:
        out: list[Segment] = []
        for segment in segments:
            if self.ended:
                self.dropped += segment.tokens
            elif segment.special and segment.text not in _MARKERS:
                self._pending.add_special(segment, out)
            else:
                self._pending.add(segment)
                while self._advance(out):
                    pass
        return out

    def flush(self) -> list[Segment]:
        out: list[Segment] = []
        self._emit_content(len(self._pending.text), out)
        self._pending.flush_special(out)
        return out

    def _advance(self, out: list[Segment]) -> bool:
        """Take one step in the pending text; return False if more input is needed."""
        return self._read_header(out) if self._state is _State.HEADER else self._read_content(out)

    def _read_header(self, out: list[Segment]) -> bool:
        text = self._pending.text
        if self._in_first_header and not _could_be_header(text):
            self._state, self._in_first_header = _State.TEXT, False
            return bool(text)
        end = text.find(MESSAGE)
        if end < 0:
            return False
        header = text[:end]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._state = _State.TOOL_CALL
        elif channel is not None and channel[1] == "analysis":
            self._state = _State.REASONING
        elif self.calls:  # no text follows a call
            self.ended = True
            self.dropped = self._pending.drop()
            return False
        else:
            self._state = _State.TEXT
        self._pending.discard(end + len(MESSAGE), out, reasoning=self._state is _State.REASONING)
        if recipient is not None:
            out.append(ToolCallStart(self._choice, self.calls, random_id("call_", 12), recipient[1]))
            self.calls += 1
        self._in_first_header = False
        return bool(self._pending.text)

    def _read_content(self, out: list[Segment]) -> bool:
        """Read content up to an end marker, or up to the next start marker where a model left the end marker out."""
        text = self._pending.text
        found = [(text.find(marker), marker) for marker in (*ENDS, START)]
        end, marker = min((each for each in found if each[0] >= 0), default=(-1, ""))
        if end < 0:
            self._emit_content(len(text) - max(partial_match_length(text, each) for each in _MARKERS), out)
            return False
        self._emit_content(end, out)
        self._pending.discard(len(marker), out, reasoning=self._state is _State.REASONING)
        self._state = _State.HEADER
        return bool(self._pending.text)

    def _emit_content(self, count: int, out: list[Segment]) -> None:
        text = self._pending.text[:count]
        match self._state:
            case _State.REASONING:
                self._pending.emit_reasoning(count, out)
            case _State.TEXT:
                self._pending.emit_text(count, out)
            case _State.HEADER:
                self._pending.discard(count, out)
            case _State.TOOL_CALL:
                self._pending.discard(count, out)
                if text:
                    out.append(ToolCallDelta(self._choice, self.calls - 1, text))


def _could_be_header(text: str) -> bool:
    """Return whether output that starts with `text` may be a message with a header rather than plain text."""
    begun = text.lstrip()
    markers = (CHANNEL, CONSTRAIN, START, MESSAGE, "to=")
    return any(begun.startswith(marker) or marker.startswith(begun) for marker in markers)
