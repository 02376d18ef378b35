"""A database that stays silent: who asked it is told, and what it was to keep is not kept."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from syringa.errors import StoreUnavailable
from syringa.store import Store, executor
from tests.store.things import ORGANISATION as US
from tests.store.things import response


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Little of it is taken for the end of the database, as long as this lasts: opening one may take longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "SILENCE_SECONDS", 0.3)
        yield


async def test_who_asked_is_told_and_nothing_is_kept(store: Store) -> None:
    goes_on = threading.Event()

    def hang(session: Any) -> None:
        session.responses.create(response("late"), ())
        goes_on.wait(20)

    await store.create_response(response("before"))
    try:
        with silence(), pytest.raises(StoreUnavailable) as failed:
            await store.write(hang)
    finally:
        goes_on.set()
    assert (failed.value.status, failed.value.code) == (503, "store_unavailable")
    assert "does not answer" in failed.value.message
    assert await store.create_response(response("after"))
    assert await store.get_response(US, "late") is None


async def test_those_who_queue_are_told_and_never_run(store: Store) -> None:
    goes_on = threading.Event()
    ran: list[int] = []
    await store.create_response(response("before"))
    try:
        with silence():
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
    assert await store.create_response(response("after"))
    assert not ran
