"""A bound on the memory that requests of a process hold at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_Waiter = tuple[int, asyncio.Future[None]]  # the bytes that it waits for


class MemoryBudget:
    """Bytes that requests reserve. Those that have to wait are served in turn, the organization that holds least first.

    An organization that stays below its equal share never waits, even above the limit: others cannot keep it waiting
    by holding on to theirs. A reservation above the whole budget waits until it is alone.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._held: Counter[str] = Counter()  # bytes by organization
        self._waiting: dict[str, deque[_Waiter]] = {}

    @asynccontextmanager
    async def reserve(self, organization: str, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes are free, and hold them inside the block."""
        size = min(size, self._limit)
        if organization not in self._waiting and (
            self._is_below_share(organization, size) or (not self._waiting and self._fits(size))
        ):
            self._held[organization] += size
        else:
            await self._wait(organization, size)
        try:
            yield
        finally:
            self._release(organization, size)

    def _fits(self, size: int) -> bool:
        return self._held.total() + size <= self._limit

    def _is_below_share(self, organization: str, size: int) -> bool:
        organizations = self._held.keys() | self._waiting.keys() | {organization}
        return self._held[organization] + size <= self._limit // len(organizations)

    async def _wait(self, organization: str, size: int) -> None:
        waiter = (size, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(organization, deque()).append(waiter)
        try:
            await waiter[1]
        except asyncio.CancelledError:
            if waiter[1].cancelled():
                self._forget(organization, waiter)
                self._grant()
            else:  # granted in the same turn of the event loop
                self._release(organization, size)
            raise

    def _release(self, organization: str, size: int) -> None:
        self._held[organization] -= size
        if not self._held[organization]:
            del self._held[organization]
        self._grant()

    def _grant(self) -> None:
        while (organization := self._next()) is not None:
            waiter = self._waiting[organization][0]
            size, future = waiter
            self._forget(organization, waiter)
            if not future.cancelled():  # its task was, and runs in a moment
                self._held[organization] += size
                future.set_result(None)

    def _next(self) -> str | None:
        """Return the organization whose first request is to be admitted now."""
        by_held = sorted(self._waiting, key=self._held.__getitem__)
        for organization in by_held:
            size, _ = self._waiting[organization][0]
            # The rest of the budget is for the first one: smaller requests of others must not overtake it for ever.
            if self._is_below_share(organization, size) or (organization == by_held[0] and self._fits(size)):
                return organization
        return None

    def _forget(self, organization: str, waiter: _Waiter) -> None:
        queue = self._waiting.get(organization, deque())
        if waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[organization]
