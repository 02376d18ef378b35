"""Pools that operators have opened or closed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


class PoolOverrides:
    """What operators want of pools: True: open, False: closed, whatever their schedules say.

    A change applies at once. It is remembered, and reaches the other servers of the cluster, when it has been stored:
    another thread takes `changes`, stores them, and calls `update` with all that is stored.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` is called when there is something to be stored. By default nothing is."""
        self._on_change = on_change
        self._lock = threading.Lock()
        self._stored: Mapping[str, bool] = {}
        self._changes: dict[str, bool | None] = {}  # that were not stored yet

    def get(self, pool: str) -> bool | None:
        with self._lock:
            return self._changes[pool] if pool in self._changes else self._stored.get(pool)

    def set(self, pool: str, open: bool | None) -> None:
        """Open or close a pool; None: let it follow its schedule."""
        with self._lock:
            self._changes[pool] = open
        self._on_change()

    def changes(self) -> dict[str, bool | None]:
        """Return what is to be stored."""
        with self._lock:
            return dict(self._changes)

    def update(self, written: Mapping[str, bool | None], stored: Mapping[str, bool]) -> None:
        """Note that changes were written, and what is stored since then."""
        with self._lock:
            self._stored = stored
            self._changes = {
                pool: open for pool, open in self._changes.items() if pool not in written or written[pool] != open
            }
