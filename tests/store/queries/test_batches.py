from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.errors import NotFound
from syringa.store import BatchCounts, BatchResult, Store, StoredBatch, UsageRecord
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import START, Clock, read, write


def batch(id: str, **changes: Any) -> StoredBatch:
    given = {
        "organization": US,
        "created_at": START,
        "deadline": START + 100,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "input_file": "file-1",
    }
    return StoredBatch(id=id, **(given | changes))


def result(line: int, *, failed: bool = False, body: str = "{}") -> BatchResult:
    usage = UsageRecord(
        id=f"line-{line}", at=START, model="m", endpoint="e", outcome="ok", status=200, input_tokens=5, output_tokens=2
    )
    return BatchResult(line=line, failed=failed, body=body, usage=usage)


async def test_batches_belong_to_one_organization_and_are_listed_newest_first(store: Store) -> None:
    for number in range(3):
        await write(store).batches.create(batch(f"batch_{number}", created_at=START + number))
    await write(store).batches.create(batch("batch_x", organization="other"))
    assert await read(store).batches.get("other", "batch_1") is None
    page, more = await read(store).batches.page(US, limit=2)
    assert [each.id for each in page] == ["batch_2", "batch_1"]
    assert more
    page, more = await read(store).batches.page(US, limit=2, after="batch_1")
    assert [each.id for each in page] == ["batch_0"]
    assert not more
    oldest, _ = await read(store).batches.page(US, order="asc", after="batch_0")
    assert [each.id for each in oldest] == ["batch_1", "batch_2"]
    with pytest.raises(NotFound):
        await read(store).batches.page(US, after="batch_x")


async def test_active_batches_of_an_organization_do_not_hide_those_of_others(store: Store) -> None:
    for number in range(4):
        await write(store).batches.create(batch(f"batch_{number}", created_at=START + number))
    await write(store).batches.create(batch("batch_x", organization="other", created_at=START + 9))
    await write(store).batches.cancel(US, "batch_3")
    found = await read(store).batches.active(limit=3)
    assert [each.batch.id for each in found] == ["batch_3", "batch_0", "batch_x"]


async def test_new_and_cancelled_batches_advance_the_revision(store: Store) -> None:
    await write(store).batches.create(batch("batch_1"))
    created = await read(store).revisions.get("batches")
    assert created
    cancelled = await write(store).batches.cancel(US, "batch_1")
    assert (cancelled.status, json.loads(cancelled.times)) == ("cancelling", {"cancelling_at": START})
    assert await read(store).revisions.get("batches") > created
    assert await write(store).batches.cancel(US, "batch_1") is None


async def test_results_and_usage_of_a_line_are_stored_once(store: Store) -> None:
    await write(store).batches.create(batch("batch_1", total=4, status="in_progress"))
    await write(store).batches.add_results(US, "batch_1", [result(1), result(3, failed=True)])
    await write(store).batches.add_results(US, "batch_1", [result(1, body="again"), result(2), result(2)])
    found = await read(store).batches.get(US, "batch_1")
    assert (found.completed, found.failed, found.input_tokens, found.output_tokens) == (2, 1, 15, 6)
    assert await read(store).batches.done_lines(US, "batch_1") == {1, 2, 3}
    rows = await read(store).batches.results(US, "batch_1", after=1)
    assert [(row.line, row.failed, row.body) for row in rows] == [(2, False, "{}"), (3, True, "{}")]
    assert len(await read(store).usage.records()) == 3
    assert await read(store).batches.waiting_lines(US) == 1
    assert await read(store).batches.counts() == [BatchCounts(status="in_progress", batches=1, waiting_lines=1)]


async def test_results_of_finished_batches_are_dropped(store: Store) -> None:
    for id in ("batch_1", "batch_2"):
        await write(store).batches.create(batch(id, status="in_progress"))
        await write(store).batches.add_results(US, id, [result(1)])
    assert await write(store).batches.drop_results() == 0
    await write(store).batches.change(US, "batch_1", ("in_progress",), "completed", START)
    assert await write(store).batches.drop_results() == 1
    assert await write(store).batches.drop_results() == 0
    assert await read(store).batches.done_lines(US, "batch_2") == {1}


async def test_lease_of_a_batch_has_one_owner_until_it_expires_or_its_process_has_exited(
    store: Store, clock: Clock
) -> None:
    await write(store).batches.create(batch("batch_1"))
    assert await write(store).batches.take("batch_1", "one", 10.0)
    assert not await write(store).batches.take("batch_1", "two", 10.0)
    assert [each.owner for each in await read(store).batches.active()] == ["one"]
    assert not await write(store).batches.take("batch_1", "two", 10.0, exited="three")
    assert await write(store).batches.take("batch_1", "two", 10.0, exited="one")
    clock.now += 10
    assert [each.owner for each in await read(store).batches.active()] == [None]
    assert await write(store).batches.take("batch_1", "one", 10.0)
    await write(store).batches.release("batch_1", "one")
    assert await write(store).batches.take("batch_1", "two", 10.0)


async def test_change_applies_to_the_given_statuses_only(store: Store) -> None:
    await write(store).batches.create(batch("batch_1"))
    assert await write(store).batches.change(US, "batch_1", ("in_progress",), "failed", START) is None
    await write(store).batches.change(US, "batch_1", ("validating",), "in_progress", START + 1)
    changed = await write(store).batches.change(US, "batch_1", ("in_progress",), "failed", START + 2, {"errors": "[]"})
    assert (changed.status, changed.errors) == ("failed", "[]")
    assert json.loads(changed.times) == {"in_progress_at": START + 1, "failed_at": START + 2}  # none is lost
    assert await read(store).batches.active() == []


async def test_expired_batches_are_hidden_and_deleted(store: Store, clock: Clock) -> None:
    await write(store).batches.create(batch("batch_1", status="completed", expires_at=START + 5))
    assert await read(store).batches.get(US, "batch_1") is not None
    clock.now += 5
    assert await read(store).batches.get(US, "batch_1") is None
    assert await store.expire() == 1
