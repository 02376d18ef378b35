"""One slot of the shared rate-limit table: the last minute's counts and the running requests of one name.

A slot has a bin for each of the last 61 seconds, with a count and the time of the last event counted. A bin expires 60
seconds after that time, so no window of 60 seconds ever holds more than the limit, and no client waits longer than 60
seconds, the maximum that older OpenAI clients accept. A slot also has a cell for each process with the number of its
running requests; a cell counts only if it was written in the current generation of its process.

A process may be killed between any two writes. Every write is one aligned word, bins are cleared before the slot's
current second is advanced, and values out of range count as expired, so the worst case is a wrong count for a minute.
"""

from __future__ import annotations

SPAN = 60  # seconds
MICRO = 1_000_000  # times are whole microseconds, so that sums are exact
PROCESSES = 64

_BINS = SPAN + 1
_MAX_COUNT = 2**32 - 1
# Offsets in words of 32 bits. The header of the table: magic number, size, number of processes, generation of each.
MAGIC, SIZE, ATTACHED, GENERATIONS, HEADER = 0, 1, 2, 16, 1024
# A slot: the hash of its name (4 words), its current second, bins of requests and of tokens, cells of processes.
_SECOND, _REQUESTS, _TOKENS, _CELLS = 4, 5, 5 + 2 * _BINS, 256
SLOT = _CELLS + PROCESSES


class SlidingWindow:
    """Counts of the last minute: bins, followed by the time of the last event of each, within its second."""

    __slots__ = ("_bins", "_now", "_start", "_words", "used")

    def __init__(self, words: memoryview, start: int, now: int) -> None:
        self._words = words
        self._start = start
        self._now = now
        self._bins: list[int] = words[start : start + _BINS].tolist()
        self.used = sum(self._bins)

    def add(self, number: int) -> None:
        second, microsecond = divmod(self._now, MICRO)
        bin = second % _BINS
        count = min(self._bins[bin] + number, _MAX_COUNT)
        self.used += count - self._bins[bin]
        self._bins[bin] = count
        # The time first: if the process is killed in between, the bin expires too late, which is safe.
        self._words[self._start + _BINS + bin] = microsecond
        self._words[self._start + bin] = count

    def wait(self, limit: int) -> float:
        """Return the seconds until fewer than `limit` (at least 1) are counted, if none is added."""
        if self.used < limit:
            return 0.0
        left = self.used
        for second in self._seconds():
            left -= self._bins[second % _BINS]
            if left < limit:
                return self._until_expired(second)
        return 0.0

    def reset(self) -> float:
        """Return the seconds until nothing is counted, if none is added."""
        for second in reversed(self._seconds()):
            if self._bins[second % _BINS]:
                return self._until_expired(second)
        return 0.0

    def _seconds(self) -> range:
        """The seconds of all bins, oldest first."""
        second = self._now // MICRO
        return range(second - SPAN, second + 1)

    def _until_expired(self, second: int) -> float:
        microsecond = self._words[self._start + _BINS + second % _BINS]
        return min(max((second + SPAN) * MICRO + microsecond - self._now, 0), SPAN * MICRO) / MICRO


class RateSlot:
    """The slot of one name. Valid only while the table is locked."""

    __slots__ = ("_base", "_generation", "_own_cell", "_words", "now")

    def __init__(self, words: memoryview, base: int, now: int, index: int, generation: int) -> None:
        self._words = words
        self._base = base
        self._own_cell = base + _CELLS + index
        self._generation = generation
        self.now = now

    @property
    def requests(self) -> SlidingWindow:
        return SlidingWindow(self._words, self._base + _REQUESTS, self.now)

    @property
    def tokens(self) -> SlidingWindow:
        return SlidingWindow(self._words, self._base + _TOKENS, self.now)

    def advance(self) -> None:
        """Clear the bins that have expired."""
        words = self._words
        second, microsecond = divmod(self.now, MICRO)
        before = words[self._base + _SECOND]
        if before != second:
            first = before + 1 if second - _BINS <= before < second else second - SPAN
            for each in range(first, second + 1):
                self._clear(each)
            words[self._base + _SECOND] = second
        oldest = (second - SPAN) % _BINS
        for start in (self._base + _REQUESTS, self._base + _TOKENS):
            if words[start + oldest] and words[start + _BINS + oldest] <= microsecond:
                words[start + oldest] = 0

    def _clear(self, second: int) -> None:
        bin = self._base + second % _BINS
        self._words[bin + _REQUESTS] = self._words[bin + _TOKENS] = 0

    def is_idle(self) -> bool:
        """Return whether nothing is counted and nothing runs, so that another name may use the slot."""
        return not 0 <= self.now // MICRO - self._words[self._base + _SECOND] <= SPAN and not self.running()

    def running(self) -> int:
        """Return the number of running requests of all processes."""
        words = self._words
        processes = min(words[ATTACHED], PROCESSES)
        generations = words[GENERATIONS : GENERATIONS + processes].tolist()
        cells = words[self._base + _CELLS : self._base + _CELLS + processes].tolist()
        return sum(
            cell & 0xFFFF for cell, generation in zip(cells, generations, strict=True) if cell >> 16 == generation
        )

    def begin(self) -> None:
        """Count a request of this process as running."""
        self._words[self._own_cell] = self._generation << 16 | min(self._own_running() + 1, 0xFFFF)

    def end(self) -> None:
        """Stop counting a request of this process as running."""
        self._words[self._own_cell] = self._generation << 16 | max(self._own_running() - 1, 0)

    def _own_running(self) -> int:
        cell = self._words[self._own_cell]
        return cell & 0xFFFF if cell >> 16 == self._generation else 0
