"""What happens when the database fails, when several use it, and when a process dies in the middle."""

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
from syringa.store import Running, Store
from tests.store.postgres import Postgres
from tests.store.things import ORGANISATION as US
from tests.store.things import Clock, conversation, inside, item, items, response


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "new" / "syringa.db"


@pytest.fixture
async def filed(file: Path, clock: Clock) -> AsyncIterator[Store]:
    """A store in a file, which waits for nobody."""
    async with Store(str(file), clock=clock, patience=0.1) as store:
        await store.create_response(response("r1"), items("i1"))
        yield store


@contextmanager
def pragma(store: Store, during: str, afterwards: str) -> Iterator[None]:
    """Sets something in every connection for a while."""
    current = [during]

    def checkout(raw: sqlite3.Connection, *rest: Any) -> None:
        raw.execute(f"PRAGMA {current[0]}").fetchall()

    event.listen(inside(store).engine, "checkout", checkout)
    yield
    current[0] = afterwards


async def assert_unavailable(call: Any) -> None:
    with pytest.raises(StoreUnavailable) as failed:
        await call
    assert (failed.value.status, failed.value.code, failed.value.type) == (503, "store_unavailable", "server_error")
    assert failed.value.retry_after
    assert "sqlite" not in failed.value.message.lower()


async def test_only_the_user_reads_the_file(filed: Store, file: Path) -> None:
    assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(file.parent).st_mode) == 0o700


async def test_how_a_file_is_used(filed: Store) -> None:
    with inside(filed).engine.begin() as connection:
        values = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert values == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "busy_timeout": 100}


async def test_a_full_disk(filed: Store) -> None:
    with inside(filed).engine.begin() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
    big = item("big", "x" * 1_000_000)
    with pragma(filed, f"max_page_count = {pages}", "max_page_count = 1000000"):
        await assert_unavailable(filed.create_response(response("r2"), [item("small"), big]))
        assert await filed.get_response(US, "r1") == response("r1")
        assert await filed.get_response(US, "r2") is None
        assert await filed.find_item(US, "small") is None
    assert await filed.create_response(response("r2"), [big])


async def test_a_database_that_stays_away_is_told_once(
    filed: Store, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = sqlite3.connect(file, isolation_level=None)
    for _ in range(2):
        other.execute("BEGIN IMMEDIATE")
        for _ in range(3):
            await assert_unavailable(filed.create_response(response("r2")))
        other.execute("ROLLBACK")
        await filed.create_response(response("r2"))
    other.close()
    assert len(caplog.records) == 2
    assert str(file) in caplog.text


async def test_a_read_only_file(filed: Store) -> None:
    with pragma(filed, "query_only = 1", "query_only = 0"):
        await assert_unavailable(filed.create_response(response("r2")))
        assert await filed.get_response(US, "r1") == response("r1")
    assert await filed.create_response(response("r2"))


async def test_a_file_that_is_locked_too_long(filed: Store, file: Path) -> None:
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    await assert_unavailable(filed.create_response(response("r2")))
    assert await filed.get_response(US, "r1") == response("r1")  # readers do not wait for a writer
    other.execute("ROLLBACK")
    other.close()
    assert await filed.create_response(response("r2"))


async def test_those_who_queue_for_a_lock_wait_no_longer_than_the_first(file: Path) -> None:
    async with Store(str(file), patience=0.5) as store:
        await store.create_response(response("r1"))
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        asked = [asyncio.create_task(store.create_response(response(f"q{number}"))) for number in range(40)]
        done, late = await asyncio.wait(asked, timeout=10)  # one after the other they would take 20 seconds
        assert not late
        assert all(isinstance(task.exception(), StoreUnavailable) for task in done)
        other.execute("ROLLBACK")
        other.close()
        assert await store.create_response(response("r2"))
        assert await store.get_response(US, "q39") is None


@pytest.mark.parametrize("pattern", ["*", "*.db"])  # with its log, and without
async def test_a_file_that_was_removed(filed: Store, file: Path, pattern: str) -> None:
    for each in file.parent.glob(pattern):
        each.unlink()
    await assert_unavailable(filed.get_response(US, "r1"))
    assert await filed.get_response(US, "r1") is None
    assert await filed.create_response(response("r2"))
    async with Store(str(file)) as other:
        assert await other.get_response(US, "r2") == response("r2")


async def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_text("not a database, " * 100)
    async with Store(str(tmp_path / "a.db")) as store:
        await assert_unavailable(store.open())
        (tmp_path / "a.db").unlink()
        await store.open()


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    async with Store(str(tmp_path / "taken" / "syringa.db")) as store:
        await assert_unavailable(store.open())
        (tmp_path / "taken").unlink()
        await store.open()


async def test_a_server_that_stops_and_comes_back(postgres: Postgres) -> None:
    url = postgres.new_database()
    async with Store(url) as store:
        await store.create_response(response("r1"), items("i1"))
        postgres.stop()
        try:
            for _ in range(2):
                await assert_unavailable(store.create_response(response("r2")))
                await assert_unavailable(store.get_response(US, "r1"))
            async with Store(url) as late:
                await assert_unavailable(late.open())
        finally:
            postgres.start()
        assert await store.get_response(US, "r1") == response("r1")
        assert await store.create_response(response("r2"))


async def test_a_restart_between_two_calls_is_not_noticed(postgres: Postgres) -> None:
    async with Store(postgres.new_database()) as store:
        await store.create_response(response("r1"))
        postgres.stop()
        postgres.start()
        assert await store.create_response(response("r2"))


async def test_a_table_that_is_locked_too_long(postgres: Postgres) -> None:
    async with Store(postgres.new_database(), patience=0.1) as store:
        await store.create_response(response("r1"))
        with inside(store).engine.begin() as other:
            other.execute(text("LOCK TABLE responses IN ACCESS EXCLUSIVE MODE"))
            await assert_unavailable(store.create_response(response("r2")))
        assert await store.create_response(response("r2"))


async def test_those_who_queue_for_a_table_wait_no_longer_than_the_first(postgres: Postgres) -> None:
    async with Store(postgres.new_database(), patience=0.5) as store:
        await store.create_response(response("r1"))
        with inside(store).engine.begin() as other:
            other.execute(text("LOCK TABLE responses IN ACCESS EXCLUSIVE MODE"))
            asked = [asyncio.create_task(store.create_response(response(f"q{number}"))) for number in range(160)]
            done, late = await asyncio.wait(asked, timeout=10)  # four at a time they would take 20 seconds
            assert not late
            assert all(isinstance(task.exception(), StoreUnavailable) for task in done)
        assert await store.create_response(response("r2"))


async def test_one_that_gives_way_to_another_tries_again(postgres: Postgres) -> None:
    """Two transactions take the same two locks in opposite order: PostgreSQL ends one of them."""
    async with Store(postgres.new_database()) as store:
        for id in ("c1", "c2"):
            await store.create_conversation(conversation(id))
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
            history = await store.conversation_history(US, id)
            assert history is not None
            assert sorted(each.id for each in history) == ["c1-c2", "c2-c1"]


async def test_what_another_is_about_to_end_is_waited_for(postgres: Postgres) -> None:
    """Whoever has asked for lost responses to be ended reads them afterwards, and must not find them running."""
    async with Store(postgres.new_database()) as store:
        await store.create_response(response("r1", owner="dead", status="in_progress"))
        at_hand, go_on = threading.Event(), threading.Event()

        def slowly(session: Any) -> None:
            assert session.upkeep.fail_orphans(["dead"], None, "lost")
            at_hand.set()
            assert go_on.wait(30)

        other = asyncio.create_task(store.write(slowly))
        assert await asyncio.to_thread(at_hand.wait, 30)
        assert await store.fail_orphans(gone=lambda owner: owner == "dead") == []  # that of all waits for nobody
        own = asyncio.create_task(store.fail_orphans(gone=lambda owner: owner == "dead", only=Running(US, "r1")))
        _, early = await asyncio.wait([own], timeout=0.3)
        go_on.set()
        assert early
        assert await own == []
        await other
        found = await store.get_response(US, "r1")
        assert found is not None
        assert (found.status, found.owner) == ("failed", None)


async def test_a_closed_store(database: str) -> None:
    store = Store(database)
    await store.create_response(response("r1"))
    await store.close()
    await store.close()
    await assert_unavailable(store.get_response(US, "r1"))


async def test_what_work_raises_undoes_what_it_wrote(store: Store) -> None:
    def work(session: Any) -> None:
        session.responses.create(response("r1"), items("i1"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.write(work)
    assert await store.get_response(US, "r1") is None


async def test_two_stores_write_at_the_same_time(store: Store, database: str) -> None:
    async with Store(database) as other:
        created = await asyncio.gather(
            *(each.create_response(response(f"r{n}"), items("i1")) for n in range(40) for each in (store, other))
        )
        assert sum(created) == 40
        found = await asyncio.gather(*(each.get_response(US, f"r{n}") for n in range(40) for each in (store, other)))
        assert all(found)


DIE = """
import asyncio, sys, time
from syringa.store import Store
from tests.store.things import items, response

store = Store(sys.argv[1])

def work(session):
    session.responses.create(response("half"), items("i1", "i2"))
    print("inside", flush=True)
    time.sleep(60)

async def main():
    await store.create_response(response("running", status="in_progress", owner="victim"), items("i1"))
    await store.write(work)

asyncio.run(main())
"""


async def test_a_process_that_is_killed_in_the_middle(store: Store, database: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", DIE, database, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"inside\n"
    process.kill()
    await process.wait()
    assert await store.get_response(US, "half") is None
    assert await store.find_item(US, "i2") is None
    assert await store.create_response(response("half"), items("i1", "i2"))  # its locks went with it
    await store.fail_orphans(gone=lambda owner: owner == "victim")
    lost = await store.get_response(US, "running")
    assert lost is not None
    assert lost.status == "failed"
