"""The clock of the simulation: callbacks in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class EventLoop:
    """Calls back at simulated times. Callbacks of the same time run in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.processed = 0
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._order = itertools.count()

    def at(self, time: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        """Call back at a time, which is now if it has passed."""
        heapq.heappush(self._events, (time, next(self._order), callback, argument))

    def after(self, seconds: float, callback: Callable[[Any], None], argument: Any = None) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), callback, argument))

    def run(self, until: float) -> None:
        """Run the events before that time."""
        events, pop = self._events, heapq.heappop
        while events and events[0][0] < until:
            time, _, callback, argument = pop(events)
            if time > self.now:
                self.now = time
            self.processed += 1
            callback(argument)
        self.now = until
