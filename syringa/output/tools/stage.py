"""What the parsers of calls share: text is held back until it is decided what it is, and calls are told of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.ids import fresh_id
from syringa.output.detokenizer import Piece
from syringa.output.stages import HeldText, Part, overlap


class CallStage:
    """A parser's state is the method that takes the next step: it goes further in what is held, and returns False when
    more has to come first.

    Blanks before the first call, between calls and behind the last belong to no text.
    """

    def __init__(self, choice: int, marks: Iterable[str], openers: Sequence[str]) -> None:
        self.calls = 0
        self._choice = choice
        self._marks = frozenset(marks)  # that count as their text where they are tokens of their own
        self._openers = openers  # what a call may begin with
        self._held = HeldText()
        self._blank = True  # whether only blanks have come since the start or the last call
        self._origin = 0  # where in what is held the call at hand begins
        self._state: Callable[[list[Part]], bool] = self._find

    def feed(self, pieces: list[Piece]) -> list[Part]:
        out: list[Part] = []
        for piece in pieces:
            if piece.special and piece.text not in self._marks:
                self._held.add_mark(piece, out)
                continue
            self._held.add(piece)
            while self._held.text and self._state(out):
                pass
        return out

    def flush(self) -> list[Part]:
        """The rest. A call that was cut stays as far as it came; before its name, nothing of it."""
        out: list[Part] = []
        length = len(self._held.text)
        after_call = self._blank and self.calls and not self._held.text.strip()
        if self._is_text() and not after_call:
            self._held.pass_on(length, out)
        else:
            self._held.drop(length, out)
        self._held.flush_marks(out)
        return out

    def _is_text(self) -> bool:
        """Whether what is held is text, if no more comes."""
        return self._state == self._find

    def _find(self, out: list[Part]) -> bool:
        """Looks for what may begin a call."""
        text = self._held.text
        start = first_of(self._openers, text)
        if start >= 0:
            self._origin = start
            if text[:start].strip() or not self._blank:
                self._held.pass_on(start, out)
                self._origin, self._blank = 0, False
            self._state = self._begin
            return True
        sure = len(text) - max((overlap(text, mark) for mark in self._openers), default=0)
        if not (self._blank and not text[:sure].strip()):
            self._blank = False
            self._held.pass_on(sure, out)
        return False

    def _begin(self, out: list[Part]) -> bool:
        """Reads what `_find` has found, from `_origin` on."""
        raise NotImplementedError

    def _refuse(self, count: int, out: list[Part]) -> bool:
        """It was no call: the first `count` characters, at least, are text."""
        self._held.pass_on(count, out)
        self._state, self._blank = self._find, False
        return True

    def _rest(self, out: list[Part]) -> bool:
        """Behind a call there is text, or another call."""
        self._state, self._blank = self._find, True
        return True

    def _tell(self, name: str, id: str, out: list[Part]) -> None:
        out.append(ToolCallStart(self._choice, self.calls, id, name))
        self.calls += 1

    def _argue(self, arguments: str, out: list[Part]) -> None:
        if arguments:
            out.append(ToolCallDelta(self._choice, self.calls - 1, arguments))

    def _skip_past(self, ends: Sequence[str], out: list[Part]) -> bool:
        """Drops what is held up to the first of `ends`; False if there is none yet."""
        text = self._held.text
        end = first_of(ends, text)
        if end < 0:
            self._held.drop(len(text) - max((overlap(text, mark) for mark in ends), default=0), out)
            return False
        self._held.drop(end, out)
        return True


def new_id() -> str:
    return fresh_id("call_", 12)


def first_of(marks: Sequence[str], text: str) -> int:
    """Where the first of some marks begins, or -1."""
    return min((place for mark in marks if (place := text.find(mark)) >= 0), default=-1)


def begins(text: str, mark: str) -> bool | None:
    """Whether a text begins with a mark; None while that is open."""
    if text.startswith(mark):
        return True
    return None if mark.startswith(text) else False
