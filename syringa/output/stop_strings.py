"""Ends a choice at a stop string, wherever token boundaries fall.

The rule: text is read character by character, and the first stop string to be complete wins; of several that are
complete at the same character, the longest. It depends on the text alone, not on how it was cut into pieces, and it
never has to wait for more tokens once a stop string is there.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from syringa.output.detokenizer import TextSegment


class StopStringMatcher:
    """A stage that holds back what could be the beginning of a stop string.

    Marks (special pieces) keep their place in the order; text is matched across them, since users see it so. A mark
    whose own text is a stop string ends the choice too. Once `matched` is set, everything that follows is dropped, and
    `consumed` is the number of tokens up to and including the one that completed the match: what usage counts. The
    tokens of the stop string itself are in no piece that comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        self.consumed = 0
        # The longest is asked first, which is how ties are settled.
        self._stops = [_Progress(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._texts = frozenset(stops)
        firsts = "".join({re.escape(stop[0]) for stop in stops})
        self._first = re.compile(f"[{firsts}]") if firsts else None
        self._held: deque[TextSegment] = deque()
        self._holding = 0  # characters of text in `_held`

    def feed(self, pieces: Sequence[TextSegment]) -> list[TextSegment]:
        if self._first is None:
            for piece in pieces:
                self.consumed += piece.tokens
            return list(pieces)
        out: list[TextSegment] = []
        for piece in pieces:
            if self.matched is not None:
                break
            self.consumed += piece.tokens
            if piece.special:
                self._take_mark(piece, out)
            elif self._holding or self._first.search(piece.text):
                self._take_text(piece, out)
            else:
                out.append(piece)
        return out

    def flush(self) -> list[TextSegment]:
        """What was held, since no stop string came of it."""
        out = list(self._held)
        self._forget()
        return out

    def _take_mark(self, piece: TextSegment, out: list[TextSegment]) -> None:
        if piece.text in self._texts:
            self.matched = piece.text
            out += self.flush()
        elif self._held:
            self._held.append(piece)
        else:
            out.append(piece)

    def _take_text(self, piece: TextSegment, out: list[TextSegment]) -> None:
        stops = self._stops
        self._held.append(piece)
        for index, character in enumerate(piece.text, 1):
            for stop in stops:
                if stop.advance(character):
                    self.matched = stop.text
                    self._release(self._holding + index - len(stop.text), out)
                    self._forget()
                    return
        self._holding += len(piece.text)
        self._release(self._holding - max(stop.reached for stop in stops), out)

    def _release(self, count: int, out: list[TextSegment]) -> None:
        """Moves the first `count` characters, and the marks among them, from what is held to `out`."""
        held = self._held
        self._holding -= count
        while held:
            piece = held[0]
            if piece.special:
                out.append(held.popleft())
            elif count == 0:
                return
            elif len(piece.text) <= count:
                count -= len(piece.text)
                out.append(held.popleft())
            else:
                out.append(TextSegment(piece.text[:count], piece.tokens))
                held[0] = TextSegment(piece.text[count:], 0)
                return

    def _forget(self) -> None:
        self._held.clear()
        self._holding = 0


class _Progress:
    """How much of one stop string the text so far ends with (Knuth, Morris, Pratt): constant time a character."""

    __slots__ = ("_fallback", "reached", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.reached = 0
        self._fallback = [0] * (len(text) + 1)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length]
            if text[index] == text[length]:
                length += 1
            self._fallback[index + 1] = length

    def advance(self, character: str) -> bool:
        """Takes a character and says whether the stop string is complete. It is not asked again after that."""
        text, reached = self.text, self.reached
        while reached and character != text[reached]:
            reached = self._fallback[reached]
        if character == text[reached]:
            reached += 1
        self.reached = reached
        return reached == len(text)
