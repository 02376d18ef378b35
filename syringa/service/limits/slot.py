"""One name's part of the table of limits: what it did in the last minute, and what it runs now.

A slot has a bin for each of the last 61 seconds, with a count and the moment of the last one counted. A bin is
forgotten 60 seconds after that moment, so no window of 60 seconds ever holds more than was allowed, and nobody is told
to wait for longer than that, which older OpenAI clients would not. A slot also has a cell for each process, with what
that process runs. A cell counts only if it was written in the current life of its process.

A process may be killed between any two writes. Every write is one aligned word, bins are cleared before the second
that they lead up to is noted, and what is out of range is taken for forgotten, so the worst is a minute's wrong count.
"""

from __future__ import annotations

SPAN = 60  # seconds
MICRO = 1_000_000  # time is in whole microseconds, so that sums of it are exact
PROCESSES = 64

_BINS = SPAN + 1
_MOST = 2**32 - 1
# In words of 32 bits. The table begins with a header: what it is, its size, how many processes, the life of each.
KIND, SIZE, ATTACHED, LIVES, HEADER = 0, 1, 2, 16, 1024
# A slot: the hash of its name in four, the second that it was last brought up to, bins of both kinds, cells.
_SECOND, _REQUESTS, _TOKENS, _CELLS = 4, 5, 5 + 2 * _BINS, 256
SLOT = _CELLS + PROCESSES


class Series:
    """One kind of count over the last minute: bins, and after them the last moment of each, within its second."""

    __slots__ = ("_bins", "_now", "_start", "_words", "used")

    def __init__(self, words: memoryview, start: int, now: int) -> None:
        self._words = words
        self._start = start
        self._now = now
        self._bins: list[int] = words[start : start + _BINS].tolist()
        self.used = sum(self._bins)

    def add(self, number: int) -> None:
        second, moment = divmod(self._now, MICRO)
        bin = second % _BINS
        count = min(self._bins[bin] + number, _MOST)
        self.used += count - self._bins[bin]
        self._bins[bin] = count
        self._words[self._start + _BINS + bin] = moment  # first: too late a moment does no harm, too early would
        self._words[self._start + bin] = count

    def wait(self, limit: int) -> float:
        """Seconds until fewer than `limit`, which is more than 0, are counted, if none is added."""
        if self.used < limit:
            return 0.0
        left = self.used
        for second in self._seconds():
            left -= self._bins[second % _BINS]
            if left < limit:
                return self._until_forgotten(second)
        return 0.0

    def reset(self) -> float:
        """Seconds until nothing is counted, if none is added."""
        for second in reversed(self._seconds()):
            if self._bins[second % _BINS]:
                return self._until_forgotten(second)
        return 0.0

    def _seconds(self) -> range:
        """Oldest first."""
        second = self._now // MICRO
        return range(second - SPAN, second + 1)

    def _until_forgotten(self, second: int) -> float:
        moment = self._words[self._start + _BINS + second % _BINS]
        return min(max((second + SPAN) * MICRO + moment - self._now, 0), SPAN * MICRO) / MICRO


class Slot:
    """One name's slot. Of use only while the table is locked."""

    __slots__ = ("_base", "_life", "_own", "_words", "now")

    def __init__(self, words: memoryview, base: int, now: int, index: int, life: int) -> None:
        self._words = words
        self._base = base
        self._own = base + _CELLS + index
        self._life = life
        self.now = now

    @property
    def requests(self) -> Series:
        return Series(self._words, self._base + _REQUESTS, self.now)

    @property
    def tokens(self) -> Series:
        return Series(self._words, self._base + _TOKENS, self.now)

    def advance(self) -> None:
        """Clears the bins of seconds that are over."""
        words = self._words
        second, moment = divmod(self.now, MICRO)
        before = words[self._base + _SECOND]
        if before != second:
            first = before + 1 if second - _BINS <= before < second else second - SPAN
            for each in range(first, second + 1):
                self._forget(each)
            words[self._base + _SECOND] = second
        oldest = (second - SPAN) % _BINS
        for start in (self._base + _REQUESTS, self._base + _TOKENS):
            if words[start + oldest] and words[start + _BINS + oldest] <= moment:
                words[start + oldest] = 0

    def _forget(self, second: int) -> None:
        bin = self._base + second % _BINS
        self._words[bin + _REQUESTS] = self._words[bin + _TOKENS] = 0

    def is_idle(self) -> bool:
        """Nothing counted, nothing running: another name may have it."""
        return not 0 <= self.now // MICRO - self._words[self._base + _SECOND] <= SPAN and not self.running()

    def running(self) -> int:
        """In all processes."""
        words = self._words
        processes = min(words[ATTACHED], PROCESSES)
        lives = words[LIVES : LIVES + processes].tolist()
        cells = words[self._base + _CELLS : self._base + _CELLS + processes].tolist()
        return sum(cell & 0xFFFF for cell, life in zip(cells, lives, strict=True) if cell >> 16 == life)

    def begin(self) -> None:
        self._words[self._own] = self._life << 16 | min(self._mine() + 1, 0xFFFF)

    def end(self) -> None:
        self._words[self._own] = self._life << 16 | max(self._mine() - 1, 0)

    def _mine(self) -> int:
        cell = self._words[self._own]
        return cell & 0xFFFF if cell >> 16 == self._life else 0
