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


class FakeStore:
    """A store that can be unavailable, slow, or reject some records."""

    def __init__(self) -> None:
        self.batches: list[list[UsageRecord]] = []
        self.unavailable = False
        self.rejected = ""
        self.open = asyncio.Event()
        self.open.set()
        self.attempts = 0

    async def add(self, records: Sequence[UsageRecord]) -> None:
        self.attempts += 1
        await self.open.wait()
        if self.unavailable:
            raise StoreUnavailable("the database is unavailable")
        if any(record.request_id == self.rejected for record in records):
            raise StoreError("the database rejected the data")
        self.batches.append(list(records))

    @property
    def names(self) -> list[str]:
        return [record.request_id for batch in self.batches for record in batch]


def record(name: str = "r", **values: object) -> UsageRecord:
    return UsageRecord(
        **{"at": 5.0, "model": "m", "endpoint": "chat", "outcome": "ok", "status": 200, "request_id": name, **values}
    )


def refused(name: str = "r", **values: object) -> UsageRecord:
    return record(name, **{"outcome": "refused", "status": 429, **values})


@contextlib.asynccontextmanager
async def writing(store: FakeStore, seconds: float = 60.0, max_records: int = 100_000) -> AsyncIterator[UsageWriter]:
    writer = UsageWriter(store.add, flush_seconds=seconds, max_records=max_records)
    try:
        yield writer
    finally:
        store.open.set()
        store.unavailable = False
        await writer.close()


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stalls, the last write may take longer than a server would wait for it."""
    monkeypatch.setattr(module, "CLOSE_SECONDS", 60.0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(15_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("the condition did not become true")


async def test_records_are_written_periodically_in_one_batch() -> None:
    store = FakeStore()
    async with writing(store, seconds=0.02) as writer:
        for name in "abc":
            writer.add(record(name))
        assert store.batches == []
        await until(lambda: len(store.names) == 3)
        assert [[each.request_id for each in batch] for batch in store.batches] == [["a", "b", "c"]]
        writer.add(record("d"))
        await until(lambda: len(store.names) == 4)


async def test_idle_writer_has_no_task() -> None:
    store = FakeStore()
    async with writing(store, seconds=0.01) as writer:
        assert writer._task is None
        writer.add(record())
        task = writer._task
        assert task is not None
        await asyncio.wait_for(task, 30)
        assert writer._task is None
        assert store.names == ["r"]


async def test_close_writes_everything() -> None:
    store = FakeStore()
    writer = UsageWriter(store.add, flush_seconds=60)
    for number in range(2500):
        writer.add(record(str(number)))
    await writer.close()
    assert store.names == [str(number) for number in range(2500)]
    assert max(map(len, store.batches)) <= module.BATCH
    await writer.close()
    assert len(store.names) == 2500


async def test_close_waits_for_running_flush() -> None:
    store = FakeStore()
    writer = UsageWriter(store.add, flush_seconds=0)
    store.open.clear()
    writer.add(record("a"))
    await until(lambda: store.attempts > 0)
    writer.add(record("b"))
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    store.open.set()
    await closing
    assert store.names == ["a", "b"]


async def test_flush_writes_added_records() -> None:
    store = FakeStore()
    async with writing(store) as writer:
        writer.add(record("a"))
        await writer.flush()
        assert store.names == ["a"]
        await writer.flush()
        assert len(store.batches) == 1


async def test_concurrent_flushes_write_each_record_once() -> None:
    store = FakeStore()
    async with writing(store) as writer:
        store.open.clear()
        writer.add(record("a"))
        flushes = [asyncio.create_task(writer.flush()) for _ in range(3)]
        await asyncio.sleep(0.01)
        writer.add(record("b"))
        store.open.set()
        await asyncio.gather(*flushes)
        assert store.names == ["a", "b"]


async def test_records_are_buffered_while_store_is_unavailable(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    store.unavailable = True
    async with writing(store, seconds=0.005) as writer:
        writer.add(record("a"))
        await until(lambda: store.attempts >= 5)
        writer.add(record("b"))
        assert len(caplog.records) == 1
        assert "buffered" in caplog.text
        store.unavailable = False
        await until(lambda: len(store.names) == 2)
        assert store.names == ["a", "b"]
        await until(lambda: writer._task is None)
        assert len(caplog.records) == 2
        assert "written again" in caplog.records[1].message


async def test_flush_raises_while_store_is_unavailable() -> None:
    store = FakeStore()
    async with writing(store) as writer:
        writer.add(record("a"))
        store.unavailable = True
        with pytest.raises(StoreUnavailable):
            await writer.flush()
        store.unavailable = False
        await writer.flush()
        assert store.names == ["a"]


async def test_close_retries() -> None:
    store = FakeStore()
    store.unavailable = True
    writer = UsageWriter(store.add, flush_seconds=60)
    writer.add(record("a"))
    closing = asyncio.create_task(writer.close())
    await until(lambda: store.attempts >= 2)
    store.unavailable = False
    await closing
    assert store.names == ["a"]


@pytest.mark.parametrize("how", ["unavailable", "hanging"])
async def test_close_gives_up_after_timeout(
    how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    store = FakeStore()
    if how == "unavailable":
        store.unavailable = True
    else:
        store.open.clear()
    writer = UsageWriter(store.add, flush_seconds=0.001)
    for name in "abc":
        writer.add(record(name))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(writer.close(), 30)
    assert [record.message for record in caplog.records if record.levelno == logging.ERROR] == [
        "usage: records are lost: count=3"
    ]
    assert len(asyncio.all_tasks()) == 1


async def test_full_buffer_drops_oldest_records(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    async with writing(store, max_records=3) as writer:
        for name in "abcde":
            writer.add(record(name))
        assert len(caplog.records) == 1
        await writer.flush()
        assert store.names == ["c", "d", "e"]
        assert caplog.records[-1].message == "usage: records are lost: count=2"
        writer.add(record("f"))
        await writer.flush()
        assert len(caplog.records) == 2


async def test_equal_refusals_are_merged() -> None:
    store = FakeStore()
    async with writing(store) as writer:
        for number in range(1000):
            writer.add(refused(str(number)))
        writer.add(refused(requests=5))
        await writer.flush()
        [[only]] = store.batches
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
async def test_different_refusals_are_not_merged(other: dict[str, object]) -> None:
    store = FakeStore()
    async with writing(store) as writer:
        writer.add(refused("a"))
        writer.add(refused("b", **other))
        await writer.flush()
        assert [each.requests for each in store.batches[0]] == [1, 1]


async def test_successful_requests_are_not_merged() -> None:
    store = FakeStore()
    async with writing(store) as writer:
        writer.add(record("a"))
        writer.add(record("a"))
        await writer.flush()
        assert store.names == ["a", "a"]


async def test_record_of_running_flush_is_not_merged_into() -> None:
    """Its id may be stored already, and a record with a stored id is skipped."""
    store = FakeStore()
    async with writing(store) as writer:
        writer.add(refused("a"))
        store.open.clear()
        flush = asyncio.create_task(writer.flush())
        await until(lambda: store.attempts > 0)
        writer.add(refused("b"))
        store.unavailable = True
        store.open.set()
        with pytest.raises(StoreUnavailable):
            await flush
        writer.add(refused("c"))
        store.unavailable = False
        await writer.flush()
        assert [(each.request_id, each.requests) for each in store.batches[0]] == [("a", 1), ("b", 2)]


async def test_rejected_record_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    store.rejected = "13"
    async with writing(store) as writer:
        for number in range(50):
            writer.add(record(str(number)))
        await writer.flush()
        assert sorted(map(int, store.names)) == [number for number in range(50) if number != 13]
        assert "record cannot be stored: request_id=13" in caplog.text
        assert writer._records == {}


async def test_add_after_close_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    writer = UsageWriter(store.add)
    await writer.close()
    writer.add(record())
    assert "after the writer was closed" in caplog.text
    assert writer._task is None


async def test_writer_with_real_store(tmp_path: Path) -> None:
    async with Store(str(tmp_path / "s.db")) as store:
        writer = UsageWriter(write(store).usage.add)
        writer.add(record("a", input_tokens=7, cost=0.25))
        for _ in range(3):
            writer.add(refused("b"))
        await writer.close()
        records = await read(store).usage.records(UsageFilter())
        assert sorted((each.request_id, each.requests, each.input_tokens, each.cost) for each in records) == [
            ("a", 1, 7, 0.25),
            ("b", 3, 0, 0.0),
        ]


async def test_before_flush_runs_at_flush_and_at_close() -> None:
    store, calls = FakeStore(), list[int]()
    writer = UsageWriter(store.add, before_flush=lambda: calls.append(len(store.names)), flush_seconds=60)
    writer.add(record("a"))
    assert calls == []
    await writer.flush()
    assert calls == [0]
    writer.add(record("b"))
    await writer.close()
    assert calls[1:] == [1, 1]  # `close` looks whether there is anything to flush, and flushes


async def test_requests_that_end_during_close_are_written() -> None:
    store = FakeStore()
    writer = UsageWriter(store.add, flush_seconds=60)
    writer.add(record("a"))
    store.open.clear()
    closing = asyncio.create_task(writer.close())
    await until(lambda: store.attempts > 0)
    writer.add(record("b"))
    store.open.set()
    await closing
    assert store.names == ["a", "b"]
