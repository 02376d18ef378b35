"""The network of the server, from which nodes fetch weights: all fetches share it."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

from bench.fleet_sim.event_loop import EventLoop


class SharedLink:
    """Gives each fetch the same bandwidth: its share of the link, or what a node can receive."""

    def __init__(self, loop: EventLoop, bandwidth: float, node_bandwidth: float) -> None:
        self._loop, self._bandwidth, self._node_bandwidth = loop, bandwidth, node_bandwidth
        self.busy_seconds = 0.0  # in which the link, not the nodes, was the limit
        self.most_fetches = 0
        self._fetches: list[tuple[float, int, Callable[[Any], None], Any]] = []  # by the mark at which each one ends
        self._order = itertools.count()
        self._bytes = 0.0  # of each fetch, since the start
        self._at = 0.0
        self._version = 0

    def fetch(self, size: float, callback: Callable[[Any], None], argument: Any) -> None:
        self._advance()
        heapq.heappush(self._fetches, (self._bytes + size, next(self._order), callback, argument))
        self.most_fetches = max(self.most_fetches, len(self._fetches))
        self._plan()

    @property
    def _speed(self) -> float:
        return min(self._node_bandwidth, self._bandwidth / max(1, len(self._fetches)))

    def _advance(self) -> None:
        seconds = self._loop.now - self._at
        self._at = self._loop.now
        self._bytes += seconds * self._speed
        if self._speed < self._node_bandwidth:
            self.busy_seconds += seconds

    def _plan(self) -> None:
        self._version += 1
        if self._fetches:
            self._loop.after(max(0.0, (self._fetches[0][0] - self._bytes) / self._speed), self._wake, self._version)

    def _wake(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        while self._fetches and self._fetches[0][0] <= self._bytes + 1.0:
            _, _, callback, argument = heapq.heappop(self._fetches)
            callback(argument)
        self._plan()
