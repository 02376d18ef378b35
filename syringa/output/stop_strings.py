"""Stop strings, independent of token boundaries.

Text is read character by character. The first stop string that is complete wins; of several that are complete at the
same character, the longest. The result depends on the text alone, not on how it is split into segments, and a match
never waits for further tokens.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence

from syringa.output.detokenizer import TextSegment


class StopStringMatcher:
    """A stage that holds back text that may become a stop string.

    Special tokens keep their position; text is matched across them, as clients see it, and a special token whose text
    is a stop string ends the choice too. Once `matched` is set, all further input is dropped, and `consumed` is the
    number of tokens up to and including the one that completed the match. The tokens of the stop string itself are in
    no segment, unless `include` is set.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self.matched: str | None = None
        self.consumed = 0
        # Longest first, so that ties go to the longest.
        self._stops = [_StringMatcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._stop_texts = frozenset(stops)
        firsts = "".join({re.escape(stop[0]) for stop in stops})
        self._first_character = re.compile(f"[{firsts}]") if firsts else None
        self._pending: deque[TextSegment] = deque()
        self._pending_length = 0  # characters of text in `_pending`

    def feed(self, segments: Sequence[TextSegment]) -> list[TextSegment]:
        if self._first_character is None:
            for segment in segments:
                self.consumed += segment.tokens
            return list(segments)
        out: list[TextSegment] = []
        for segment in segments:
            if self.matched is not None:
                break
            self.consumed += segment.tokens
            if segment.special:
                self._feed_special(segment, out)
            elif self._pending_length or self._first_character.search(segment.text):
                self._feed_text(segment, out)
            else:
                out.append(segment)
        return out

    def flush(self) -> list[TextSegment]:
        """Return the pending text, which has become no stop string."""
        out = list(self._pending)
        self._clear()
        return out

    def _feed_special(self, segment: TextSegment, out: list[TextSegment]) -> None:
        if segment.text in self._stop_texts:
            self.matched = segment.text
            out += self.flush()
            if self._include:
                out.append(TextSegment(segment.text, segment.tokens))
        elif self._pending:
            self._pending.append(segment)
        else:
            out.append(segment)

    def _feed_text(self, segment: TextSegment, out: list[TextSegment]) -> None:
        stops = self._stops
        self._pending.append(segment)
        for index, character in enumerate(segment.text, 1):
            for stop in stops:
                if stop.advance(character):
                    self.matched = stop.text
                    end = self._pending_length + index
                    self._release(end if self._include else end - len(stop.text), out)
                    self._clear()
                    return
        self._pending_length += len(segment.text)
        self._release(self._pending_length - max(stop.matched_length for stop in stops), out)

    def _release(self, count: int, out: list[TextSegment]) -> None:
        """Move the first `count` pending characters, and the special tokens among them, to `out`."""
        pending = self._pending
        self._pending_length -= count
        while pending:
            segment = pending[0]
            if segment.special:
                out.append(pending.popleft())
            elif count == 0:
                return
            elif len(segment.text) <= count:
                count -= len(segment.text)
                out.append(pending.popleft())
            else:
                out.append(TextSegment(segment.text[:count], segment.tokens))
                pending[0] = TextSegment(segment.text[count:], 0)
                return

    def _clear(self) -> None:
        self._pending.clear()
        self._pending_length = 0


class _StringMatcher:
    """The length of the longest prefix of a stop string that the text ends with (Knuth-Morris-Pratt)."""

    __slots__ = ("_fallback", "matched_length", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched_length = 0
        self._fallback = [0] * (len(text) + 1)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length]
            if text[index] == text[length]:
                length += 1
            self._fallback[index + 1] = length

    def advance(self, character: str) -> bool:
        """Consume a character and return whether the stop string is complete; not called again after that."""
        text, matched_length = self.text, self.matched_length
        while matched_length and character != text[matched_length]:
            matched_length = self._fallback[matched_length]
        if character == text[matched_length]:
            matched_length += 1
        self.matched_length = matched_length
        return matched_length == len(text)
