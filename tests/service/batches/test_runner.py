from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from syringa.service.batches import runner as runner_module
from syringa.service.batches.run import BatchRun
from syringa.service.batches.runner import RETRY_SECONDS, BatchRunner
from syringa.service.responses import process_identity
from syringa.service.store_poller import StoreRevisions
from syringa.store import Store, StoredBatch
from tests.client import until
from tests.service.batches.harness import BatchHarness, lines
from tests.store.helpers import read, write

ME = process_identity.new_identity()
GONE = ME.replace(ME.split("/")[1], "1", 1).replace(ME.split("/")[2], "0", 1)  # on this machine, not running


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[BatchHarness]:
    async with Store(str(tmp_path / "a.db")) as store:
        harness = BatchHarness(store, tmp_path / "files")
        yield harness
        await harness.close()


async def wait_for(harness: BatchHarness, batch: StoredBatch, status: str) -> StoredBatch:
    async def has_status() -> bool:
        return bool((await read(harness.store).batches.get(batch.organization, batch.id)).status == status)

    await until(has_status)
    found: StoredBatch = await read(harness.store).batches.get(batch.organization, batch.id)
    return found


async def test_runner_takes_new_batches_and_those_of_processes_that_have_exited(harness: BatchHarness) -> None:
    new, left_behind, running = [await harness.create(lines(2)) for _ in range(3)]
    await write(harness.store).batches.take(left_behind.id, GONE, 1000.0)
    await write(harness.store).batches.take(running.id, "another machine", 1000.0)
    runner = BatchRunner(lambda: harness.services(ME))
    await runner.refresh(StoreRevisions(harness.store))
    await wait_for(harness, new, "completed")
    await wait_for(harness, left_behind, "completed")
    assert (await read(harness.store).batches.get("", running.id)).status == "validating"
    await runner.close()


async def test_runner_ends_a_batch_that_a_client_has_cancelled(harness: BatchHarness) -> None:
    async def hang(request: object) -> None:
        await asyncio.Event().wait()

    harness.endpoint.before = hang
    batch = await harness.create(lines(2))
    runner = BatchRunner(lambda: harness.services(ME))
    await runner.refresh(StoreRevisions(harness.store))
    await wait_for(harness, batch, "in_progress")
    await write(harness.store).batches.cancel("", batch.id)
    await runner.refresh(StoreRevisions(harness.store))
    await wait_for(harness, batch, "cancelled")
    await runner.close()


async def test_closed_runner_gives_its_leases_back(harness: BatchHarness) -> None:
    async def hang(request: object) -> None:
        await asyncio.Event().wait()

    harness.endpoint.before = hang
    batch = await harness.create(lines(2))
    runner = BatchRunner(lambda: harness.services(ME))
    await runner.scan()
    await wait_for(harness, batch, "in_progress")
    await runner.close()
    (active,) = await read(harness.store).batches.active()
    assert (active.owner, active.batch.status) == (None, "in_progress")


async def test_runner_leaves_batches_whose_input_is_on_another_machine(harness: BatchHarness) -> None:
    batch = await harness.create(lines(1))
    await harness.files.remove(batch.input_file)
    runner = BatchRunner(lambda: harness.services(ME))
    await runner.scan()
    (active,) = await read(harness.store).batches.active()
    assert active.owner is None
    await runner.close()


async def test_runner_alternates_between_organizations(harness: BatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "MAX_RUNS", 2)

    async def hang(request: object) -> None:
        await asyncio.Event().wait()

    harness.endpoint.before = hang
    first = await harness.create(lines(1), created_at=1)
    await harness.create(lines(1), created_at=2)
    other = await harness.create(lines(1), created_at=3, organization="other")
    runner = BatchRunner(lambda: harness.services(ME))
    await runner.scan()
    active = await read(harness.store).batches.active()
    assert {each.batch.id for each in active if each.owner is not None} == {first.id, other.id}
    await runner.close()


async def test_organization_with_nothing_running_does_not_wait_for_those_with_many_batches(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "MAX_RUNS", 2)
    monkeypatch.setattr(runner_module, "MAX_ORGANIZATIONS", 3)

    async def hang(request: object) -> None:
        await asyncio.Event().wait()

    harness.endpoint.before = hang
    for number in range(3):
        await harness.create(lines(1), created_at=number)
    runner = BatchRunner(lambda: harness.services(ME))
    await runner.scan()
    await harness.create(lines(1), organization="other")
    await harness.create(lines(1), organization="other")
    await harness.create(lines(1), organization="third")  # one too many
    await runner.scan()
    active = await read(harness.store).batches.active()
    assert Counter(each.batch.organization for each in active if each.owner is not None) == {"": 2, "other": 1}
    await runner.close()


async def test_interrupted_batch_is_taken_again_after_a_while(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    batch = await harness.create(lines(2))
    runner = BatchRunner(lambda: harness.services(ME), clock=lambda: now)
    runs = 0

    async def interrupted(run: BatchRun) -> None:
        nonlocal runs
        runs += 1

    async def is_released() -> bool:
        (active,) = await read(harness.store).batches.active()
        return active.owner is None

    with monkeypatch.context() as patched:
        patched.setattr(BatchRun, "run", interrupted)
        for delay in (RETRY_SECONDS, 2 * RETRY_SECONDS):
            await runner.scan()
            await until(is_released)
            taken = runs
            now += delay - 0.1
            await runner.scan()
            assert runs == taken
            now += 0.2
    assert runs == 2
    await runner.scan()
    await wait_for(harness, batch, "completed")
    await runner.close()


async def test_runner_without_services_or_database_does_nothing(tmp_path: Path) -> None:
    async with Store(str(tmp_path / "none.db")) as store:
        harness = BatchHarness(store, tmp_path / "files")
        for services in (lambda: None, lambda: harness.services(ME)):
            await BatchRunner(services).refresh(StoreRevisions(store))
    assert not (tmp_path / "none.db").exists()
