"""Requests that are computed alone, because they were running when a worker crashed. Torch-free.

While such a request is computed, no step contains anything else, so that another crash has one possible cause. Most are
released after their first token, to finish together with the others. The others wait meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from syringa.engine.scheduling.sequence import Sequence
from syringa.types import EngineRequest

MAX_SECONDS = 10.0  # that a request is computed alone: the others wait for it


class IsolationQueue:
    """The sequences that are to be computed alone, and the one that is."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.current: Sequence | None = None
        self._clock = clock
        self._request: EngineRequest | None = None  # the last one that was computed alone
        self._ends_at = 0.0
        self._waiting: deque[Sequence] = deque()

    def __len__(self) -> int:
        """The number of sequences that wait."""
        return len(self._waiting)

    @property
    def active(self) -> bool:
        return self.current is not None or bool(self._waiting)

    @property
    def tenants(self) -> set[str]:
        return {sequence.request.tenant for sequence in self._waiting}

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a waiting sequence. Return whether it waited."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return True
        return False

    def overdue(self, before: float) -> list[Sequence]:
        """Return the interactive sequences that were submitted before that time and have not begun."""
        unbegun = (each for each in self._waiting if not each.begun and not each.request.background)
        return [sequence for sequence in unbegun if sequence.submitted <= before]

    def head(self) -> Sequence:
        return self._waiting[0]

    def start(self) -> None:
        """Make the first waiting sequence the current one. The choices of a resumed request share the time."""
        self.current = self._waiting.popleft()
        if self.current.request is not self._request:
            self._request, self._ends_at = self.current.request, self._clock() + MAX_SECONDS

    def release(self, running: dict[Sequence, None]) -> None:
        """Release the current request if it was alone for long enough."""
        current = self.current
        if current is None:
            return
        request = current.request
        ended = not any(sequence.request is request for sequence in running)  # or it was preempted
        begun = current.last_step is not None and request.isolation == "start"
        if ended or begun or self._clock() >= self._ends_at:
            self.current = None
