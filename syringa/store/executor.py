"""Database calls in bounded thread pools, so that a slow database never blocks the event loop.

Two limits bound the wait of a caller. Waiting for a lock, including the time in this queue, takes at most
`lock_timeout`. A query without an answer after `QUERY_TIMEOUT_SECONDS` raises `StoreUnavailable`, and its transaction
is rolled back if it ever finishes; if it is being committed by then, `StoreOutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from syringa.errors import StoreOutcomeUnknown, StoreUnavailable
from syringa.store.url import DatabaseLocation

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from syringa.store.database import Database
    from syringa.store.session import Session

T = TypeVar("T")

READERS = 4
QUERY_TIMEOUT_SECONDS = 30.0
_CLOSED = "the store is closed: the server is shutting down"
_TIMED_OUT = "the database does not answer; try again in a few seconds"


class _Call:
    """A query that its caller may abandon until it is committed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._abandoned = self._committing = False

    def abandon(self) -> bool:
        """Abandon the query. Return whether it is certain that it will not be committed."""
        with self._lock:
            self._abandoned = True
            return not self._committing

    def may_commit(self) -> bool:
        """Return whether the query was not abandoned, at its end. It cannot be from then on."""
        with self._lock:
            self._committing = not self._abandoned
            return self._committing


class DatabaseExecutor:
    """Runs queries on one database, which is opened by the first query."""

    def __init__(self, location: DatabaseLocation, *, clock: Callable[[], float], lock_timeout: float) -> None:
        self.location = location
        self._clock = clock
        self._lock_timeout = lock_timeout
        self._database: Database | None = None
        self._opened_at = 0.0  # by `time.monotonic`
        self._opening = threading.Lock()
        self._closed = False
        # SQLite has one writer at a time: writers queue here, not at its lock, where they would use up readers.
        writers = 1 if location.kind == "sqlite" else READERS
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="syringa-store-read")
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="syringa-store-write")
        self._pollers = ThreadPoolExecutor(1, thread_name_prefix="syringa-store-poll")

    async def close(self) -> None:
        """Wait for running queries, then close all connections."""
        self._closed = True
        await asyncio.to_thread(self._shut_down)

    async def read(self, query: Callable[[Session], T]) -> T:
        """Run `query` in a transaction that sees one snapshot of the database."""
        return await self._submit(self._readers, query)

    async def poll(self, query: Callable[[Session], T]) -> T:
        """Like `read`, on a thread of its own: long reads do not delay the detection of changes."""
        return await self._submit(self._pollers, query)

    async def write(self, query: Callable[[Session], T]) -> T:
        """Run `query` in one transaction, which is committed whole or not at all. `query` may run more than once."""
        return await self._submit(self._writers, query, writes=True)

    async def _submit(self, threads: ThreadPoolExecutor, query: Callable[[Session], T], *, writes: bool = False) -> T:
        if self._closed:
            raise StoreUnavailable(_CLOSED)
        deadline = time.monotonic() + self._lock_timeout
        call = _Call()
        loop = asyncio.get_running_loop()
        try:
            future = loop.run_in_executor(threads, lambda: self._run(query, deadline, call, writes))
        except RuntimeError:  # the interpreter is shutting down and accepts no more work
            raise StoreUnavailable(_CLOSED) from None
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_SECONDS):
                return await future
        except TimeoutError:
            raise (StoreUnavailable if call.abandon() else StoreOutcomeUnknown)(_TIMED_OUT) from None

    def _run(self, query: Callable[[Session], T], deadline: float, call: _Call, writes: bool) -> T:
        """Run `query` in the current thread, which imports SQLAlchemy if it is the first."""
        from syringa.store.session import Session

        def transaction(connection: Connection) -> T:
            result = query(Session(connection, self._clock()))
            if not call.may_commit():
                raise StoreUnavailable(_TIMED_OUT)
            return result

        database = self._open_database()
        # Importing SQLAlchemy may take seconds on a busy machine, and does not count as waiting for a lock.
        deadline = max(deadline, self._opened_at + self._lock_timeout)
        return (database.write if writes else database.read)(transaction, deadline)

    def _open_database(self) -> Database:
        from syringa.store.database import Database

        with self._opening:
            if self._database is None:
                self._database = Database(self.location, lock_timeout=self._lock_timeout, readers=READERS + 1)
                self._opened_at = time.monotonic()
            return self._database

    def _shut_down(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()
        self._pollers.shutdown()
        if self._database is not None:
            self._database.close()
