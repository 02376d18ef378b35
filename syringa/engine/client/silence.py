"""Notice that a worker is no longer heard: its connection is open, but neither tokens nor heartbeats arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from syringa.engine.client.protocol import HEARTBEAT_SECONDS

SILENT_SECONDS = 2.0  # four heartbeats


class Timer(Protocol):
    def cancel(self) -> None: ...


def _call_later(delay: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(delay, callback)


class SilenceMonitor:
    """Watch one connection from `start` to `stop`. `on_change` is called when it becomes silent and when it ends.

    The last check comes a heartbeat after the one that found the connection quiet, and the event loop has read what
    had arrived in between. So an API process that was itself stopped for a while takes no worker for silent.
    """

    def __init__(
        self,
        on_change: Callable[[bool], None] = lambda silent: None,
        *,
        limit: float = SILENT_SECONDS,
        interval: float = HEARTBEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        call_later: Callable[[float, Callable[[], None]], Timer] = _call_later,
    ) -> None:
        """`limit`: seconds without a frame. `interval`: between two heartbeats."""
        self.silent = False
        self._on_change, self._limit, self._interval = on_change, limit, interval
        self._clock, self._call_later = clock, call_later
        self._heard_at = 0.0
        self._quiet_since: float | None = None  # when the last frame came, if the last check found none after it
        self._timer: Timer | None = None

    def start(self) -> None:
        self.stop()
        self._heard_at = self._clock()
        self._schedule(self._limit - self._interval)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.silent, self._quiet_since = False, None

    def heard(self) -> None:
        """Note that data has arrived."""
        self._heard_at = self._clock()
        if self.silent:
            self.silent = False
            self._schedule(self._limit - self._interval)
            self._on_change(False)

    def _schedule(self, delay: float) -> None:
        self._timer = self._call_later(delay, self._check)

    def _check(self) -> None:
        now = self._clock()
        quiet_at = self._heard_at + self._limit - self._interval
        if now < quiet_at:
            self._quiet_since = None
            self._schedule(quiet_at - now)
        elif self._quiet_since != self._heard_at:
            self._quiet_since = self._heard_at
            self._schedule(max(self._heard_at + self._limit - now, self._interval))
        else:
            self._quiet_since = None
            self.silent, self._timer = True, None
            self._on_change(True)
