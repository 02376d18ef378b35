from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from syringa.errors import StoreError, StoreUnavailable
from syringa.service.usage import writer as module
from syringa.service.usage.writer import UsageWriter
from syringa.store import Store
from syringa.store.records import UsageFilter, UsageRecord
from tests.store.helpers import read, write


class Books:
    """A store that can be away, slow, or averse to some rows."""

    def __init__(self) -> None:
        self.batches: list[list[UsageRecord]] = []
        self.away = False
        self.averse = ""
        self.open = asyncio.Event()
        self.open.set()
        self.attempts = 0

    async def add(self, rows: Sequence[UsageRecord]) -> None:
        self.attempts += 1
        await self.open.wait()
        if self.away:
            raise StoreUnavailable("the database is away")
        if any(row.request_id == self.averse for row in rows):
            raise StoreError("the store refused what was to be kept")
        self.batches.append(list(rows))

    @property
    def names(self) -> list[str]:
        return [row.request_id for batch in self.batches for row in batch]


def row(name: str = "r", **values: object) -> UsageRecord:
    return UsageRecord(
        **{"at": 5.0, "model": "m", "endpoint": "chat", "outcome": "ok", "status": 200, "request_id": name, **values}
    )


def refused(name: str = "r", **values: object) -> UsageRecord:
    return row(name, **{"outcome": "refused", "status": 429, **values})


@contextlib.asynccontextmanager
async def metering(books: Books, seconds: float = 60.0, most: int = 100_000) -> AsyncIterator[UsageWriter]:
    meter = UsageWriter(books.add, flush_seconds=seconds, most=most)
    try:
        yield meter
    finally:
        books.open.set()
        books.away = False
        await meter.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(15_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came")


async def test_rows_are_written_on_the_beat_in_one_batch() -> None:
    books = Books()
    async with metering(books, seconds=0.02) as meter:
        for name in "abc":
            meter.note(row(name))
        assert books.batches == []
        await until(lambda: len(books.names) == 3)
        assert [[each.request_id for each in batch] for batch in books.batches] == [["a", "b", "c"]]
        meter.note(row("d"))
        await until(lambda: len(books.names) == 4)


async def test_nothing_runs_when_there_is_nothing_to_write() -> None:
    books = Books()
    async with metering(books, seconds=0.01) as meter:
        assert meter._task is None
        meter.note(row())
        task = meter._task
        assert task is not None
        await asyncio.wait_for(task, 30)
        assert meter._task is None
        assert books.names == ["r"]


async def test_the_end_writes_everything() -> None:
    books = Books()
    meter = UsageWriter(books.add, flush_seconds=60)
    for number in range(2500):
        meter.note(row(str(number)))
    await meter.close()
    assert books.names == [str(number) for number in range(2500)]
    assert max(map(len, books.batches)) <= module.BATCH
    await meter.close()
    assert len(books.names) == 2500


async def test_the_end_waits_for_a_batch_that_is_being_written() -> None:
    books = Books()
    meter = UsageWriter(books.add, flush_seconds=0)
    books.open.clear()
    meter.note(row("a"))
    await until(lambda: books.attempts > 0)
    meter.note(row("b"))
    closing = asyncio.create_task(meter.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    books.open.set()
    await closing
    assert books.names == ["a", "b"]


async def test_a_flush_writes_what_was_noted_before_it() -> None:
    books = Books()
    async with metering(books) as meter:
        meter.note(row("a"))
        await meter.flush()
        assert books.names == ["a"]
        await meter.flush()
        assert len(books.batches) == 1


async def test_two_flushes_write_each_row_once() -> None:
    books = Books()
    async with metering(books) as meter:
        books.open.clear()
        meter.note(row("a"))
        flushes = [asyncio.create_task(meter.flush()) for _ in range(3)]
        await asyncio.sleep(0.01)
        meter.note(row("b"))
        books.open.set()
        await asyncio.gather(*flushes)
        assert books.names == ["a", "b"]


async def test_while_the_store_is_away_rows_wait(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    books.away = True
    async with metering(books, seconds=0.005) as meter:
        meter.note(row("a"))
        await until(lambda: books.attempts >= 5)
        meter.note(row("b"))
        assert len(caplog.records) == 1
        assert "kept in memory" in caplog.text
        books.away = False
        await until(lambda: len(books.names) == 2)
        assert books.names == ["a", "b"]
        await until(lambda: meter._task is None)
        assert len(caplog.records) == 2
        assert "written again" in caplog.records[1].message


async def test_whoever_asks_for_a_flush_hears_that_the_store_is_away() -> None:
    books = Books()
    async with metering(books) as meter:
        meter.note(row("a"))
        books.away = True
        with pytest.raises(StoreUnavailable):
            await meter.flush()
        books.away = False
        await meter.flush()
        assert books.names == ["a"]


async def test_the_end_tries_again() -> None:
    books = Books()
    books.away = True
    meter = UsageWriter(books.add, flush_seconds=60)
    meter.note(row("a"))
    closing = asyncio.create_task(meter.close())
    await until(lambda: books.attempts >= 2)
    books.away = False
    await closing
    assert books.names == ["a"]


@pytest.mark.parametrize("how", ["away", "hanging"])
async def test_the_end_does_not_wait_for_ever(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    books = Books()
    if how == "away":
        books.away = True
    else:
        books.open.clear()
    meter = UsageWriter(books.add, flush_seconds=0.001)
    for name in "abc":
        meter.note(row(name))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(meter.close(), 30)
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == ["3 usage rows are lost"]
    assert len(asyncio.all_tasks()) == 1


async def test_with_too_many_the_oldest_are_lost(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    async with metering(books, most=3) as meter:
        for name in "abcde":
            meter.note(row(name))
        assert len(caplog.records) == 1
        await meter.flush()
        assert books.names == ["c", "d", "e"]
        assert caplog.records[-1].message == "2 usage rows are lost"
        meter.note(row("f"))
        await meter.flush()
        assert len(caplog.records) == 2


async def test_refusals_that_are_alike_become_one() -> None:
    books = Books()
    async with metering(books) as meter:
        for number in range(1000):
            meter.note(refused(str(number)))
        meter.note(refused(requests=5))
        await meter.flush()
        [[only]] = books.batches
        assert (only.requests, only.request_id, only.status) == (1005, "0", 429)


@pytest.mark.parametrize(
    "other",
    [
        {"organization": "globex"},
        {"key": "k"},
        {"model": "n"},
        {"endpoint": "responses"},
        {"status": 400},
        {"input_tokens": 5},
        {"outcome": "failed"},
    ],
)
async def test_refusals_that_differ_stay_apart(other: dict[str, object]) -> None:
    books = Books()
    async with metering(books) as meter:
        meter.note(refused("a"))
        meter.note(refused("b", **other))
        await meter.flush()
        assert [each.requests for each in books.batches[0]] == [1, 1]


async def test_what_did_not_fail_is_never_merged() -> None:
    books = Books()
    async with metering(books) as meter:
        meter.note(row("a"))
        meter.note(row("a"))
        await meter.flush()
        assert books.names == ["a", "a"]


async def test_nothing_is_merged_into_a_row_that_may_have_been_written() -> None:
    """Its id may be in the store already, and then the store leaves it out."""
    books = Books()
    async with metering(books) as meter:
        meter.note(refused("a"))
        books.open.clear()
        flush = asyncio.create_task(meter.flush())
        await asyncio.sleep(0.01)
        meter.note(refused("b"))
        books.away = True
        books.open.set()
        with pytest.raises(StoreUnavailable):
            await flush
        meter.note(refused("c"))
        books.away = False
        await meter.flush()
        assert [(each.request_id, each.requests) for each in books.batches[0]] == [("a", 1), ("b", 2)]


async def test_a_row_that_the_store_refuses_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    books.averse = "13"
    async with metering(books) as meter:
        for number in range(50):
            meter.note(row(str(number)))
        await meter.flush()
        assert sorted(map(int, books.names)) == [number for number in range(50) if number != 13]
        assert "request 13 cannot be stored" in caplog.text
        assert meter._rows == {}


async def test_what_comes_after_the_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    books = Books()
    meter = UsageWriter(books.add)
    await meter.close()
    meter.note(row())
    assert "after the meter" in caplog.text
    assert meter._task is None


async def test_a_real_store(tmp_path: Path) -> None:
    async with Store(str(tmp_path / "s.db")) as store:
        meter = UsageWriter(write(store).usage.add)
        meter.note(row("a", input_tokens=7, cost=0.25))
        for _ in range(3):
            meter.note(refused("b"))
        await meter.close()
        rows = await read(store).usage.records(UsageFilter())
        assert sorted((each.request_id, each.requests, each.input_tokens, each.cost) for each in rows) == [
            ("a", 1, 7, 0.25),
            ("b", 3, 0, 0.0),
        ]


async def test_what_is_expected_is_noted_on_the_beat_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    books, ended = Books(), list[str]()

    def settle() -> None:
        for name in ended:
            meter.note(row(name))
        ended.clear()

    meter = UsageWriter(books.add, settle=settle, flush_seconds=0.02)
    for name in "ab":
        ended.append(name)
        meter.expect()
    assert books.batches == []
    await until(lambda: len(books.names) == 2)
    assert len(books.batches) == 1
    await until(lambda: meter._task is None)
    ended.append("c")
    meter.expect()
    await meter.flush()
    assert books.names[-1] == "c"
    ended.append("d")
    meter.expect()
    await meter.close()
    assert books.names[-1] == "d"
    ended.append("late")
    meter.expect()
    assert "is not counted" in caplog.text


async def test_what_ends_while_the_end_is_written_is_noted_too() -> None:
    books, ended = Books(), ["a"]

    def settle() -> None:
        for name in ended:
            meter.note(row(name))
        ended.clear()

    meter = UsageWriter(books.add, settle=settle, flush_seconds=60)
    meter.expect()
    books.open.clear()
    closing = asyncio.create_task(meter.close())
    await asyncio.sleep(0.01)
    ended.append("b")
    meter.expect()
    books.open.set()
    await closing
    assert books.names == ["a", "b"]
