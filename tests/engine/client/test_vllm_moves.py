"""The engine of a model on vLLM, which cannot continue every request at another replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from syringa.engine.client.model_engine import ModelEngine
from syringa.errors import EngineUnavailable
from syringa.types import EngineDelta, ResumedChoice
from tests.engine.client.engine_harness import EngineHarness, ScriptedWorker, answers, replica, state, workers
from tests.engine.processes.supervisor_harness import request, until


@pytest.fixture
def harness() -> EngineHarness:
    return EngineHarness(engine="vllm")


@pytest.fixture
async def engine(harness: EngineHarness) -> AsyncIterator[ModelEngine]:
    yield harness.engine
    await harness.engine.close()


async def begin(
    engine: ModelEngine, made: list[ScriptedWorker], *tokens: int, **sampling: Any
) -> asyncio.Task[list[int]]:
    """Begin a request on one of the workers, which becomes the first in the list, and let it send tokens."""
    given = request("r")
    given = msgspec.structs.replace(given, sampling=msgspec.structs.replace(given.sampling, **sampling))
    got: list[int] = []

    def take(delta: EngineDelta) -> bool:
        got.extend(delta.tokens)
        return delta.finish is not None

    async def run() -> list[int]:
        await engine.submit(given, take)
        return got

    task = asyncio.create_task(run())
    await until(lambda: any(worker.requests for worker in made))
    made.sort(key=lambda worker: not worker.requests)
    if tokens:
        made[0].send(*tokens)
        await until(lambda: got == list(tokens))
    return task


async def test_request_without_such_fields_moves(harness: EngineHarness, engine: ModelEngine) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7)
        old, new = made
        new.on_request = answers(8)
        engine.update(state("loaded", replica(old, "draining", grace=60.0), replica(new)))
        assert await task == [7, 8]
        assert new.requests[0].resumed == (ResumedChoice([7]),)


async def test_request_that_cannot_be_continued_finishes_at_its_drained_replica(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7, seeded=True)
        old, new = made
        engine.update(state("loaded", replica(old, "draining", grace=60.0), replica(new)))
        old.send(8, finish=True)
        assert await task == [7, 8]
        assert not new.requests


async def test_request_that_cannot_be_continued_ends_with_the_grace_period(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7, frequency_penalty=0.5)
        old, new = made
        engine.update(state("loaded", replica(old, "draining", grace=0.01), replica(new)))
        with pytest.raises(EngineUnavailable, match="cannot continue a request with `frequency_penalty`"):
            await task
        await until(lambda: old.aborted)
        assert not new.requests


async def test_request_that_cannot_be_continued_ends_at_a_crash_without_waiting_for_another_replica(
    engine: ModelEngine,
) -> None:
    async with workers(1) as made:
        engine.update(state("loaded", replica(made[0])))
        task = await begin(engine, made, 7, seeded=True)
        made[0].die()
        engine.update(state("loading"))
        with pytest.raises(EngineUnavailable, match="`seed`"):
            await task


async def test_request_that_has_no_token_yet_begins_anew(harness: EngineHarness, engine: ModelEngine) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, seeded=True)
        old, new = made
        new.on_request = answers(8)
        engine.update(state("loaded", replica(old, "draining", grace=60.0), replica(new)))
        assert await task == [8]


async def test_request_that_cannot_be_continued_waits_for_a_silent_replica(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    """It goes on when the replica responds again, and ends when the supervisor has given that up."""
    async with workers(2) as made:
        await harness.ready(*made)
        task = await begin(engine, made, 7, seeded=True)
        old, new = made
        engine.update(state("loaded", replica(old, "hanging"), replica(new)))
        old.send(8)
        await until(lambda: engine._runs["r"].progress.next_request().resumed == (ResumedChoice([7, 8]),))
        engine.update(state("loaded", replica(new)))
        with pytest.raises(EngineUnavailable, match="`seed`"):
            await task
        assert not new.requests
