"""Stored responses of this process: heartbeats, retried writes and periodic maintenance of the store.

Nothing is opened or started before the first response or conversation is stored. From then on this process sends a
heartbeat every second, learns which of its responses were cancelled elsewhere, fails the responses of processes that
have exited, and deletes what has expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from syringa.errors import StoreError, StoreUnavailable
from syringa.service.responses import process_identity
from syringa.service.responses.encryption import ContentCipher, ContentCiphers
from syringa.store import ResponseKey, Store

logger = logging.getLogger("syringa.service")

HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 30.0  # without a heartbeat for so long, a process of another machine counts as exited
ORPHAN_SECONDS = 10.0
EXPIRE_SECONDS = 3600.0
# Failed writes are retried; while the database is unavailable, they must not fill up the memory.
MAX_UNWRITTEN = 1000

Write = Callable[[], Awaitable[object]]


class ResponseManager:
    """One per process."""

    def __init__(self, store: Store, response_days: int) -> None:
        """`response_days`: how long a response is kept; 0: forever."""
        self.process = process_identity.new_identity()
        self._store = store
        self._response_days = response_days
        self._ciphers = ContentCiphers()
        self._active: dict[ResponseKey, Callable[[], None] | None] = {}
        self._unwritten: dict[ResponseKey, Write] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._maintenance: list[asyncio.Task[None]] = []
        self._closed = False

    @property
    def store(self) -> Store:
        """The store of responses and conversations. The first access starts its maintenance."""
        self.start()
        return self._store

    def start(self) -> None:
        """Start the maintenance of the store, unless it has been started."""
        if not self._maintenance and not self._closed:
            self._maintenance = [
                asyncio.create_task(self._every(HEARTBEAT_SECONDS, self._heartbeat)),
                asyncio.create_task(self._every(ORPHAN_SECONDS, self.fail_orphans)),
                asyncio.create_task(self._every(EXPIRE_SECONDS, self._store.expire)),
            ]

    async def cipher(self, organization: str) -> ContentCipher:
        return await self._ciphers.for_organization(organization, self.store)

    def expiry(self, created_at: int) -> int | None:
        return created_at + self._response_days * 86400 if self._response_days else None

    def track(self, response: ResponseKey, on_lost: Callable[[], None] | None = None) -> None:
        """Send heartbeats for a response. `on_lost` is called if another process cancels or deletes it."""
        self._active[response] = on_lost

    async def finish(self, response: ResponseKey, write: Write) -> None:
        """Write the final state of a response, and stop tracking it.

        A failed write does not fail the request: it is retried until it succeeds or this process exits, after which
        another process marks the response as failed. Cancelling the caller does not stop the write.
        """
        self._active.pop(response, None)
        await asyncio.shield(self.spawn(self._finish(response, write)))

    async def _finish(self, response: ResponseKey, write: Write) -> None:
        try:
            await write()
        except StoreUnavailable as error:
            logger.error("responses: write failed, will retry: response=%s error=%s", response.id, error.message)
            self._unwritten[response] = write
            if len(self._unwritten) > MAX_UNWRITTEN:
                self._unwritten.pop(next(iter(self._unwritten)))
        except StoreError as error:
            logger.error("responses: write failed: response=%s error=%s", response.id, error.message)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` independently of the caller, which may be cancelled. `close` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def fail_orphans(self, only: ResponseKey | None = None) -> None:
        """Fail the responses of processes that have exited, or `only` one of them."""
        orphans = await self.store.fail_orphans(
            silent_for=SILENT_SECONDS, has_exited=process_identity.has_exited, only=only
        )
        for orphan in orphans:
            logger.warning("responses: failed an orphan, its process has exited: response=%s", orphan.id)

    async def close(self) -> None:
        """Stop maintenance, wait for running writes, and retry failed ones once."""
        self._closed = True
        for task in self._maintenance:
            task.cancel()
        await asyncio.gather(*self._maintenance, *self._tasks, return_exceptions=True)
        with contextlib.suppress(StoreError):
            await self._retry_writes()

    async def _heartbeat(self) -> None:
        if self._unwritten:
            await self._retry_writes()
        if not self._active:
            return
        before = list(self._active)
        alive = set(await self._store.write(lambda session: session.maintenance.heartbeat(self.process)))
        for response in before:
            on_lost = self._active.get(response)
            if response not in alive and on_lost is not None:
                on_lost()

    async def _retry_writes(self) -> None:
        for response, write in list(self._unwritten.items()):
            await write()
            self._unwritten.pop(response, None)
            logger.warning("responses: write succeeded after retry: response=%s", response.id)

    async def _every(self, seconds: float, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            began = time.monotonic()
            try:
                await work()
            except StoreError as error:
                logger.debug("responses: maintenance failed: %s", error.message)
            except Exception:
                logger.exception("responses: maintenance failed")
            await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
