"""Requests for embeddings: what the client sends and receives, and how they move between replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from syringa.engine.client.model_engine import MAX_RETRIES, ModelEngine
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.processes.control import ClearSuspect
from syringa.engine.processes.suspects import REFUSED, embedding_fingerprint
from syringa.errors import (
    OUT_OF_MEMORY_CODE,
    EngineOverdue,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
    RequestSuspected,
)
from syringa.types import EmbeddingRequest, EmbeddingResult
from tests.engine.client.engine_harness import EngineHarness, ScriptedWorker, replica, state, workers
from tests.engine.processes.supervisor_harness import until

REQUEST = EmbeddingRequest(id="e", inputs=[[1, 2], [3]], tenant="t", background=True)
RESULT = EmbeddingResult("e", 1, b"\0\0\x80?")


def embeds(worker: ScriptedWorker) -> None:
    worker.send_embedding()


def crash(engine: ModelEngine, suspects: dict[bytes, int]) -> Callable[[ScriptedWorker], None]:
    """Return a handler of a request that ends the worker, as the supervisor reports it."""

    def handle(worker: ScriptedWorker) -> None:
        worker.die()
        engine.suspects = suspects
        engine.update(state("loading"))

    return handle


async def test_client_sends_a_request_and_returns_its_result() -> None:
    async with workers(1) as (worker,):
        worker.on_request = embeds
        client = WorkerClient(f"unix:{worker.path}")
        client.start()
        await client.wait_ready()
        assert await client.embed(REQUEST) == RESULT
        (sent,) = worker.embeddings
        assert (sent.inputs, sent.tenant, sent.background) == ([[1, 2], [3]], "t", True)
        await client.close()


async def test_canceled_request_is_aborted() -> None:
    async with workers(1) as (worker,):
        client = WorkerClient(f"unix:{worker.path}")
        client.start()
        await client.wait_ready()
        task = asyncio.create_task(client.embed(REQUEST))
        await until(lambda: worker.embeddings)
        with pytest.raises(InvalidRequest, match="running already"):
            await client.embed(REQUEST)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await until(lambda: worker.aborted == [(worker.embeddings[0].id, None)])
        await client.close()


async def test_request_fails_when_the_worker_refuses_it_or_ends() -> None:
    async with workers(1) as (worker,):
        worker.on_request = lambda own: own.refuse("full")
        client = WorkerClient(f"unix:{worker.path}", on_change=lambda: None)
        with pytest.raises(EngineUnavailable):
            await client.embed(REQUEST)
        client.start()
        await client.wait_ready()
        with pytest.raises(EngineOverloaded, match="full"):
            await client.embed(REQUEST)
        worker.on_request = lambda own: own.die()
        with pytest.raises(EngineUnavailable):
            await client.embed(REQUEST)
        await client.close()


async def test_request_begins_again_at_another_replica_when_one_is_lost(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = asyncio.create_task(engine.embed(REQUEST))
        await until(lambda: any(worker.embeddings for worker in made))
        made.sort(key=lambda worker: not worker.embeddings)
        first, second = made
        second.on_request = embeds
        first.die()
        engine.update(state("loaded", replica(second)))
        assert await task == RESULT
        assert [each.inputs for each in second.embeddings] == [REQUEST.inputs]
        assert not second.embeddings[0].isolated
    assert harness.moves == [("crash", False)]


@pytest.mark.parametrize("refusal", [{"overdue": 60.0}, {"code": OUT_OF_MEMORY_CODE}])
async def test_moved_request_that_is_refused_for_good_is_not_sent_again(
    harness: EngineHarness, engine: ModelEngine, refusal: dict[str, Any]
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = asyncio.create_task(engine.embed(REQUEST))
        await until(lambda: any(worker.embeddings for worker in made))
        made.sort(key=lambda worker: not worker.embeddings)
        first, second = made
        second.on_request = lambda worker: worker.refuse("late", **refusal)
        engine.update(state("loaded", replica(first, "draining", grace=0.0), replica(second)))
        with pytest.raises(EngineOverloaded) as caught:
            await task
        assert isinstance(caught.value, EngineOverdue) is ("overdue" in refusal)
        assert len(second.embeddings) == 1
        assert second.embeddings[0].waited > 0.0


async def test_request_leaves_silent_replica_that_has_ended_though_it_has_moved_before(
    harness: EngineHarness, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = asyncio.create_task(engine.embed(REQUEST))
        await until(lambda: any(worker.embeddings for worker in made))
        made.sort(key=lambda worker: not worker.embeddings)
        first, second = made
        second.on_request = embeds
        (run,) = engine._embedding_runs.values()
        run.moves = 1
        path = first.path
        silent = property(lambda client: str(client.address) == f"unix:{path}")
        monkeypatch.setattr("syringa.engine.client.worker_client.WorkerClient.silent", silent)
        engine.update(state("loaded", replica(second)))
        assert await task == RESULT


async def test_request_of_a_crash_is_isolated_and_cleared_when_it_is_answered(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    known = embedding_fingerprint(REQUEST)
    async with workers(2) as (first, second):
        first.on_request, second.on_request = crash(engine, {known: 1}), embeds
        engine.update(state("loaded", replica(first)))
        task = asyncio.create_task(engine.embed(REQUEST))
        await until(lambda: engine.status == "loading")
        engine.update(state("loaded", replica(second)))
        assert await task == RESULT
        assert second.embeddings[0].isolated
        assert second.embeddings[0].fingerprint == known
    assert any(isinstance(each, ClearSuspect) and each.fingerprint == known for each in harness.sent)


@pytest.mark.parametrize("level", [2, REFUSED])
async def test_request_that_was_in_two_crashes_is_refused(engine: ModelEngine, level: int) -> None:
    async with workers(1) as (worker,):
        worker.on_request = crash(engine, {embedding_fingerprint(REQUEST): level})
        engine.update(state("loaded", replica(worker)))
        with pytest.raises(RequestSuspected):
            await engine.embed(REQUEST)


async def test_request_is_retried_a_limited_number_of_times(engine: ModelEngine) -> None:
    async with workers(MAX_RETRIES + 1) as made:
        task = asyncio.create_task(engine.embed(REQUEST))
        for worker in made:
            engine.update(state("loaded", replica(worker)))
            await until(lambda worker=worker: worker.embeddings)
            crash(engine, {})(worker)
        with pytest.raises(EngineUnavailable):
            await task


async def test_draining_replica_finishes_its_request_within_the_grace_period(
    harness: EngineHarness, engine: ModelEngine
) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = asyncio.create_task(engine.embed(REQUEST))
        await until(lambda: any(worker.embeddings for worker in made))
        made.sort(key=lambda worker: not worker.embeddings)
        first, second = made
        engine.update(state("loaded", replica(first, "draining", grace=1000.0), replica(second)))
        first.send_embedding()
        assert await task == RESULT
        assert not second.embeddings
    assert harness.moves == []


async def test_request_moves_when_the_grace_period_has_ended(harness: EngineHarness, engine: ModelEngine) -> None:
    async with workers(2) as made:
        await harness.ready(*made)
        task = asyncio.create_task(engine.embed(REQUEST))
        await until(lambda: any(worker.embeddings for worker in made))
        made.sort(key=lambda worker: not worker.embeddings)
        first, second = made
        second.on_request = embeds
        engine.update(state("loaded", replica(first, "draining", grace=0.0), replica(second)))
        assert await task == RESULT
        await until(lambda: first.aborted)
    assert harness.moves == [("drain", False)]


def test_fingerprint_depends_on_tenant_and_content_only() -> None:
    same = EmbeddingRequest(id="x", inputs=[[1, 2], [3]], tenant="t", background=True, priority=3, isolated=True)
    assert embedding_fingerprint(same) == embedding_fingerprint(REQUEST)
    assert embedding_fingerprint(EmbeddingRequest(id="e", inputs=[[1, 2], [3]])) != embedding_fingerprint(REQUEST)
