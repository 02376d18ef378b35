"""What passes between the stages behind the detokenizer, and the text that a stage holds back until it is decided."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import msgspec

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import Piece


class Thought(msgspec.Struct, frozen=True, gc=False):
    """A stretch of what the model thinks. `tokens` counts as in `Piece`; the marks around a thought are in it."""

    text: str
    tokens: int = 1


Part = Piece | Thought | ToolCallStart | ToolCallDelta


class Stage(Protocol):
    """Takes pieces and gives back parts. Every token is counted once, in its place, whatever became of its text."""

    def feed(self, pieces: list[Piece]) -> list[Part]: ...

    def flush(self) -> list[Part]: ...


class HeldText:
    """Pieces whose text is not decided yet. Marks (special pieces) among them keep their place in the order."""

    __slots__ = ("_pieces", "text")

    def __init__(self) -> None:
        self.text = ""
        self._pieces: deque[Piece] = deque()

    def __bool__(self) -> bool:
        return bool(self._pieces)

    def add(self, piece: Piece) -> None:
        """Holds text."""
        self._pieces.append(piece if not piece.special else Piece(piece.text, piece.tokens))
        self.text += piece.text

    def add_mark(self, piece: Piece, out: list[Part]) -> None:
        """A mark that means nothing here: it waits only if something waits before it."""
        if self._pieces:
            self._pieces.append(piece)
        else:
            out.append(piece)

    def pass_on(self, count: int, out: list[Part]) -> None:
        """The first `count` characters are text of the answer."""
        for text, tokens in self._release(count, out):
            out.append(Piece(text, tokens))

    def think(self, count: int, out: list[Part]) -> None:
        """The first `count` characters are part of a thought."""
        for text, tokens in self._release(count, out):
            out.append(Thought(text, tokens))

    def drop(self, count: int, out: list[Part], *, thought: bool = False) -> None:
        """Nobody sees the first `count` characters; their tokens are counted, in the answer or in the thought."""
        for _, tokens in self._release(count, out):
            if tokens:
                out.append(Thought("", tokens) if thought else Piece("", tokens))

    def flush_marks(self, out: list[Part]) -> None:
        """What is left once all text has gone: marks, and tokens without any text."""
        out += self._pieces
        self._pieces.clear()

    def _release(self, count: int, out: list[Part]) -> Iterator[tuple[str, int]]:
        """Hands out the first `count` characters, piece by piece; marks among them go to `out` in their place."""
        held = self._pieces
        self.text = self.text[count:]
        while held and (count or held[0].special or not held[0].text):
            piece = held.popleft()
            if piece.special:
                out.append(piece)
                continue
            part = piece.text[:count]
            count -= len(part)
            if len(part) < len(piece.text):
                held.appendleft(Piece(piece.text[len(part) :], 0))
            yield part, piece.tokens


def overlap(text: str, mark: str) -> int:
    """How much of the end of `text` could be the beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
