from __future__ import annotations

import asyncio

import pytest

from syringa.errors import StoreUnavailable
from syringa.service.batches import results as results_module
from syringa.service.batches.results import CLOSING_ATTEMPTS, LeaseLost, ResultWriter
from syringa.store import BatchResult
from tests.client import eventually, settle


def result(line: int, body: str = "{}") -> BatchResult:
    return BatchResult(line=line, failed=False, body=body)


class FakeStore:
    """Keeps results, unless it is away. Counts the attempts."""

    def __init__(self) -> None:
        self.lines: list[int] = []
        self.attempts = 0
        self.error: Exception | None = None

    async def write(self, results: list[BatchResult]) -> None:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        self.lines += [each.line for each in results]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeStore:
    monkeypatch.setattr(results_module, "RETRY_SECONDS", 0.0)
    return FakeStore()


async def test_results_are_written_before_the_writer_is_closed(store: FakeStore) -> None:
    writer = ResultWriter(store.write)
    for line in range(20):
        await writer.add(result(line))
    await writer.close()
    assert store.lines == list(range(20))


async def test_results_are_kept_while_the_store_is_away(store: FakeStore) -> None:
    store.error = StoreUnavailable("away")
    writer = ResultWriter(store.write)
    await writer.add(result(1))
    closing = asyncio.create_task(writer.close())
    assert await eventually(lambda: store.attempts > CLOSING_ATTEMPTS)
    assert not closing.done()
    store.error = None
    await closing
    assert store.lines == [1]


@pytest.mark.parametrize("late", [False, True], ids=["before", "while it closes"])
async def test_writer_in_a_hurry_gives_up(store: FakeStore, late: bool) -> None:
    store.error = StoreUnavailable("away")
    writer = ResultWriter(store.write)
    await writer.add(result(1))
    if not late:
        writer.hurry()
    closing = asyncio.create_task(writer.close())
    if late:
        await settle()
        assert not closing.done()
        writer.hurry()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(closing, 60)


async def test_lost_lease_ends_the_writer(store: FakeStore) -> None:
    store.error = LeaseLost()
    writer = ResultWriter(store.write)
    await writer.add(result(1))
    with pytest.raises(LeaseLost):
        await writer.close()


@pytest.mark.parametrize(
    ("count", "size"), [(results_module.MAX_UNWRITTEN, 2), (4, results_module.MAX_UNWRITTEN_BYTES // 4)]
)
async def test_results_in_memory_are_bounded(store: FakeStore, count: int, size: int) -> None:
    store.error = StoreUnavailable("away")
    writer = ResultWriter(store.write)
    await writer.add(result(0))
    assert await eventually(lambda: store.attempts)  # from now on it is busy with the first one
    body = "x" * size
    for line in range(1, count):
        await asyncio.wait_for(writer.add(result(line, body)), 60)
    full = asyncio.create_task(writer.add(result(count, body)))
    await settle()
    assert not full.done()
    store.error = None
    await asyncio.wait_for(full, 60)
    await writer.close()
    assert store.lines == list(range(count + 1))
