"""`Store`: the database as the rest of Syringa uses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from syringa.store.executor import DatabaseExecutor
from syringa.store.records import ResponseKey
from syringa.store.url import locate

PROCESS_LOST = "The process that ran this response ended before the response was finished."


class Store(DatabaseExecutor):
    """The database of a server, shared by any number of processes and by organizations isolated from each other.

    The constructor only reads the setting, and may raise `StartupError` for it. `open` or the first query opens the
    database and runs its migrations. Every query may raise `StoreUnavailable`, and works again as soon as the database
    does. A query whose caller is cancelled may still take effect.
    """

    def __init__(
        self, database: str = "", *, clock: Callable[[], float] = time.time, lock_timeout: float = 5.0
    ) -> None:
        """`database`: the setting of that name; `lock_timeout`: seconds to wait for a lock, queueing included."""
        super().__init__(locate(database), clock=clock, lock_timeout=lock_timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Open the database now. Raises `StartupError` if a newer Syringa has migrated it."""
        await self.read(lambda session: None)

    # Operations of several transactions, so that other writers get their turn in between.

    async def expire(self, now: float | None = None) -> int:
        """Delete expired responses, conversations and batches, and return their number."""
        at = self._clock() if now is None else now
        total = 0
        while count := await self.write(lambda session: session.maintenance.expire(at)):
            total += count
        return total

    async def expire_usage(self, before: float) -> int:
        """Delete usage records of requests that began before `before`, and return their number."""
        total = 0
        while count := await self.write(lambda session: session.usage.expire(before)):
            total += count
        return total

    async def fail_orphans(
        self,
        *,
        silent_for: float | None = None,
        has_exited: Callable[[str], bool] | None = None,
        message: str = PROCESS_LOST,
        only: ResponseKey | None = None,
    ) -> list[ResponseKey]:
        """Mark running responses whose process has ended as failed, and return them.

        A process has ended if it sent no heartbeat for `silent_for` seconds, or if `has_exited(identity)` is true.
        `only`: consider one response, which is no longer running when this returns.
        """
        since = None if silent_for is None else self._clock() - silent_for
        processes = await self.read(lambda session: session.maintenance.processes()) if has_exited is not None else []
        exited = [process for process in processes if has_exited is not None and has_exited(process)]
        failed: list[ResponseKey] = []
        while chunk := await self.write(lambda session: session.maintenance.fail_orphans(exited, since, message, only)):
            failed += chunk
        return failed

    async def get_or_create_secret(self, name: str, generate: Callable[[], str]) -> str:
        """Return a secret that is generated once and is the same for every process from then on."""
        found = await self.read(lambda session: session.secrets.get(name))
        if found is not None:
            return found
        value = generate()
        return await self.write(lambda session: session.secrets.insert(name, value))
