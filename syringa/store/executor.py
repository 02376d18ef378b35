"""How SQL is run: in threads, so that nobody waits for a database but those who asked it.

Two things bound that wait. A lock of another process is waited for as long as `patience` says, counted from when it was
asked: who queues behind others that wait for the lock waits for it too. And a database that says nothing at all, while
its connection stands, is taken for one that is away. What such a call was to write is undone if it ever comes to life.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from syringa.errors import StoreUnavailable
from syringa.store.url import Location

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from syringa.store.database import Database
    from syringa.store.session import Session

T = TypeVar("T")

READERS = 4
SILENCE_SECONDS = 30.0  # longer than any query takes
_ENDING = "the store is closed: the server is ending"
_SILENT = "the database does not answer; try again in a few seconds"


class Errands:
    """Work on one database, which is opened when it is first needed."""

    def __init__(self, location: Location, *, clock: Callable[[], float], patience: float) -> None:
        self.location = location
        self._clock = clock
        self._patience = patience
        self._database: Database | None = None
        self._making = threading.Lock()
        self._closed = False
        # SQLite has one writer at a time. Its writers queue here, where they hold up no reader, and not at its lock.
        writers = 1 if location.kind == "sqlite" else READERS
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="syringa-store-read")
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="syringa-store-write")
        self._watchers = ThreadPoolExecutor(1, thread_name_prefix="syringa-store-watch")

    async def close(self) -> None:
        """Waits for what runs, then lets go of the database."""
        self._closed = True
        await asyncio.to_thread(self._shut)

    async def read(self, work: Callable[[Session], T]) -> T:
        """Runs several queries on one moment of the database."""
        return await self._submit(self._readers, work)

    async def watch(self, work: Callable[[Session], T]) -> T:
        """Like `read`, for what has to be noticed soon: it does not wait for those who read much."""
        return await self._submit(self._watchers, work)

    async def write(self, work: Callable[[Session], T]) -> T:
        """Runs several queries in one transaction: all of it is kept, or nothing. `work` may be run more than once."""
        return await self._submit(self._writers, work, writes=True)

    async def _submit(self, threads: ThreadPoolExecutor, work: Callable[[Session], T], *, writes: bool = False) -> T:
        if self._closed:
            raise StoreUnavailable(_ENDING)
        until = time.monotonic() + self._patience
        given_up = threading.Event()
        loop = asyncio.get_running_loop()
        try:
            running = loop.run_in_executor(threads, lambda: self._work(work, until, given_up, writes))
        except RuntimeError:  # the interpreter ends, and has ended its threads
            raise StoreUnavailable(_ENDING) from None
        try:
            async with asyncio.timeout(SILENCE_SECONDS):
                return await running
        except TimeoutError:
            given_up.set()
            raise StoreUnavailable(_SILENT) from None

    def _work(self, work: Callable[[Session], T], until: float, given_up: threading.Event, writes: bool) -> T:
        """Runs in a thread, where importing SQLAlchemy for the first time holds up nobody."""
        from syringa.store.session import Session

        def whole(connection: Connection) -> T:
            result = work(Session(connection, self._clock()))
            if given_up.is_set():
                raise StoreUnavailable(_SILENT)
            return result

        database = self._open()
        return (database.write if writes else database.read)(whole, until)

    def _open(self) -> Database:
        from syringa.store.database import Database

        with self._making:
            if self._database is None:
                self._database = Database(self.location, patience=self._patience, readers=READERS + 1)
            return self._database

    def _shut(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()
        self._watchers.shutdown()
        if self._database is not None:
            self._database.close()
