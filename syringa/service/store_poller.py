"""Polling of the database for changes that other processes made, for all caches of this process together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from syringa.store import RevisionName, Store

POLL_SECONDS = 0.7  # a change is known to every process after this time


class StoreRevisions:
    """The change counters of the store, all read in one query when the first one is requested."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._revisions: Mapping[RevisionName, int] | None = None

    async def get(self, name: RevisionName) -> int:
        if self._revisions is None:
            self._revisions = await self._store.poll(lambda session: session.revisions.all())
        return self._revisions.get(name, 0)


Refresh = Callable[[StoreRevisions], Awaitable[None]]
"""Reloads what has changed. It handles its own errors, so that polling goes on."""


class StorePoller:
    """Calls the `refresh` of each cache every `POLL_SECONDS`, with change counters that they share."""

    def __init__(self, store: Store, *caches: Refresh) -> None:
        self._store, self._caches = store, caches
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._poll())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_SECONDS)
            revisions = StoreRevisions(self._store)
            for refresh in self._caches:
                await refresh(revisions)
