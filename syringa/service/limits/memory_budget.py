"""A bound on the memory that requests of a process hold at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_Waiter = tuple[int, asyncio.Future[None]]  # the bytes that it waits for


class MemoryBudget:
    """Bytes that requests reserve. Those that have to wait are served in turn, the organization that holds least first.

    A reservation above the whole budget waits until it is alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()  # bytes by organization
        self._waiting: dict[str, deque[_Waiter]] = {}

    @asynccontextmanager
    async def reserve(self, organization: str, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes are free, and hold them inside the block."""
        size = min(size, self._limit)
        if self._waiting or not self._fits(size):
            await self._wait(organization, size)
        else:
            self._held[organization] += size
        try:
            yield
        finally:
            self._release(organization, size)

    def _fits(self, size: int) -> bool:
        return self._held.total() + size <= self._limit

    async def _wait(self, organization: str, size: int) -> None:
        waiter = (size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(organization, deque()).append(waiter)
        try:
            await waiter[1]
        except asyncio.CancelledError:
            if waiter[1].done() and not waiter[1].cancelled():  # granted in the same turn of the event loop
                self._release(organization, size)
            else:
                self._forget(organization, waiter)
                self._grant()
            raise

    def _release(self, organization: str, size: int) -> None:
        self._held[organization] -= size
        if not self._held[organization]:
            del self._held[organization]
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            organization = min(self._waiting, key=self._held.__getitem__)
            waiter = self._waiting[organization][0]
            size, future = waiter
            if not self._fits(size):
                return
            self._forget(organization, waiter)
            self._held[organization] += size
            future.set_result(None)

    def _forget(self, organization: str, waiter: _Waiter) -> None:
        queue = self._waiting[organization]
        queue.remove(waiter)
        if not queue:
            del self._waiting[organization]
