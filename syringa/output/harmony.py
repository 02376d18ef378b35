"""gpt-oss's harmony format: a turn is a row of messages, each with a header that says what it is for.

`<|channel|>analysis<|message|>…<|end|>` is a thought, the `commentary` channel with a recipient `to=functions.name` a
call whose content are its arguments, and `final`, or commentary to nobody, is text. The prompt ends behind
`<|start|>assistant`, so that a turn begins inside a header.
"""

from __future__ import annotations

import re
from enum import Enum, auto

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.ids import fresh_id
from syringa.output.detokenizer import Piece
from syringa.output.stages import HeldText, Part, overlap

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class _In(Enum):
    HEADER = auto()
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


class HarmonyMessages:
    """A stage for thoughts, calls and text at once."""

    def __init__(self, choice: int) -> None:
        self.calls = 0
        self._choice = choice
        self._in = _In.HEADER
        self._held = HeldText()
        self._first = True  # the header at hand began in the prompt

    def feed(self, pieces: list[Piece]) -> list[Part]:
        out: list[Part] = []
        for piece in pieces:
            if piece.special and piece.text not in _MARKS:
                self._held.add_mark(piece, out)
                continue
            self._held.add(piece)
            while self._advance(out):
                pass
        return out

    def flush(self) -> list[Part]:
        out: list[Part] = []
        self._content(len(self._held.text), out)
        self._held.flush_marks(out)
        return out

    def _advance(self, out: list[Part]) -> bool:
        """Goes one step further in what is held; False when more has to come first."""
        return self._header(out) if self._in is _In.HEADER else self._message(out)

    def _header(self, out: list[Part]) -> bool:
        text = self._held.text
        if self._first and not _could_be_header(text):
            self._in, self._first = _In.TEXT, False
            return bool(text)
        end = text.find(MESSAGE)
        if end < 0:
            return False
        header = text[:end]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._in = _In.CALL
        elif channel is not None and channel[1] == "analysis":
            self._in = _In.THOUGHT
        else:
            self._in = _In.TEXT
        self._held.drop(end + len(MESSAGE), out, thought=self._in is _In.THOUGHT)
        if recipient is not None:
            out.append(ToolCallStart(self._choice, self.calls, fresh_id("call_", 12), recipient[1]))
            self.calls += 1
        self._first = False
        return bool(self._held.text)

    def _message(self, out: list[Part]) -> bool:
        """Content goes on until a mark ends it: its own, or the start of the next message where a model forgot it."""
        text = self._held.text
        found = [(text.find(mark), mark) for mark in (*ENDS, START)]
        end, mark = min((each for each in found if each[0] >= 0), default=(-1, ""))
        if end < 0:
            self._content(len(text) - max(overlap(text, mark) for mark in _MARKS), out)
            return False
        self._content(end, out)
        self._held.drop(len(mark), out, thought=self._in is _In.THOUGHT)
        self._in = _In.HEADER
        return bool(self._held.text)

    def _content(self, count: int, out: list[Part]) -> None:
        text = self._held.text[:count]
        match self._in:
            case _In.THOUGHT:
                self._held.think(count, out)
            case _In.TEXT:
                self._held.pass_on(count, out)
            case _In.HEADER:
                self._held.drop(count, out)
            case _In.CALL:
                self._held.drop(count, out)
                if text:
                    out.append(ToolCallDelta(self._choice, self.calls - 1, text))


def _could_be_header(text: str) -> bool:
    """Whether a turn that begins so may go on to be a message with a header, and is not plain text."""
    begun = text.lstrip()
    marks = (CHANNEL, CONSTRAIN, START, MESSAGE, "to=")
    return any(begun.startswith(mark) or mark.startswith(begun) for mark in marks)
