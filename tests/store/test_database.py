"""Failures of the database, concurrent use, and processes that are killed during a write."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, text

from syringa.errors import StoreUnavailable
from syringa.store import ResponseKey, Store
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import Clock, conversation, database_of, find_item, item, items, read, response, write
from tests.store.postgres import Postgres


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "new" / "syringa.db"


@pytest.fixture
async def filed(file: Path, clock: Clock) -> AsyncIterator[Store]:
    """A store in a SQLite file, with a short lock timeout."""
    async with Store(str(file), clock=clock, lock_timeout=0.5) as store:
        await write(store).responses.create(response("r1"), items("i1"))
        yield store


@contextmanager
def pragma(store: Store, during: str, afterwards: str) -> Iterator[None]:
    """Set a pragma in every connection inside the context."""
    current = [during]

    def checkout(raw: sqlite3.Connection, *rest: Any) -> None:
        raw.execute(f"PRAGMA {current[0]}").fetchall()

    event.listen(database_of(store).engine, "checkout", checkout)
    yield
    current[0] = afterwards


async def assert_unavailable(call: Any) -> None:
    with pytest.raises(StoreUnavailable) as failed:
        await call
    assert (failed.value.status, failed.value.code, failed.value.type) == (503, "store_unavailable", "server_error")
    assert failed.value.retry_after
    assert "sqlite" not in failed.value.message.lower()


async def test_sqlite_file_is_private(filed: Store, file: Path) -> None:
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(file.parent).st_mode) == 0o700


async def test_sqlite_connection_pragmas(filed: Store) -> None:
    with database_of(filed).engine.begin() as connection:
        values = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert values == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "busy_timeout": 500}


async def test_full_disk_raises_unavailable_and_recovers(filed: Store) -> None:
    with database_of(filed).engine.begin() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    big = item("big", "x" * 1_000_000)
    with pragma(filed, f"max_page_count = {pages}", "max_page_count = 1000000"):
        await assert_unavailable(write(filed).responses.create(response("r2"), [item("small"), big]))
        assert await read(filed).responses.get(US, "r1") == response("r1")
        assert await read(filed).responses.get(US, "r2") is None
        assert await find_item(filed, US, "small") is None
    assert await write(filed).responses.create(response("r2"), [big])


async def test_unavailable_database_is_logged_once(filed: Store, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = sqlite3.connect(file, isolation_level=None)
    for _ in range(2):
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            await assert_unavailable(write(filed).responses.create(response("r2")))
        other.execute("ROLLBACK")
        await write(filed).responses.create(response("r2"))
    other.close()
    assert len(caplog.records) == 2
    assert str(file) in caplog.text


async def test_full_disk_is_logged_once_although_reads_succeed(filed: Store, caplog: pytest.LogCaptureFixture) -> None:
    with pragma(filed, "query_only = 1", "query_only = 0"):
        for _ in range(3):
            await assert_unavailable(write(filed).responses.create(response("r2")))
            assert await read(filed).responses.get(US, "r1") == response("r1")
    assert len(caplog.records) == 1


async def test_read_only_database_serves_reads(filed: Store) -> None:
    with pragma(filed, "query_only = 1", "query_only = 0"):
        await assert_unavailable(write(filed).responses.create(response("r2")))
        assert await read(filed).responses.get(US, "r1") == response("r1")
    assert await write(filed).responses.create(response("r2"))


async def test_sqlite_lock_timeout_raises_unavailable(filed: Store, file: Path) -> None:
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await assert_unavailable(write(filed).responses.create(response("r2")))
    assert await read(filed).responses.get(US, "r1") == response("r1")  # readers do not wait for a writer
    other.execute("ROLLBACK")
    other.close()
    assert await write(filed).responses.create(response("r2"))


async def test_sqlite_lock_timeout_includes_queueing(file: Path) -> None:
    async with Store(str(file), lock_timeout=1.0) as store:
        await write(store).responses.create(response("r1"))
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        asked = [asyncio.create_task(write(store).responses.create(response(f"q{number}"))) for number in range(90)]
        done, late = await asyncio.wait(asked, timeout=60)  # one lock timeout after another would take 90 s
        assert not late
        assert all(isinstance(task.exception(), StoreUnavailable) for task in done)
        other.execute("ROLLBACK")
        other.close()
        assert await write(store).responses.create(response("r2"))
        assert await read(store).responses.get(US, "q89") is None


@pytest.mark.parametrize("pattern", ["*", "*.db"])  # with and without the write-ahead log
async def test_removed_file_is_created_again(filed: Store, file: Path, pattern: str) -> None:
    for each in file.parent.glob(pattern):
        each.unlink()
    await assert_unavailable(read(filed).responses.get(US, "r1"))
    assert await read(filed).responses.get(US, "r1") is None
    assert await write(filed).responses.create(response("r2"))
    async with Store(str(file)) as other:
        assert await read(other).responses.get(US, "r2") == response("r2")


async def test_file_that_is_no_database_raises_unavailable(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("not a database, " * 100)
    async with Store(str(tmp_path / "a.db")) as store:
        await assert_unavailable(store.open())
        (tmp_path / "a.db").unlink()
        await store.open()


async def test_folder_that_cannot_be_created_raises_unavailable(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    async with Store(str(tmp_path / "taken" / "syringa.db")) as store:
        await assert_unavailable(store.open())
        (tmp_path / "taken").unlink()
        await store.open()


async def test_postgres_outage_raises_unavailable_and_recovers(postgres: Postgres) -> None:
    url = postgres.new_database()
    async with Store(url) as store:
        await write(store).responses.create(response("r1"), items("i1"))
        postgres.stop()
        try:
            for _ in range(2):
                await assert_unavailable(write(store).responses.create(response("r2")))
                await assert_unavailable(read(store).responses.get(US, "r1"))
            async with Store(url) as late:
                await assert_unavailable(late.open())
        finally:
            postgres.start()
        assert await read(store).responses.get(US, "r1") == response("r1")
        assert await write(store).responses.create(response("r2"))


async def test_postgres_restart_between_calls_is_transparent(postgres: Postgres) -> None:
    async with Store(postgres.new_database()) as store:
        await write(store).responses.create(response("r1"))
        postgres.stop()
        postgres.start()
        assert await write(store).responses.create(response("r2"))


async def test_postgres_lock_timeout_raises_unavailable(postgres: Postgres) -> None:
    async with Store(postgres.new_database(), lock_timeout=0.5) as store:
        await write(store).responses.create(response("r1"))
        with database_of(store).engine.begin() as other:
            other.execute(text("LOCK TABLE responses IN ACCESS EXCLUSIVE MODE"))
            await assert_unavailable(write(store).responses.create(response("r2")))
        assert await write(store).responses.create(response("r2"))


async def test_postgres_lock_timeout_includes_queueing(postgres: Postgres) -> None:
    async with Store(postgres.new_database(), lock_timeout=1.0) as store:
        await write(store).responses.create(response("r1"))
        with database_of(store).engine.begin() as other:
            other.execute(text("LOCK TABLE responses IN ACCESS EXCLUSIVE MODE"))
            asked = [
                asyncio.create_task(write(store).responses.create(response(f"q{number}"))) for number in range(320)
            ]
            done, late = await asyncio.wait(asked, timeout=60)  # four at a time would take 80 s
            assert not late
            assert all(isinstance(task.exception(), StoreUnavailable) for task in done)
        assert await write(store).responses.create(response("r2"))


async def test_postgres_deadlock_is_retried(postgres: Postgres) -> None:
    """Two transactions take the same two locks in opposite order, and PostgreSQL aborts one of them."""
    async with Store(postgres.new_database(), lock_timeout=60.0) as store:
        for id in ("c1", "c2"):
            await write(store).conversations.create(conversation(id))
        tries = []
        each_has_its_first = threading.Barrier(2)

        def both(session: Any, first: str, second: str) -> None:
            tries.append(first)
            again = len(tries) > 2
            session.conversations.add_items(US, first, items(f"{first}-{second}"))
            if not again:
                each_has_its_first.wait(30)
            session.conversations.add_items(US, second, items(f"{first}-{second}"))

        await asyncio.gather(
            store.write(lambda session: both(session, "c1", "c2")),
            store.write(lambda session: both(session, "c2", "c1")),
        )
        assert len(tries) > 2
        for id in ("c1", "c2"):
            history = await read(store).conversations.all_items(US, id)
            assert history is not None
            assert sorted(each.id for each in history) == ["c1-c2", "c2-c1"]


async def test_fail_orphans_of_one_response_waits_for_lock(postgres: Postgres) -> None:
    """A caller that fails one response reads it afterwards, and must not find it running."""
    async with Store(postgres.new_database(), lock_timeout=60.0) as store:
        await write(store).responses.create(response("r1", process="dead", status="in_progress"))
        at_hand, go_on = threading.Event(), threading.Event()

        def slowly(session: Any) -> None:
            assert session.maintenance.fail_orphans(["dead"], None, "lost")
            at_hand.set()
            assert go_on.wait(30)

        other = asyncio.create_task(store.write(slowly))
        assert await asyncio.to_thread(at_hand.wait, 30)
        assert (
            await store.fail_orphans(has_exited=lambda process: process == "dead") == []
        )  # without `only`, locked rows are skipped
        own = asyncio.create_task(
            store.fail_orphans(has_exited=lambda process: process == "dead", only=ResponseKey(US, "r1"))
        )
        _, early = await asyncio.wait([own], timeout=0.3)
        go_on.set()
        assert early
        assert await own == []
        await other
        found = await read(store).responses.get(US, "r1")
        assert found is not None
        assert (found.status, found.process) == ("failed", None)


async def test_closed_store_raises_unavailable(database: str) -> None:
    store = Store(database)
    await write(store).responses.create(response("r1"))
    await store.close()
    await store.close()
    await assert_unavailable(read(store).responses.get(US, "r1"))


async def test_write_is_rolled_back_when_query_raises(store: Store) -> None:
    def work(session: Any) -> None:
        session.responses.create(response("r1"), items("i1"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.write(work)
    assert await read(store).responses.get(US, "r1") is None


async def test_concurrent_writes_of_two_stores(database: str) -> None:
    async with Store(database, lock_timeout=60.0) as store, Store(database, lock_timeout=60.0) as other:
        created = await asyncio.gather(
            *(
                write(each).responses.create(response(f"r{n}"), items("i1"))
                for n in range(40)
                for each in (store, other)
            )
        )
        assert sum(created) == 40
        found = await asyncio.gather(
            *(read(each).responses.get(US, f"r{n}") for n in range(40) for each in (store, other))
        )
        assert all(found)


DIE = """
import asyncio, sys, time
from syringa.store import Store
from tests.store.helpers import items, response

store = Store(sys.argv[1])

def half(session):
    session.responses.create(response("half"), items("i1", "i2"))
    print("database_of", flush=True)
    time.sleep(60)

async def main():
    running = response("running", status="in_progress", process="victim")
    await store.write(lambda session: session.responses.create(running, items("i1")))
    await store.write(half)

asyncio.run(main())
"""


async def test_killed_process_leaves_no_partial_write(store: Store, database: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DIE, database, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"database_of\n"
    process.kill()
    await process.wait()
    assert await read(store).responses.get(US, "half") is None
    assert await find_item(store, US, "i2") is None
    assert await write(store).responses.create(response("half"), items("i1", "i2"))  # its locks were released
    await store.fail_orphans(has_exited=lambda process: process == "victim")
    lost = await read(store).responses.get(US, "running")
    assert lost is not None
    assert lost.status == "failed"
