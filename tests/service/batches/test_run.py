from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import StoreOutcomeUnknown, StoreUnavailable
from syringa.service.batches import lines as lines_module
from syringa.service.batches import results as results_module
from syringa.service.batches.results import LeaseLost
from syringa.service.batches.run import MAX_ATTEMPTS, BatchRun, LineRequest
from syringa.service.files import storage as storage_module
from syringa.service.limits.memory_budget import MemoryBudget
from syringa.store import BatchResult, Store
from tests.client import until
from tests.service.batches.harness import BatchHarness, line, lines
from tests.store.helpers import read, write


@pytest.fixture
async def harness(database: str, tmp_path: Path) -> AsyncIterator[BatchHarness]:
    async with Store(database) as store:
        harness = BatchHarness(store, tmp_path / "files")
        yield harness
        await harness.close()


def ids(written: list[dict[str, Any]]) -> list[str]:
    return [each["custom_id"] for each in written]


async def test_batch_is_run_from_validation_to_its_output_file(harness: BatchHarness) -> None:
    done = await harness.run(await harness.create(lines(20)))
    assert (done.status, done.total, done.completed, done.failed, done.model) == ("completed", 20, 20, 0, "m")
    assert (done.input_tokens, done.output_tokens) == (80, 40)
    assert done.error_file is None
    output = await harness.read_file(done.output_file)
    assert ids(output) == [f"r{number}" for number in range(1, 21)]  # in the order of the input
    assert output[0] == {
        "id": "batch_req_1_1",
        "custom_id": "r1",
        "response": {"status_code": 200, "request_id": "batch_req_1_1", "body": {"status": 200}},
        "error": None,
    }
    assert sorted(json.loads(done.times)) == ["completed_at", "finalizing_at", "in_progress_at"]
    assert await read(harness.store).batches.done_lines("", done.id) == set()  # they are in the file now
    file = await read(harness.store).files.get("", done.output_file)
    assert (file.purpose, file.filename) == ("batch_output", "batch_1_output.jsonl")


async def test_bad_lines_are_error_lines(harness: BatchHarness) -> None:
    content = [
        line("good"),
        "{",
        "",
        line("good"),
        line("other", url="/v1/completions"),
        line("get", method="GET"),
        line("stream", body={"stream": True}),
        line("text", body="no object"),
        line("none", body=None),
        json.dumps({"method": "POST"}),
        line("long", body={"model": "x" * 1000}),
        line("refused"),
    ]
    harness.endpoint.answer = lambda request: (400 if request.request_id.endswith("_12") else 200, None)
    done = await harness.run(await harness.create(content))
    assert (done.status, done.total, done.completed, done.failed) == ("completed", 11, 1, 10)
    assert ids(await harness.read_file(done.output_file)) == ["good"]
    errors = await harness.read_file(done.error_file)
    assert [(each["custom_id"], each["error"] and each["error"]["code"]) for each in errors] == [
        (None, "invalid_json_line"),
        ("good", "duplicate_custom_id"),
        ("other", "invalid_url"),
        ("get", "invalid_method"),
        ("stream", "unsupported_parameter"),
        ("text", "invalid_type"),
        ("none", "invalid_type"),
        (None, "missing_required_parameter"),
        (None, "line_too_long"),
        ("refused", None),
    ]
    assert errors[-1]["response"]["status_code"] == 400
    assert len(await harness.usage()) == 2  # of the lines that were run


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (b"%PDF-1.7\n\xff\xfe", "invalid_json_line"),
        ([line(str(number)) for number in range(101)], "too_many_requests"),
    ],
    ids=["empty", "blank", "no JSON", "too many lines"],
)
async def test_file_that_cannot_be_run_fails_the_batch(harness: BatchHarness, content: Any, code: str) -> None:
    failed = await harness.run(await harness.create(content))
    assert failed.status == "failed"
    assert json.loads(failed.errors or "")[0]["code"] == code
    assert harness.endpoint.runs == {}


async def test_batch_beyond_the_queue_limit_fails(harness: BatchHarness) -> None:
    waiting = await harness.create(lines(6))
    await write(harness.store).batches.change("", waiting.id, ("validating",), "in_progress", 0, {"total": 6})
    failed = await harness.run(await harness.create(lines(5)), queue_lines=10)
    assert json.loads(failed.errors or "")[0]["code"] == "request_limit_exceeded"
    done = await harness.run(await harness.create(lines(4)), queue_lines=10)
    assert done.status == "completed"


async def test_batches_that_are_validated_at_the_same_time_share_the_queue_limit(harness: BatchHarness) -> None:
    validated = asyncio.Event()

    async def wait(request: LineRequest) -> None:
        await validated.wait()

    async def is_validated() -> bool:
        return all(each.batch.status != "validating" for each in await read(harness.store).batches.active())

    harness.endpoint.before = wait
    created = [await harness.create(lines(6)) for _ in range(4)]
    runs = asyncio.gather(*(harness.run(each, queue_lines=10) for each in created))
    await until(is_validated)
    validated.set()
    done = await runs
    assert sorted(each.status for each in done) == ["completed", "failed", "failed", "failed"]
    codes = {json.loads(each.errors)[0]["code"] for each in done if each.errors is not None}
    assert codes == {"request_limit_exceeded"}


async def test_lines_in_flight_are_bounded(harness: BatchHarness) -> None:
    running = highest = 0
    full = asyncio.Event()

    async def count(request: LineRequest) -> None:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        if running == 4:
            full.set()
        async with asyncio.timeout(60):
            await full.wait()
        await asyncio.sleep(0.001)
        running -= 1

    harness.endpoint.before = count
    await harness.run(await harness.create(lines(30)), slots=MemoryBudget(4))
    assert highest == 4


async def test_unavailable_model_is_tried_again(harness: BatchHarness) -> None:
    def answer(request: LineRequest) -> tuple[int, float | None]:
        return (503, 2.0) if harness.endpoint.runs[request.request_id] < 3 else (200, None)

    harness.endpoint.answer = answer
    done = await harness.run(await harness.create(lines(1)))
    assert (done.completed, harness.slept) == (1, [2.0, 4.0])
    assert len(await harness.usage()) == 1


async def test_outage_of_a_model_costs_no_line(harness: BatchHarness) -> None:
    """However long it lasts: lines are then tried one at a time, with pauses, and hold no slot in between."""
    slots, memory = MemoryBudget(8), MemoryBudget(1 << 20)
    running = 0

    async def count(request: LineRequest) -> None:
        nonlocal running
        running += 1
        if 10 < len(harness.slept) < 60:
            assert running == 1
        await asyncio.sleep(0)
        running -= 1

    async def sleep(seconds: float) -> None:
        harness.slept.append(seconds)
        if len(harness.slept) > 10:
            assert (slots._held, memory._held) == ({}, {})
        await asyncio.sleep(0)

    def answer(request: LineRequest) -> tuple[int, float | None]:
        return (503, 2.0) if len(harness.slept) < 60 else (200, None)

    harness.endpoint.answer, harness.endpoint.before = answer, count
    done = await harness.run(await harness.create(lines(40)), slots=slots, memory=memory, sleep=sleep)
    assert (done.status, done.completed, done.failed) == ("completed", 40, 0)
    assert harness.slept[60:] == [2.0]  # when the model is there again: before the lines that it had refused
    assert harness.slept[:7] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert ids(await harness.read_file(done.output_file)) == [f"r{number}" for number in range(1, 41)]
    assert len(await harness.usage()) == 40


async def test_lines_of_one_model_wait_while_those_of_others_are_run(harness: BatchHarness) -> None:
    content = [line(f"r{number}", body={"model": "away" if number % 2 else "m"}) for number in range(20)]
    content.insert(0, line("r0"))  # a duplicate, and an error in every pass
    order = []

    def answer(request: LineRequest) -> tuple[int, float | None]:
        if b"away" in request.body and not harness.slept:
            return 503, 1.0
        order.append(b"away" in request.body)
        return 200, None

    harness.endpoint.answer = answer
    done = await harness.run(await harness.create(content))
    assert (done.total, done.completed, done.failed) == (21, 20, 1)
    assert harness.slept == [1.0]
    assert order == [False] * 10 + [True] * 10
    assert set(harness.endpoint.runs.values()) == {1, 2}


async def test_lines_whose_model_stays_away_expire_with_the_batch(harness: BatchHarness) -> None:
    batch = await harness.create(lines(12))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run: BatchRun

    async def sleep(seconds: float) -> None:
        harness.slept.append(seconds)
        if len(harness.slept) > 3 * MAX_ATTEMPTS:
            run.end("expired")  # the timer of the completion window
        await asyncio.sleep(0)

    def answer(request: LineRequest) -> tuple[int, float | None]:
        return (200, None) if request.request_id.endswith("_5") else (503, 1.0)

    harness.endpoint.answer = answer
    run = BatchRun(batch, harness.services(sleep=sleep))
    await run.run()
    done = await read(harness.store).batches.get("", batch.id)
    assert (done.status, done.completed, done.failed) == ("expired", 1, 11)
    codes = {each["error"]["code"] for each in await harness.read_file(done.error_file)}
    assert codes == {"batch_expired"}
    assert len(await harness.usage()) == 1


async def test_line_that_may_be_the_reason_of_its_failures_is_not_tried_for_ever(harness: BatchHarness) -> None:
    harness.endpoint.suspect = True
    harness.endpoint.answer = lambda request: (503, 2.0) if request.request_id.endswith("_2") else (200, None)
    done = await harness.run(await harness.create(lines(3)))
    assert (done.status, done.completed, done.failed) == ("completed", 2, 1)
    assert harness.endpoint.runs["batch_req_1_2"] == MAX_ATTEMPTS
    (failed,) = await harness.read_file(done.error_file)
    assert failed["response"]["status_code"] == 503
    assert len(await harness.usage()) == 3


@pytest.mark.parametrize("killed_after", [0, 1, 5, 11, 12])
async def test_killed_run_goes_on_without_repeating_a_stored_line(harness: BatchHarness, killed_after: int) -> None:
    """Kill the run once so many lines are stored: the next one runs the others."""
    batch = await harness.create(lines(12))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run = BatchRun(batch, harness.services(slots=MemoryBudget(1)))
    stored = 0
    store_results = run._store_results
    killed = asyncio.Event()

    async def store_some(results: list[Any]) -> None:
        nonlocal stored
        room = killed_after - stored
        if room > 0:
            await store_results(results[:room])
            stored += min(room, len(results))
        if stored >= killed_after:
            killed.set()
            await asyncio.Event().wait()

    run._store_results = store_some  # type: ignore[method-assign]
    task = asyncio.create_task(run.run())
    await killed.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    before = await read(harness.store).batches.done_lines("", batch.id)
    assert len(before) == killed_after
    first = dict(harness.endpoint.runs)
    done = await harness.run(batch, "two")
    assert (done.status, done.completed) == ("completed", 12)
    assert ids(await harness.read_file(done.output_file)) == [f"r{number}" for number in range(1, 13)]
    repeated = {id for id, runs in harness.endpoint.runs.items() if runs > first.get(id, 0)}
    assert repeated == {f"batch_req_1_{number}" for number in set(range(1, 13)) - before}
    assert sorted(record.id for record in await harness.usage()) == sorted(harness.endpoint.runs)
    assert (done.input_tokens, done.output_tokens) == (48, 24)


async def test_run_that_was_killed_while_it_wrote_its_files_writes_them_again(harness: BatchHarness) -> None:
    batch = await harness.create(lines(3))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run = BatchRun(batch, harness.services())
    finalizing = asyncio.Event()

    async def stop() -> None:
        finalizing.set()
        await asyncio.Event().wait()

    run._finalize = stop  # type: ignore[method-assign]
    task = asyncio.create_task(run.run())
    await finalizing.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    done = await harness.run(batch, "two")
    assert (done.status, done.completed) == ("completed", 3)
    assert set(harness.endpoint.runs.values()) == {1}
    assert len(await harness.read_file(done.output_file)) == 3


async def test_process_that_has_lost_the_lease_stores_nothing(harness: BatchHarness) -> None:
    batch = await harness.create(lines(3))
    await write(harness.store).batches.take(batch.id, "other", 1000.0)
    await BatchRun(batch, harness.services("one")).run()
    found = await read(harness.store).batches.get("", batch.id)
    assert (found.status, found.completed) == ("validating", 0)
    assert await harness.usage() == []


async def test_cancelled_batch_keeps_its_results(harness: BatchHarness) -> None:
    batch = await harness.create(lines(5))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run = BatchRun(batch, harness.services(slots=MemoryBudget(1)))

    async def cancel_at_third(request: LineRequest) -> None:
        if request.request_id.endswith("_3"):
            run.end("cancelled")
            await asyncio.Event().wait()

    harness.endpoint.before = cancel_at_third
    await run.run()
    found = await read(harness.store).batches.get("", batch.id)
    assert (found.status, found.completed, found.failed) == ("cancelled", 2, 3)
    assert ids(await harness.read_file(found.output_file)) == ["r1", "r2"]
    errors = await harness.read_file(found.error_file)
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [
        (f"r{number}", "batch_cancelled") for number in (3, 4, 5)
    ]
    assert len(await harness.usage()) == 2


async def test_batch_expires_at_the_end_of_its_window(harness: BatchHarness) -> None:
    batch = await harness.create(lines(2), deadline=100)
    done = await harness.run(batch, clock=lambda: 200.0)
    assert (done.status, done.failed, harness.endpoint.runs) == ("expired", 2, {})
    assert await harness.read_file(done.error_file) == [
        {
            "id": f"batch_req_1_{number}",
            "custom_id": f"r{number}",
            "response": None,
            "error": {
                "code": "batch_expired",
                "message": "This request could not be executed before the completion window expired.",
            },
        }
        for number in (1, 2)
    ]


async def test_batch_of_a_revoked_key_is_stopped(harness: BatchHarness) -> None:
    harness.callers["key_1"] = None
    done = await harness.run(await harness.create(lines(3), key="key_1"))
    assert (done.status, done.completed) == ("cancelled", 0)
    assert json.loads(done.errors or "")[0]["code"] == "invalid_api_key"
    assert harness.endpoint.runs == {}


async def test_stopped_run_leaves_the_rest_to_another_process(harness: BatchHarness) -> None:
    batch = await harness.create(lines(6))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run = BatchRun(batch, harness.services(slots=MemoryBudget(1)))

    async def stop_at_third(request: LineRequest) -> None:
        if request.request_id.endswith("_3") and harness.endpoint.runs[request.request_id] == 1:
            run.end("stopped")
            await asyncio.Event().wait()

    harness.endpoint.before = stop_at_third
    await run.run()
    found = await read(harness.store).batches.get("", batch.id)
    assert (found.status, found.completed) == ("in_progress", 2)  # what was done is stored
    done = await harness.run(batch, "two")
    assert (done.status, done.completed) == ("completed", 6)
    assert [harness.endpoint.runs[f"batch_req_1_{number}"] for number in range(1, 7)] == [1, 1, 2, 1, 1, 1]


async def test_bodies_of_running_lines_are_bounded(harness: BatchHarness) -> None:
    running = highest = 0

    async def count(request: LineRequest) -> None:
        nonlocal running, highest
        running += len(request.body)
        highest = max(highest, running)
        await asyncio.sleep(0.001)
        running -= len(request.body)

    harness.endpoint.before = count
    content = [line(str(number), body={"user": "x" * 500}) for number in range(12)]
    done = await harness.run(await harness.create(content), memory=MemoryBudget(2000))
    assert (done.completed, running) == (12, 0)
    assert highest <= 2000


async def test_cancelled_run_frees_its_slots_and_memory(harness: BatchHarness) -> None:
    slots, memory = MemoryBudget(2), MemoryBudget(1000)
    batch = await harness.create(lines(9))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run = BatchRun(batch, harness.services(slots=slots, memory=memory))

    async def cancel(request: LineRequest) -> None:
        run.end("cancelled")
        await asyncio.Event().wait()

    harness.endpoint.before = cancel
    await run.run()
    harness.endpoint.before = None
    done = await harness.run(await harness.create(lines(9)), slots=slots, memory=memory)
    assert done.completed == 9
    assert not slots._held
    assert not memory._held


async def test_run_that_waits_for_the_database_ends_when_the_server_stops(
    harness: BatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "RETRY_SECONDS", 0.0)
    batch = await harness.create(lines(2))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run = BatchRun(batch, harness.services())
    away = asyncio.Event()

    async def fail(results: list[Any]) -> None:
        away.set()
        raise StoreUnavailable("away")

    run._store_results = fail  # type: ignore[method-assign]
    task = asyncio.create_task(run.run())
    await away.wait()
    assert not task.done()
    run.end("stopped")
    await asyncio.wait_for(task, 60)
    done = await harness.run(batch, "two")
    assert (done.status, done.completed, len(await harness.usage())) == ("completed", 2, 2)


async def test_full_disk_delays_the_output_files(harness: BatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = await harness.create([*lines(3), "{"])

    def fail(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(storage_module.os, "write", fail)
        full = await harness.run(batch)
    assert (full.status, full.completed, full.output_file) == ("finalizing", 3, None)
    assert await read(harness.store).files.page("", purpose="batch_output") == ([], False)
    done = await harness.run(batch, "two")
    assert (done.status, len(await harness.read_file(done.output_file))) == ("completed", 3)
    assert len(await harness.read_file(done.error_file)) == 1
    assert set(harness.endpoint.runs.values()) == {1}


async def test_input_that_disappears_ends_the_batch_with_its_results(harness: BatchHarness) -> None:
    batch = await harness.create(lines(3))
    await write(harness.store).batches.change("", batch.id, ("validating",), "in_progress", 0, {"total": 3})
    await harness.files.remove(batch.input_file)
    done = await harness.run(batch)
    assert (done.status, harness.endpoint.runs) == ("cancelled", {})
    assert json.loads(done.errors or "")[0]["code"] == "file_not_found"


async def test_internal_error_ends_the_batch_with_its_results(harness: BatchHarness) -> None:
    def answer(request: LineRequest) -> tuple[int, None]:
        if request.request_id.endswith("_6"):
            raise RuntimeError("unexpected")
        return 200, None

    harness.endpoint.answer = answer
    done = await harness.run(await harness.create(lines(8)), slots=MemoryBudget(1))  # one line after the other
    output = ids(await harness.read_file(done.output_file))
    assert output[:5] == [f"r{number}" for number in range(1, 6)]
    assert "r6" not in output
    assert (done.status, done.completed) == ("cancelled", len(output))
    assert json.loads(done.errors or "")[0]["code"] == "server_error"
    assert len(await harness.usage()) == len(output)


@pytest.mark.parametrize("interrupted_by", ["cancellation", "timeout"])
async def test_output_files_stay_if_their_transaction_is_committed_after_the_run_was_interrupted(
    harness: BatchHarness, interrupted_by: str
) -> None:
    batch = await harness.create(lines(3))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run = BatchRun(batch, harness.services())
    change, committed = run._change, asyncio.Event()

    async def commit(*arguments: Any, **named: Any) -> None:
        await change(*arguments, **named)
        if "completed" in arguments:
            committed.set()
            if interrupted_by == "timeout":
                raise StoreOutcomeUnknown("no answer")
            await asyncio.Event().wait()

    run._change = commit  # type: ignore[method-assign]
    task = asyncio.create_task(run.run())
    await asyncio.wait_for(committed.wait(), 60)
    if interrupted_by == "cancellation":
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    found = await read(harness.store).batches.get("", batch.id)
    assert found.status == "completed"
    assert len(await harness.read_file(found.output_file)) == 3


@pytest.mark.parametrize("error", [LeaseLost(), StoreUnavailable("the disk is full")], ids=["lease", "refused"])
async def test_output_files_are_removed_if_their_transaction_fails(
    harness: BatchHarness, tmp_path: Path, error: Exception
) -> None:
    batch = await harness.create(lines(3))
    await write(harness.store).batches.take(batch.id, "one", 1000.0)
    run = BatchRun(batch, harness.services())
    change = run._change

    async def fail(*arguments: Any, **named: Any) -> None:
        if "completed" in arguments:
            raise error
        await change(*arguments, **named)

    run._change = fail  # type: ignore[method-assign]
    await run.run()
    assert [path.name for path in (tmp_path / "files").rglob("*") if path.is_file()] == [batch.input_file]


@pytest.mark.parametrize(("owner", "name"), [(storage_module.FileStorage, "open"), (lines_module._LineReader, "_read")])
@pytest.mark.parametrize(
    ("status", "end"), [("validating", "completed"), ("in_progress", "completed"), ("cancelling", "cancelled")]
)
async def test_input_that_cannot_be_read_now_interrupts_the_batch(
    harness: BatchHarness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    status: str,
    end: str,
) -> None:
    batch = await harness.create(lines(3))
    if status != "validating":
        await write(harness.store).batches.change("", batch.id, ("validating",), status, 0, {"total": 3})

    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        interrupted = await harness.run(batch)
    assert (interrupted.status, interrupted.errors) == (status, None)
    assert [path.name for path in (tmp_path / "files").rglob("*") if path.is_file()] == [batch.input_file]
    done = await harness.run(batch, "two")
    assert (done.status, done.completed + done.failed) == (end, 3)


async def test_answers_before_a_read_error_are_kept(harness: BatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = await harness.create(lines(4))
    answered = threading.Semaphore(0)
    read_next = lines_module._LineReader._read

    def usage_of(accounting: Any, id: str) -> Any:
        answered.release()
        return harness._usage(accounting, id)

    def fail_after_two_lines(reader: Any) -> Any:
        if reader._number:
            for _ in range(2):
                assert answered.acquire(timeout=60)
            raise OSError(errno.EIO, "Input/output error")
        return read_next(reader)

    await write(harness.store).batches.change("", batch.id, ("validating",), "in_progress", 0, {"total": 4})
    with monkeypatch.context() as patched:
        patched.setattr(lines_module, "_READ_LINES", 2)
        patched.setattr(lines_module._LineReader, "_read", fail_after_two_lines)
        interrupted = await harness.run(batch, usage_of=usage_of)
    assert (interrupted.status, interrupted.completed) == ("in_progress", 2)
    done = await harness.run(batch, "two")
    assert (done.status, done.completed) == ("completed", 4)
    assert set(harness.endpoint.runs.values()) == {1}


@pytest.mark.parametrize(("status", "end"), [("validating", "failed"), ("in_progress", "expired")])
async def test_input_that_stays_unreadable_ends_the_batch_at_its_deadline(
    harness: BatchHarness, tmp_path: Path, status: str, end: str
) -> None:
    batch = await harness.create(lines(3), deadline=100)
    if status == "in_progress":
        await write(harness.store).batches.change("", batch.id, ("validating",), status, 0, {"total": 3})
        result = BatchResult(line=1, failed=False, body='{"custom_id": "r1"}')
        await write(harness.store).batches.add_results("", batch.id, [result])
    (path,) = (each for each in (tmp_path / "files").rglob("*") if each.is_file())
    path.unlink()
    path.mkdir()  # opening it fails, for root too
    before = await harness.run(batch, clock=lambda: 99.0)
    assert (before.status, before.errors) == (status, None)
    after = await harness.run(batch, "two", clock=lambda: 101.0)
    assert after.status == end
    if end == "failed":
        assert json.loads(after.errors or "")[0]["code"] == "file_unreadable"
    else:
        assert ids(await harness.read_file(after.output_file)) == ["r1"]
