"""The engine of a model with one replica at a time: restarts, crashes and suspects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec
import pytest

from syringa.engine.client import model_replicas, runs
from syringa.engine.client.model_engine import MAX_RETRIES, ModelEngine
from syringa.engine.processes.suspects import REFUSED, fingerprint
from syringa.errors import EngineUnavailable, InvalidRequest, RequestSuspected
from syringa.types import ResumedChoice
from tests.engine.client.engine_harness import EngineHarness, ScriptedWorker, answers, begin, replica, state, workers
from tests.engine.processes.supervisor_harness import answer, request, until


async def test_request_not_begun_by_retiring_replica_goes_to_next(engine: ModelEngine) -> None:
    async with workers(2) as (first, second):

        def retire(worker: ScriptedWorker) -> None:
            engine.update(state("cold", replica(first, "draining", grace=10.0)))
            worker.die()

        first.on_request, second.on_request = retire, answers(7)
        engine.update(state("loaded", replica(first)))
        task = asyncio.create_task(answer(engine))
        await until(lambda: engine.status == "cold")
        assert not engine.ready
        engine.update(state("cold"))
        engine.update(state("loaded", replica(second)))
        assert await task == [7]
        assert second.requests[0].resumed == ()


def crash(engine: ModelEngine, suspects: Mapping[bytes, int]) -> Callable[[ScriptedWorker], None]:
    """Return a handler of a request that ends the worker, as the supervisor reports it."""

    def handle(worker: ScriptedWorker) -> None:
        worker.die()
        engine.suspects = suspects
        engine.update(state("loading"))

    return handle


async def test_begun_request_is_resumed_by_the_next_replica_after_a_crash(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as (first, second):
        engine.update(state("loaded", replica(first, fingerprint="f")))
        task = asyncio.create_task(answer(engine))
        await until(lambda: first.requests)
        first.send(7, 8)
        run = engine._runs["r"]
        await until(lambda: run.progress.begun)
        crash(engine, {fingerprint(request("r")): 1})(first)
        second.on_request = answers(9)
        engine.update(state("loaded", replica(second, fingerprint="f")))
        assert await task == [7, 8, 9]
        (resumed,) = second.requests
        assert resumed.resumed == (ResumedChoice([7, 8]),)
        assert (resumed.isolation, resumed.fingerprint) == ("start", first.requests[0].fingerprint)
    assert harness.moves == [("crash", True)]


async def test_request_not_begun_at_a_crash_goes_to_next_replica(engine: ModelEngine) -> None:
    async with workers(2) as (first, second):
        first.on_request, second.on_request = crash(engine, {}), answers(7)
        engine.update(state("loaded", replica(first)))
        task = asyncio.create_task(answer(engine))
        await until(lambda: engine.status == "loading")
        engine.update(state("loaded", replica(second)))
        assert await task == [7]
        assert (second.requests[0].resumed, second.requests[0].isolation) == ((), "none")


async def test_request_is_retried_a_limited_number_of_times(engine: ModelEngine) -> None:
    async with workers(MAX_RETRIES + 2) as made:
        task = asyncio.create_task(answer(engine))
        for worker in made[:-1]:
            worker.on_request = crash(engine, {})
            assert not task.done()
            engine.update(state("loaded", replica(worker)))
            await until(lambda: engine.status == "loading")
        with pytest.raises(EngineUnavailable, match="ended while it was answering"):
            await task


async def test_request_in_two_crashes_is_not_moved_again(engine: ModelEngine) -> None:
    async with workers(1) as (worker,):
        worker.on_request = crash(engine, {fingerprint(request("r")): 2})
        engine.update(state("loaded", replica(worker)))
        with pytest.raises(RequestSuspected):
            await answer(engine)


async def test_request_that_is_sent_again_after_two_crashes_with_others_is_computed_alone(engine: ModelEngine) -> None:
    async with workers(1) as (worker,):
        worker.on_request = answers(7)
        engine.update(state("loaded", replica(worker)))
        engine.suspects = {fingerprint(request("r")): 2}
        assert await answer(engine) == [7]
        assert worker.requests[0].isolation == "full"


async def test_request_alone_in_two_crashes_is_refused(engine: ModelEngine) -> None:
    async with workers(1) as (worker,):
        worker.on_request = crash(engine, {fingerprint(request("r")): REFUSED})
        engine.update(state("loaded", replica(worker)))
        with pytest.raises(RequestSuspected):
            await answer(engine)


async def test_refused_request_does_not_reach_a_worker(engine: ModelEngine) -> None:
    async with workers(1) as (worker,):
        worker.on_request = answers(7)
        engine.update(state("loaded", replica(worker)))
        engine.suspects = {fingerprint(request("r")): REFUSED}
        with pytest.raises(RequestSuspected) as caught:
            await answer(engine, "another id")
        assert (caught.value.status, caught.value.code) == (500, "request_suspected")
        assert await answer(engine, prompt=[9]) == [7]
        assert len(worker.requests) == 1


async def test_lost_connection_to_a_living_worker_is_made_again(engine: ModelEngine) -> None:
    async with workers(1) as (worker,):
        worker.on_request = answers(7)
        for _ in range(2):
            engine.update(state("loaded", replica(worker)))
            assert await answer(engine) == [7]
            worker.die()
            await until(lambda: not engine.ready)


async def test_request_goes_on_as_soon_as_the_connection_to_its_worker_is_made_again(
    engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_replicas, "REPORT_SECONDS", 600.0)
    async with workers(1) as (worker,):
        engine.update(state("loaded", replica(worker, fingerprint="f")))
        task = asyncio.create_task(answer(engine))
        await until(lambda: worker.requests)
        worker.on_request = answers(9)
        worker.send(7)
        await until(lambda: engine._runs["r"].progress.begun)
        worker.die()
        await until(lambda: not engine.ready)
        engine.update(state("loaded", replica(worker, fingerprint="f")))
        assert await asyncio.wait_for(task, 60) == [7, 9]
        assert len(worker.requests) == 2


async def test_hanging_worker_gets_no_requests(engine: ModelEngine) -> None:
    async with workers(1) as (worker,):
        worker.on_request = answers(7)
        engine.update(state("loaded", replica(worker)))
        await engine.wait_ready()
        engine.update(state("hanging", replica(worker, "hanging")))
        assert not engine.ready
        with pytest.raises(EngineUnavailable):
            await engine.stats()
        task = asyncio.create_task(answer(engine))
        await asyncio.sleep(0.01)
        assert not task.done()
        engine.update(state("loaded", replica(worker)))
        assert await task == [7]


async def test_worker_that_declines_to_retire_is_used_again(engine: ModelEngine) -> None:
    async with workers(1) as (worker,):
        worker.on_request = answers(7)
        engine.update(state("loaded", replica(worker)))
        await engine.wait_ready()
        engine.update(state("cold", replica(worker, "draining", grace=10.0)))
        task = asyncio.create_task(answer(engine))
        await asyncio.sleep(0.01)
        assert not task.done()
        engine.update(state("loaded", replica(worker)))
        assert await task == [7]


async def test_close_fails_waiting_requests(engine: ModelEngine) -> None:
    task = asyncio.create_task(engine.wait_ready())
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineUnavailable, match="is being stopped"):
        await task


async def test_two_requests_with_one_id_are_refused_also_on_different_replicas(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = asyncio.create_task(answer(engine))
        await until(lambda: any(worker.requests for worker in made))
        with pytest.raises(InvalidRequest, match="running already"):
            await answer(engine)
        task.cancel()


async def test_request_waits_for_capacity_no_longer_than_the_queue_timeout() -> None:
    engine = EngineHarness(queue_timeout=0.01).engine
    engine.update(msgspec.structs.replace(state("loading"), reason="no node has 2 GPUs"))
    with pytest.raises(EngineUnavailable, match=r"started within 0\.01 seconds: no node has 2 GPUs") as error:
        await answer(engine)
    assert error.value.status == 503
    assert error.value.retry_after
    await engine.close()


async def test_wait_for_capacity_counts_in_the_queue_of_the_worker() -> None:
    """A request waits for `queue_timeout` in all, not once for a replica and once more in its queue."""
    engine = EngineHarness(queue_timeout=60.0).engine
    async with workers(1) as (worker,):
        worker.on_request = answers(7)
        engine.update(state("loading"))
        waiting = asyncio.create_task(engine.wait_ready())
        await asyncio.sleep(0.01)
        engine.update(state("loading", replica(worker, "loading")))
        await asyncio.sleep(0)
        engine.update(state("loaded", replica(worker)))
        waited = (await waiting).waited
        assert waited > 0.0
        await engine.submit(msgspec.structs.replace(request("r"), waited=waited), lambda delta: False)
        assert worker.requests[0].waited == waited
    await engine.close()


async def test_request_that_has_waited_for_capacity_waits_less_for_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "LAST_WAIT_SECONDS", 0.01)
    engine = EngineHarness(queue_timeout=600.0).engine
    engine.update(msgspec.structs.replace(state("loading"), reason="no node has 2 GPUs"))
    late = msgspec.structs.replace(request("r"), waited=599.99)
    with pytest.raises(EngineUnavailable, match="started within 600 seconds: no node has 2 GPUs"):
        await asyncio.wait_for(engine.submit(late, lambda delta: False), 60)
    await engine.close()


async def test_request_waits_for_a_replica_that_is_being_started_beyond_the_queue_timeout() -> None:
    engine = EngineHarness(queue_timeout=0.01).engine
    async with workers(1) as (worker,):
        worker.on_request = answers(7)
        engine.update(state("loading", replica(worker, "fetching")))
        task = asyncio.create_task(answer(engine))
        await asyncio.sleep(0.05)
        engine.update(state("loading", replica(worker, "loading")))
        await asyncio.sleep(0.05)
        assert not task.done()
        engine.update(state("loaded", replica(worker)))
        assert await task == [7]
        engine.update(state("loading", replica(worker, "loading")))
        task = asyncio.create_task(answer(engine))
        await asyncio.sleep(0.05)
        engine.update(state("loading"))
        with pytest.raises(EngineUnavailable, match="none was started"):
            await task
    await engine.close()


async def test_background_request_waits_for_capacity_beyond_the_queue_timeout() -> None:
    """A line of a batch whose model has no replica: its pool is closed, for example."""
    engine = EngineHarness(queue_timeout=0.01).engine
    async with workers(1) as (worker,):
        worker.on_request = answers(7)
        engine.update(state("loading"))
        loading = asyncio.create_task(engine.wait_ready(background=True))
        line = msgspec.structs.replace(request("line"), background=True)
        received: list[int] = []
        running = asyncio.create_task(engine.submit(line, lambda delta: bool(received.extend(delta.tokens))))
        with pytest.raises(EngineUnavailable, match="none was started"):  # the others waited as long
            await answer(engine)
        assert not loading.done()
        assert not running.done()
        engine.update(state("loaded", replica(worker)))
        assert (await loading).info.architecture
        await running
        assert received == [7]
    await engine.close()


async def test_request_that_has_begun_waits_for_capacity_beyond_the_queue_timeout() -> None:
    engine = EngineHarness(queue_timeout=0.01).engine
    async with workers(2) as made:
        engine.update(state("loaded", replica(made[0])))
        task = await begin(engine, made, 7)
        made[0].die()
        engine.update(state("loading"))
        with pytest.raises(EngineUnavailable, match="none was started"):
            await answer(engine, "not begun")
        await asyncio.sleep(0.05)
        assert not task.done()
        made[1].on_request = answers(8)
        engine.update(state("loaded", replica(made[1])))
        assert await task == [7, 8]
    await engine.close()
