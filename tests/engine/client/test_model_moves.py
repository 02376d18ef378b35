"""The engine of a model with several replicas: where requests run, and how they move."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from syringa.engine.client.model_engine import MAX_RETRIES, ModelEngine
from syringa.engine.processes.control import AcquireModel
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import EngineOverdue, EngineOverloaded
from syringa.types import EngineDelta, EngineStats, ResumedChoice
from tests.engine.client.engine_harness import EngineHarness, ScriptedWorker, answers, begin, replica, state, workers
from tests.engine.processes.stub_worker import INFO
from tests.engine.processes.supervisor_harness import answer, request, until


async def test_request_of_drained_replica_moves_at_once_and_is_aborted_there(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7)
        old, new = made
        new.on_request = answers(8)
        engine.update(state("loaded", replica(old, "draining", grace=60.0), replica(new)))
        assert await task == [7, 8]
        await until(lambda: old.aborted)
        assert old.aborted == [(old.requests[0].id, None)]
        assert new.requests[0].resumed == (ResumedChoice([7]),)
    assert harness.moves == [("drain", True)]


async def test_request_moves_at_any_number_of_drains(harness: EngineHarness, engine: ModelEngine) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 0)
        for number in range(1, 2 * MAX_RETRIES):
            old, new = made
            seen = len(new.requests)
            engine.update(state("loaded", replica(old, "draining", grace=0.0), replica(new)))
            await until(lambda new=new, seen=seen: len(new.requests) > seen)
            new.send(number)
            await until(lambda number=number: engine._runs["r"].progress.next_request().resumed[0].tokens[-1] == number)
            await harness.ready(old, new)
            made.reverse()
        made[0].send(99, finish=True)
        assert await task == [*range(2 * MAX_RETRIES), 99]
    assert {reason for reason, _ in harness.moves} == {"drain"}


async def test_drained_only_replica_keeps_its_requests_until_another_is_ready(engine: ModelEngine) -> None:
    async with workers(2) as (old, new):
        engine.update(state("loaded", replica(old)))
        task = await begin(engine, [old], 7)
        engine.update(state("loading", replica(old, "draining", grace=60.0)))
        await asyncio.sleep(0)
        old.send(8)
        await until(lambda: engine._runs["r"].progress.next_request().resumed[0].tokens == [7, 8])
        new.on_request = answers(9)
        engine.update(state("loaded", replica(old, "draining", grace=60.0), replica(new)))
        assert await task == [7, 8, 9]


async def test_request_leaves_drained_replica_when_the_grace_ends(engine: ModelEngine) -> None:
    async with workers(2) as (old, new):
        engine.update(state("loaded", replica(old)))
        task = await begin(engine, [old], 7)
        engine.update(state("loading", replica(old, "draining", grace=0.01)))
        await until(lambda: old.aborted)
        assert not task.done()
        new.on_request = answers(8)
        engine.update(state("loaded", replica(new)))
        assert await task == [7, 8]


async def test_request_of_silent_replica_moves_once(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has moved may be the cause: the second time it waits for the supervisor."""
    silent: set[str] = set()
    property_ = property(lambda client: str(client.address).removeprefix("unix:") in silent)
    monkeypatch.setattr("syringa.engine.client.worker_client.WorkerClient.silent", property_)
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7)
        old, new = made
        silent.add(old.path)
        engine.replicas.notify()
        await until(lambda: new.requests)
        assert new.requests[0].isolation == "none"  # it may have waited in a queue
        new.send(8)
        await until(lambda: engine._runs["r"].progress.next_request().resumed[0].tokens == [7, 8])
        silent.clear()
        silent.add(new.path)
        engine.replicas.notify()
        await asyncio.sleep(0.01)
        assert len(old.requests) == 1
        new.send(9, finish=True)
        assert await task == [7, 8, 9]
    assert harness.moves == [("silence", True)]


async def test_request_waits_on_silent_replica_without_another(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(1) as (worker,):
        engine.update(state("loaded", replica(worker)))
        task = await begin(engine, [worker], 7)
        monkeypatch.setattr("syringa.engine.client.worker_client.WorkerClient.silent", property(lambda client: True))
        engine.replicas.notify()
        assert not engine.ready
        worker.send(8, finish=True)
        assert await task == [7, 8]


async def test_begun_request_prefers_replica_with_equal_outputs(harness: EngineHarness, engine: ModelEngine) -> None:
    async with workers(3) as (first, other, equal):
        engine.update(state("loaded", replica(first, fingerprint="f")))
        task = await begin(engine, [first], 7)
        draining = replica(first, "draining", grace=60.0, fingerprint="f")
        other.on_request = equal.on_request = answers(8)
        # Both become usable before the request looks for one.
        engine.update(state("loaded", replica(first), replica(other, fingerprint="g"), replica(equal, fingerprint="f")))
        await until(lambda: engine.replicas.usable.keys() == set(engine.replicas.ids))
        engine.update(state("loaded", draining, replica(other, fingerprint="g"), replica(equal, fingerprint="f")))
        assert await task == [7, 8]
        assert equal.requests
        assert not other.requests
    assert harness.moves == [("drain", True)]


async def test_move_to_replica_with_another_fingerprint_is_counted_apart(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as (first, other):
        engine.update(state("loaded", replica(first, fingerprint="f")))
        task = await begin(engine, [first], 7)
        other.on_request = answers(8)
        draining = replica(first, "draining", grace=60.0, fingerprint="f")
        engine.update(state("loaded", draining, replica(other, fingerprint="g")))
        assert await task == [7, 8]
    assert harness.moves == [("drain", False)]


async def test_aborted_choice_is_not_resumed(harness: EngineHarness, engine: ModelEngine) -> None:
    received: list[EngineDelta] = []

    def take(delta: EngineDelta) -> bool:
        received.append(delta)
        return len(received) == 4

    async with workers(2) as made:
        await harness.ready(*made)
        two = msgspec.structs.replace(request("r"), choices=3)
        task = asyncio.create_task(engine.submit(two, take))
        await until(lambda: any(worker.requests for worker in made))
        made.sort(key=lambda worker: not worker.requests)
        old, new = made
        old.send(7, choice=0)
        old.send(8, choice=1, finish=True)
        await until(lambda: len(received) == 2)
        engine.abort("r", 2)
        await until(lambda: old.aborted)
        engine.update(state("loaded", replica(old, "draining", grace=60.0), replica(new)))
        await until(lambda: new.requests)
        expected = (ResumedChoice([7]), ResumedChoice([8], finished=True), ResumedChoice([], finished=True))
        assert new.requests[0].resumed == expected
        new.send(9, choice=0)
        new.send(10, choice=0, finish=True)
        await task
    assert [delta.tokens for delta in received] == [[7], [8], [9], [10]]


async def test_requests_that_share_a_prefix_go_to_one_replica(harness: EngineHarness, engine: ModelEngine) -> None:
    async with workers(3) as made:
        await harness.ready(*made)
        for worker in made:
            worker.on_request = answers(7)
        prompt = list(range(200))
        for number in range(6):
            assert await answer(engine, str(number), prompt=[*prompt, 500 + number]) == [7]
        assert sorted(len(worker.requests) for worker in made) == [0, 0, 6]
        assert harness.routes == [False, True, True, True, True, True]  # whether the prefix was known


async def test_concurrent_requests_are_spread(harness: EngineHarness, engine: ModelEngine) -> None:
    async with workers(3) as made:
        await harness.ready(*made)
        tasks = [asyncio.create_task(answer(engine, str(number), prompt=[number])) for number in range(9)]
        await until(lambda: sum(len(worker.requests) for worker in made) == 9)
        assert [len(worker.requests) for worker in made] == [3, 3, 3]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_connection_that_breaks_while_the_replica_lives_is_made_again(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.client.model_replicas.REPORT_SECONDS", 0.01)
    monkeypatch.setattr("syringa.engine.client.model_replicas.RECONNECT_SECONDS", 600.0)  # it is asked for once
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7)
        old, new = made
        new.on_request = answers(8)
        old.die()
        assert await task == [7, 8]
        assert [type(each) for each in harness.sent] == [AcquireModel]
        await harness.ready(*made)


async def test_request_of_replica_that_hangs_in_a_step_is_computed_alone(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7)
        old, new = made
        new.on_request = answers(8)
        engine.update(state("loaded", replica(old, "hanging"), replica(new)))
        assert await task == [7, 8]
        assert new.requests[0].isolation == "start"


async def test_lost_connection_of_an_idle_replica_is_made_again(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.client.model_replicas.RECONNECT_SECONDS", 0.01)
    async with workers(2) as made:
        await harness.ready(*made)
        made[0].die()
        await until(lambda: harness.sent)
        (sent,) = harness.sent
        assert isinstance(sent, AcquireModel)
        assert sent.opportunistic
        await harness.ready(*made)


async def test_request_moves_to_a_replica_with_a_long_enough_context(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    short = msgspec.structs.replace(INFO, max_model_len=1)
    async with workers(2) as made:
        made[0].info = short
        await harness.ready(*made)
        task = asyncio.create_task(answer(engine))
        await until(lambda: made[1].requests)
        assert not made[0].requests
        made[1].send(7, finish=True)
        assert await task == [7]


async def test_moved_request_waits_for_a_place_in_a_full_queue(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.client.model_engine.OVERLOADED_SECONDS", 0.0)
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made)
        old, new = made

        def refuse_first(worker: ScriptedWorker) -> None:
            if len(worker.requests) == 1:
                worker.refuse("The queue is full.")
            else:
                worker.send(8, finish=True)

        new.on_request = refuse_first
        engine.update(state("loaded", replica(old, "draining"), replica(new)))
        assert await task == [8]
        assert harness.moves == [("drain", True)]


async def test_moved_request_that_is_overdue_is_refused(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.client.model_engine.BALANCE_SECONDS", 0.0)
    async with workers(2) as (old, new):
        await harness.ready(old)
        tasks = [asyncio.create_task(answer(engine, f"r{number}", prompt=[number])) for number in range(3)]
        await until(lambda: len(old.requests) == 3)
        new.on_request = lambda worker: worker.refuse("late", overdue=60.0)
        await harness.ready(old, new)
        with pytest.raises(EngineOverdue, match=r"60\.0 s"):
            await tasks[0]
        assert len(new.requests) == 1
        assert new.requests[0].waited > old.requests[0].waited == 0.0
        assert harness.moves == [("balance", True)]
        for task in tasks[1:]:
            task.cancel()


async def test_moved_request_meets_full_queues_for_as_long_as_it_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.client.model_engine.OVERLOADED_SECONDS", 0.001)
    harness = EngineHarness(queue_timeout=0.05)
    engine = harness.engine
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made)
        old, new = made
        new.on_request = lambda worker: worker.refuse("The queue is full.")
        engine.update(state("loaded", replica(old, "draining"), replica(new)))
        with pytest.raises(EngineOverloaded, match="full"):
            await task
    await engine.close()


async def test_begun_request_waits_for_a_place_for_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.engine.client.model_engine.OVERLOADED_SECONDS", 0.0)
    harness = EngineHarness(queue_timeout=0.001)
    engine = harness.engine
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7)
        old, new = made

        def refuse_many(worker: ScriptedWorker) -> None:
            if len(worker.requests) < 20:
                worker.refuse("The queue is full.", overdue=1.0 if len(worker.requests) % 2 else None)
            else:
                worker.send(8, finish=True)

        new.on_request = refuse_many
        engine.update(state("loaded", replica(old, "draining"), replica(new)))
        assert await task == [7, 8]
    await engine.close()


async def test_request_leaves_silent_replica_that_has_ended_though_it_has_moved_before(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine of a frozen process keeps the connection open."""
    silent: set[str] = set()
    property_ = property(lambda client: str(client.address).removeprefix("unix:") in silent)
    monkeypatch.setattr("syringa.engine.client.worker_client.WorkerClient.silent", property_)
    async with workers(3) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7)
        first = made[0]
        silent.add(first.path)
        engine.replicas.notify()
        await until(lambda: any(each.requests for each in made[1:]))
        second, third = sorted(made[1:], key=lambda worker: not worker.requests)
        second.send(8)
        await until(lambda: engine._runs["r"].progress.next_request().resumed[0].tokens == [7, 8])
        silent.add(second.path)
        third.on_request = answers(9)
        engine.update(state("loaded", replica(third)))  # the supervisor has given up the two others
        assert await task == [7, 8, 9]
    assert harness.moves == [("silence", True)] * 2


async def test_requests_that_wait_move_to_a_replica_that_becomes_ready(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.client.model_engine.BALANCE_SECONDS", 0.0)
    async with workers(2) as (old, new):
        await harness.ready(old)
        tasks = [asyncio.create_task(answer(engine, f"r{number}", prompt=[number])) for number in range(5)]
        await until(lambda: len(old.requests) == 5)
        old.send(7)  # of the last one, which has begun and stays
        await until(lambda: engine._runs["r4"].progress.begun)
        new.on_request = answers(8)
        await harness.ready(old, new)
        await until(lambda: len(new.requests) == 2)
        assert [each.prompt for each in new.requests] == [[0], [1]]  # those that came first
        assert await tasks[0] == await tasks[1] == [8]
        await until(lambda: len(old.aborted) == 2)
        assert harness.moves == [("balance", True)] * 2
        for task in tasks[2:]:
            task.cancel()


async def test_requests_stay_if_a_replica_that_becomes_ready_has_as_much_to_do(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("syringa.engine.client.model_engine.BALANCE_SECONDS", 0.0)
    async with workers(2) as (old, new):
        await harness.ready(old)
        task = asyncio.create_task(answer(engine))
        await until(lambda: old.requests)
        await harness.ready(old, new)
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        old.send(7, finish=True)
        assert await task == [7]
        assert not new.requests


async def test_changed_number_of_replicas_is_reported_to_the_supervisor(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    acquire = AcquireModel(WorkerOptions(socket="", model="m"), min_replicas=2, max_replicas=3)
    async with workers(1) as made:
        await harness.ready(*made)
        engine.replicas.set_acquire(acquire)
        assert harness.sent == [msgspec.structs.replace(acquire, opportunistic=True)]
        engine.replicas.set_acquire(acquire)
        assert len(harness.sent) == 1


async def test_counters_include_replicas_that_have_ended(harness: EngineHarness, engine: ModelEngine) -> None:
    async with workers(2) as (old, new):
        old.stats = EngineStats(running=1, output_tokens=50)
        new.stats = EngineStats(running=2, output_tokens=7)
        await harness.ready(old, new)
        both = await engine.stats()
        assert (both.running, both.output_tokens) == (3, 57)
        engine.update(state("loaded", replica(new)))
        left = await engine.stats()
        assert (left.running, left.output_tokens) == (2, 57)
