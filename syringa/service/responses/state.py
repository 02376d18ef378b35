"""What responses leave behind, and who looks after it: the store, this process's name in it, and upkeep on a timer.

Nothing is opened or started before the first response or conversation, so a server that never sees one does not pay.
From then on this process says every second that it is alive and learns which of its responses were cancelled elsewhere,
marks as failed what died with other processes, and removes what has expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from syringa.config import Config
from syringa.errors import StoreError, StoreUnavailable
from syringa.service.responses import process_identity
from syringa.service.responses.encryption import Seal, Seals
from syringa.store import Running, Store

logger = logging.getLogger("syringa.service")

BEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0  # no word from a process for so long: it is gone, wherever it was
ORPHAN_SECONDS = 10.0
EXPIRE_SECONDS = 3600.0
# What could not be written is tried again; when the database stays away, memory must not fill up with it.
MAX_UNWRITTEN = 1000

Write = Callable[[], Awaitable[object]]


class State:
    """Made once for an app, closed once."""

    def __init__(self, config: Config) -> None:
        """Raises `StartupError` for a setting `database` that cannot be."""
        self.owner = process_identity.name()
        self._store = Store(config.database)
        self._days = config.response_days
        self._seals = Seals()
        self._running: dict[Running, Callable[[], None] | None] = {}
        self._unwritten: dict[Running, Write] = {}
        self._writing: set[asyncio.Task[None]] = set()
        self._upkeep: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def store(self) -> Store:
        """Whoever asks for it is about to use it: from now on it is looked after."""
        if not self._upkeep and not self._closed:
            self._upkeep = [
                asyncio.create_task(self._every(BEAT_SECONDS, self._beat)),
                asyncio.create_task(self._every(ORPHAN_SECONDS, self.fail_orphans)),
                asyncio.create_task(self._every(EXPIRE_SECONDS, self._store.expire)),
            ]
        return self._store

    @property
    def database(self) -> Store:
        """The same, for who keeps no responses in it: it is not looked after for that."""
        return self._store

    async def seal(self, organisation: str) -> Seal:
        return await self._seals.of(organisation, self.store)

    def expiry(self, created_at: int) -> int | None:
        return created_at + self._days * 86400 if self._days else None

    def run(self, response: Running, lost: Callable[[], None] | None = None) -> None:
        """This process runs a response from now on. `lost` is called if another one ends it."""
        self._running[response] = lost

    async def end(self, response: Running, write: Write) -> None:
        """Writes a response's last state. Whoever waits for the answer gets it even if this fails: it is tried again
        until it is written, or this process ends and another one finds it without an owner. A client that goes away
        in the middle does not stop it."""
        self._running.pop(response, None)
        await asyncio.shield(self.later(self._end(response, write)))

    async def _end(self, response: Running, write: Write) -> None:
        try:
            await write()
        except StoreUnavailable as error:
            logger.error("response %s is answered, and not stored yet: %s", response.id, error.message)
            self._unwritten[response] = write
            if len(self._unwritten) > MAX_UNWRITTEN:
                self._unwritten.pop(next(iter(self._unwritten)))
        except StoreError as error:
            logger.error("response %s is answered, and not stored: %s", response.id, error.message)

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` whether or not anybody waits, for whoever may be cancelled. `close` waits for it."""
        task = asyncio.create_task(work)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task

    async def fail_orphans(self, only: Running | None = None) -> None:
        """Marks as failed what other processes left behind when they died. `only`: one response of that."""
        for lost in await self.store.fail_orphans(silent_for=SILENT_SECONDS, gone=process_identity.is_gone, only=only):
            logger.warning("response %s was lost with the process that ran it", lost.id)

    async def close(self) -> None:
        """Nothing runs any more. What is still to be written is, if the database takes it now."""
        self._closed = True
        for task in self._upkeep:
            task.cancel()
        await asyncio.gather(*self._upkeep, *self._writing, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._write_again()
        await self._store.close()

    async def _beat(self) -> None:
        if self._unwritten:
            await self._write_again()
        if not self._running:
            return
        before = list(self._running)
        alive = set(await self._store.heartbeat(self.owner))
        for response in before:
            lost = self._running.get(response)
            if response not in alive and lost is not None:
                lost()

    async def _write_again(self) -> None:
        for response, write in list(self._unwritten.items()):
            await write()
            self._unwritten.pop(response, None)
            logger.warning("response %s is stored now", response.id)

    async def _every(self, seconds: float, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            began = time.monotonic()
            try:
                await work()
            except StoreError as error:
                logger.debug("upkeep: %s", error.message)
            except Exception:
                logger.exception("upkeep failed")
            await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
