"""Parts a thought from the answer behind it, where marks stand around the thought."""

from __future__ import annotations

from enum import Enum, auto

from syringa.output.detokenizer import Piece
from syringa.output.stages import HeldText, Part, overlap
from syringa.output_formats import ThoughtMarks


class _In(Enum):
    START = auto()  # before anything but blanks
    OPENING = auto()  # in the thought, before anything but blanks
    THOUGHT = auto()
    GAP = auto()  # behind the thought, before anything but blanks
    ANSWER = auto()


class Thoughts:
    """A stage. Only what begins with the begin mark is a thought, unless the prompt has `opened` it already; a mark
    further on is the answer's own. Blanks inside the marks and behind them belong to nothing."""

    def __init__(self, marks: ThoughtMarks, *, opened: bool = False) -> None:
        self._begin, self._end = marks.begin.rstrip(), marks.end
        self._opened = opened
        self._in = _In.START
        self._held = HeldText()

    def feed(self, pieces: list[Piece]) -> list[Part]:
        out: list[Part] = []
        for piece in pieces:
            if self._in is _In.ANSWER:
                out.append(piece)
            elif piece.special and piece.text not in self._begin and piece.text not in self._end:
                self._held.add_mark(piece, out)
            else:
                self._held.add(piece)
                while self._advance(out):
                    pass
        return out

    def flush(self) -> list[Part]:
        """What was held: nothing more comes that could make it a mark."""
        out: list[Part] = []
        length = len(self._held.text)
        if self._in in (_In.OPENING, _In.THOUGHT) or (self._in is _In.START and self._opened):
            shown = len(self._held.text.rstrip())
            self._held.think(shown, out)
            self._held.drop(length - shown, out, thought=True)
        elif self._in is _In.GAP:
            self._held.drop(length, out)
        else:
            self._held.pass_on(length, out)
        self._held.flush_marks(out)
        return out

    def _advance(self, out: list[Part]) -> bool:
        """Goes one step further in what is held; False when more has to come first."""
        match self._in:
            case _In.START:
                return self._start(out)
            case _In.OPENING:
                return self._skip(out, _In.THOUGHT)
            case _In.THOUGHT:
                return self._think(out)
            case _In.GAP:
                return self._skip(out, _In.ANSWER)
            case _In.ANSWER:
                self._held.pass_on(len(self._held.text), out)
                self._held.flush_marks(out)
                return False

    def _start(self, out: list[Part]) -> bool:
        text = self._held.text.lstrip()
        blank = len(self._held.text) - len(text)
        if text.startswith(self._begin):
            # A prompt that has opened the thought does not keep every model from doing so once more.
            self._held.drop(blank + len(self._begin), out, thought=True)
            self._in = _In.OPENING
            return True
        if self._begin.startswith(text):
            return False
        self._in = _In.OPENING if self._opened else _In.ANSWER
        return True

    def _think(self, out: list[Part]) -> bool:
        text = self._held.text
        end = text.find(self._end)
        if end >= 0:
            shown = len(text[:end].rstrip())
            self._held.think(shown, out)
            self._held.drop(end - shown + len(self._end), out, thought=True)
            self._in = _In.GAP
            return True
        sure = len(text) - overlap(text, self._end)
        self._held.think(len(text[:sure].rstrip()), out)
        return False

    def _skip(self, out: list[Part], then: _In) -> bool:
        blank = len(self._held.text) - len(self._held.text.lstrip())
        self._held.drop(blank, out, thought=then is _In.THOUGHT)
        if not self._held.text:
            return False
        self._in = then
        return True
