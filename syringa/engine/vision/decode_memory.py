"""Limit on the memory of images that are decoded at the same time."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from threading import Condition


class DecodeMemory:
    """A number of bytes that threads share, in the order in which they ask for them."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._changed = Condition()
        self._waiting: deque[object] = deque()

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Wait for `size` bytes and hold them. More than the limit is granted when nothing else is held."""
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.wait_for(
                lambda: self._waiting[0] is ticket and (not self.used or self.used + size <= self.limit)
            )
            self._waiting.popleft()
            self.used += size
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.used -= size
                self._changed.notify_all()
