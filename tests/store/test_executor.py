"""A database that does not answer: callers get an error, and nothing is written."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from syringa.errors import StoreUnavailable
from syringa.store import Store, executor
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import read, response, write


@contextlib.contextmanager
def short_query_timeout() -> Iterator[None]:
    """Use a short query timeout inside the context; opening the database before may take longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "QUERY_TIMEOUT_SECONDS", 0.3)
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
    assert await write(store).responses.create(response("after"))
    assert await read(store).responses.get(US, "late") is None


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
