"""A database that does not answer: callers get an error, and nothing is written."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import event

from syringa.errors import StoreOutcomeUnknown, StoreUnavailable
from syringa.store import Store, executor
from syringa.store.database import Database
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import read, response, write


@contextlib.contextmanager
def short_query_timeout(seconds: float = 0.3) -> Iterator[None]:
    """Use a short query timeout inside the context; opening the database before may take longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "QUERY_TIMEOUT_SECONDS", seconds)
        yield


async def test_silent_database_times_out_and_rolls_back(store: Store) -> None:
    goes_on = threading.Event()

    def hang(session: Any) -> None:
        session.responses.create(response("late"), ())
        goes_on.wait(20)

    await write(store).responses.create(response("before"))
    try:
        with short_query_timeout(), pytest.raises(StoreUnavailable) as failed:
            await store.write(hang)
    finally:
        goes_on.set()
    assert (failed.value.status, failed.value.code) == (503, "store_unavailable")
    assert "does not answer" in failed.value.message
    assert not isinstance(failed.value, StoreOutcomeUnknown)
    assert await write(store).responses.create(response("after"))
    assert await read(store).responses.get(US, "late") is None


async def test_outcome_is_unknown_while_the_database_commits(store: Store) -> None:
    goes_on = threading.Event()
    await write(store).responses.create(response("before"))
    assert store._database is not None
    event.listen(store._database.engine, "commit", lambda connection: goes_on.wait(60))
    try:
        with short_query_timeout(10.0), pytest.raises(StoreOutcomeUnknown):  # the commit begins within it
            await write(store).responses.create(response("late"))
    finally:
        goes_on.set()
    async with asyncio.timeout(60):
        while await read(store).responses.get(US, "late") is None:  # noqa: ASYNC110  it can only be polled
            await asyncio.sleep(0.01)


async def test_time_to_open_the_database_is_not_spent_waiting_for_a_lock(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening imports SQLAlchemy, which may take longer than the lock timeout; others queue meanwhile."""
    deadlines: list[float] = []
    run, open_database = Database._run, Store._open_database

    def slowly(store: Store) -> Database:
        time.sleep(0.05)
        return open_database(store)

    def record(database: Database, engine: Any, query: Any, deadline: float) -> Any:
        deadlines.append(deadline)
        return run(database, engine, query, deadline)

    monkeypatch.setattr(Store, "_open_database", slowly)
    monkeypatch.setattr(Database, "_run", record)
    async with Store(database, lock_timeout=100.0) as store:
        await asyncio.gather(*(write(store).responses.create(response(f"r{number}")) for number in range(3)))
        assert all(deadline >= store._opened_at + 100.0 for deadline in deadlines)
    assert len(deadlines) == 3


async def test_queued_queries_time_out_and_never_run(store: Store) -> None:
    goes_on = threading.Event()
    ran: list[int] = []
    await write(store).responses.create(response("before"))
    try:
        with short_query_timeout():
            stuck = [
                asyncio.create_task(store.write(lambda session: goes_on.wait(20))) for _ in range(executor.READERS)
            ]
            await asyncio.sleep(0.05)
            queued = [asyncio.create_task(store.write(lambda session: ran.append(1))) for _ in range(5)]
            done, late = await asyncio.wait([*stuck, *queued], timeout=15)
        assert not late
        assert all(isinstance(task.exception(), StoreUnavailable) for task in done)
    finally:
        goes_on.set()
    assert await write(store).responses.create(response("after"))
    assert not ran
