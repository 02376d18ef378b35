"""Calls as Hermes, Qwen and our own plain format write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Sequence
from enum import Enum, auto

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import Piece
from syringa.output.tools.call import CallReader

BEGIN, END = "<tool_call>", "</tool_call>"

Output = Piece | ToolCallStart | ToolCallDelta


class _In(Enum):
    TEXT = auto()
    NAME = auto()  # in a call of which nothing has been told: if it breaks, it was text
    ARGUMENTS = auto()
    CLOSING = auto()  # after a call, before its end mark
    SKIPPING = auto()  # in a call that broke after it was told of


class HermesCalls:
    """Blanks before the first call, between calls and after the last belong to no text."""

    def __init__(self, choice: int) -> None:
        self.calls = 0
        self._choice = choice
        self._in = _In.TEXT
        self._blank = True  # whether only blanks have come since the start or the last call
        self._reader = CallReader()
        self._held: deque[Piece] = deque()
        self._text = ""  # that of `_held`
        self._read = 0  # how much of it the reader has had

    def feed(self, pieces: Sequence[Piece]) -> list[Output]:
        out: list[Output] = []
        for piece in pieces:
            if piece.special and piece.text not in (BEGIN, END):
                if self._held:
                    self._held.append(piece)
                else:
                    out.append(piece)
                continue
            # Where a mark is a token of its own, it counts as its text.
            self._held.append(Piece(piece.text, piece.tokens))
            self._text += piece.text
            while self._advance(out):
                pass
        return out

    def flush(self) -> list[Output]:
        """The rest. A call that was cut stays as far as it came; before its name, nothing of it."""
        out: list[Output] = []
        after_call = self._in is _In.TEXT and self._blank and self.calls and not self._text.strip()
        if self._in is _In.TEXT and not after_call:
            self._pass_on(len(self._text), out)
        else:
            self._drop(len(self._text), out)
        while self._held:  # marks that followed
            out.append(self._held.popleft())
        return out

    def _advance(self, out: list[Output]) -> bool:
        """Goes one step further in what is held; False when more has to come first."""
        if not self._text:
            return False
        match self._in:
            case _In.TEXT:
                return self._look_for_call(out)
            case _In.NAME | _In.ARGUMENTS:
                return self._read_call(out)
            case _In.CLOSING:
                return self._close(out)
            case _In.SKIPPING:
                return self._skip(out)

    def _look_for_call(self, out: list[Output]) -> bool:
        text = self._text
        start = text.find(BEGIN)
        if start >= 0:
            if self._blank and not text[:start].strip():
                self._drop(start, out)
            else:
                self._pass_on(start, out)
            self._in, self._reader, self._read = _In.NAME, CallReader(), len(BEGIN)
            return True
        sure = len(text) - _overlap(text, BEGIN)
        if not (self._blank and not text[:sure].strip()):
            self._blank = False
            self._pass_on(sure, out)
        return False

    def _read_call(self, out: list[Output]) -> bool:
        reader = self._reader
        self._read += reader.feed(self._text[self._read :])
        if reader.broken and reader.name is None:
            self._in, self._blank = _In.TEXT, False
            self._pass_on(len(BEGIN), out)
            return True
        if self._in is _In.NAME and reader.name is not None:
            self._in = _In.ARGUMENTS
            out.append(ToolCallStart(self._choice, self.calls, f"call_{uuid.uuid4().hex[:24]}", reader.name))
            self.calls += 1
        if self._in is _In.NAME:
            return False
        self._drop(self._read, out)
        self._read = 0
        if arguments := reader.take():
            out.append(ToolCallDelta(self._choice, self.calls - 1, arguments))
        if reader.broken:
            self._in = _In.SKIPPING
        elif reader.done:
            self._in = _In.CLOSING
        return self._in is not _In.ARGUMENTS

    def _close(self, out: list[Output]) -> bool:
        rest = self._text.lstrip()
        if not rest.startswith(END) and END.startswith(rest):
            return False
        if rest.startswith(END):
            self._drop(len(self._text) - len(rest) + len(END), out)
        self._in, self._blank = _In.TEXT, True
        return True

    def _skip(self, out: list[Output]) -> bool:
        end = self._text.find(END)
        if end >= 0:
            self._in, self._blank = _In.TEXT, True
            self._drop(end + len(END), out)
            return True
        self._drop(len(self._text) - _overlap(self._text, END), out)
        return False

    def _pass_on(self, count: int, out: list[Output]) -> None:
        self._release(count, out, shown=True)

    def _drop(self, count: int, out: list[Output]) -> None:
        self._release(count, out, shown=False)

    def _release(self, count: int, out: list[Output], *, shown: bool) -> None:
        """Moves the first `count` characters out of what is held, as text or as the tokens alone."""
        held = self._held
        self._text = self._text[count:]
        while held and (count or held[0].special or not held[0].text):
            piece = held.popleft()
            if piece.special:
                out.append(piece)
                continue
            taken = piece.text[:count]
            if shown and taken:
                out.append(Piece(taken, piece.tokens))
            elif piece.tokens:
                out.append(Piece("", piece.tokens))
            count -= len(taken)
            if len(taken) < len(piece.text):
                held.appendleft(Piece(piece.text[len(taken) :], 0))


def _overlap(text: str, mark: str) -> int:
    """How much of the end of `text` could be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
