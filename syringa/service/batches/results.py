"""The results of a batch on their way to the store: written in groups, each in one transaction with its usage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from syringa.errors import StoreUnavailable
from syringa.store import BatchResult

logger = logging.getLogger("syringa.service")

MAX_UNWRITTEN = 512  # results in memory; then lines wait for the store
MAX_UNWRITTEN_BYTES = 32 << 20
WRITE_SECONDS = 0.5  # between two transactions, unless half of these wait: what arrives meanwhile is written together
RETRY_SECONDS = 1.0
CLOSING_ATTEMPTS = 3


class LeaseLost(Exception):
    """Another process has taken over the batch."""


class ResultWriter:
    """Writes the results of one batch. The store may be away for a while: then results are kept and written later."""

    def __init__(self, write: Callable[[list[BatchResult]], Awaitable[None]]) -> None:
        """`write` stores results; it may raise `StoreUnavailable`, after which it is called again, or `LeaseLost`."""
        self._write = write
        self._unwritten: list[BatchResult] = []
        self._unwritten_bytes = 0
        self._changed = asyncio.Event()
        self._many = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._closing, self._patient = False, True
        self.task = asyncio.create_task(self._run())

    async def add(self, result: BatchResult) -> None:
        """Add a result, and wait while there are too many. It counts as done from now on."""
        self._unwritten.append(result)
        self._unwritten_bytes += result.size
        self._changed.set()
        if 2 * len(self._unwritten) >= MAX_UNWRITTEN or 2 * self._unwritten_bytes >= MAX_UNWRITTEN_BYTES:
            self._many.set()
        if len(self._unwritten) >= MAX_UNWRITTEN or self._unwritten_bytes >= MAX_UNWRITTEN_BYTES:
            self._has_room.clear()
            await self._has_room.wait()

    async def close(self) -> None:
        """Write what is left. Raises `LeaseLost`, and after `hurry`, `StoreUnavailable`."""
        self._closing = True
        self._changed.set()
        self._many.set()
        await self.task

    def hurry(self) -> None:
        """Let `close` give up after a few attempts, because the process ends: also if it waits for the store now."""
        self._patient = False

    async def abandon(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def _run(self) -> None:
        while self._unwritten or not self._closing:
            await self._changed.wait()
            self._changed.clear()
            if batch := self._unwritten:
                self._unwritten, self._unwritten_bytes = [], 0
                self._has_room.set()
                self._many.clear()
                await self._write_until_stored(batch)
            if not self._closing:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(WRITE_SECONDS):
                        await self._many.wait()

    async def _write_until_stored(self, batch: list[BatchResult]) -> None:
        failures = 0
        while True:
            try:
                await self._write(batch)
            except StoreUnavailable as error:
                if not failures:
                    logger.warning("batches: results are kept until the database is back: %s", error.message)
                failures += 1
                if self._closing and not self._patient and failures >= CLOSING_ATTEMPTS:
                    raise  # the server stops: these lines are run again
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return
