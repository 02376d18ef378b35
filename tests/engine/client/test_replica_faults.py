"""Replicas that are taken away while streams run, with real processes: every stream is complete."""

from __future__ import annotations

import asyncio
import functools
import os
import signal

import pytest

from syringa.config import Config, ModelSpec, Replicas
from syringa.engine.client import model_replicas
from syringa.engine.client.model_engine import ModelEngine
from syringa.engine.client.silence import SilenceMonitor
from syringa.engine.client.worker_client import WorkerClient
from tests.engine.processes.supervisor_harness import SupervisorHarness, answer, run_supervisor, until

CONFIG = Config(load_timeout=300.0)
MODELS = [ModelSpec(id="fine", path="fine", preload=True, idle_seconds=0.0, replicas=Replicas(min=3, max=3))]
TOKENS = 500  # which take the stub seconds


def processes(server: SupervisorHarness) -> dict[str, int]:
    """Return the process ids of the ready replicas, by the id of the replica."""
    workers = [each for model in server.supervisor.workers.models for each in model.replicas]
    return {each.id: process.pid for each in workers if each.phase == "ready" and (process := each.process) is not None}


async def ready(server: SupervisorHarness, count: int = 3) -> dict[str, int]:
    """Wait until so many replicas are ready and connected, and return their process ids."""
    await until(lambda: [each.status for each in server.engines.replicas("fine")].count("ready") >= count)
    engine = server.engines.engine("fine")
    assert isinstance(engine, ModelEngine)
    await until(lambda: len(engine.replicas.usable) >= count)
    return processes(server)


class Streams:
    """Streams of different requests, whose outputs are known."""

    def __init__(self, server: SupervisorHarness, count: int) -> None:
        engine = server.engines.engine("fine")
        assert isinstance(engine, ModelEngine)
        self._engine = engine
        self.prompts = [[number] * TOKENS for number in range(1, count + 1)]
        self.begun = [asyncio.Event() for _ in self.prompts]
        self.tasks = [
            asyncio.create_task(answer(engine, str(number), TOKENS, begun, prompt))
            for number, (begun, prompt) in enumerate(zip(self.begun, self.prompts, strict=True))
        ]

    async def begin(self) -> None:
        """Wait until a stream has begun on every replica."""
        for each in self.begun[:3]:  # the router has given one to each
            await each.wait()

    def replica(self) -> str:
        """Return the replica that runs the first stream."""
        replica = self._engine._runs["0"].replica
        assert replica is not None
        return replica.state.id

    async def check(self) -> None:
        async with asyncio.timeout(240):
            assert await asyncio.gather(*self.tasks) == self.prompts


async def test_streams_go_on_when_one_replica_is_killed_and_another_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = functools.partial(SilenceMonitor, limit=600.0)  # a replica that is only slow keeps its streams
    monkeypatch.setattr(model_replicas, "WorkerClient", functools.partial(WorkerClient, monitor=monitor))
    async with run_supervisor(monkeypatch, MODELS, CONFIG) as server:
        moves: list[tuple[str, str, bool]] = []
        server.engines.on_move = lambda *move: moves.append(move)
        killed, drained, left = (await ready(server)).items()
        with server.hold():
            streams = Streams(server, 12)
            await streams.begin()
            os.kill(killed[1], signal.SIGKILL)
            server.engines.drain(drained[0], 0.0)
            await until(lambda: {"crash", "drain"} <= {reason for _, reason, _ in moves})
        await streams.check()
        after = await ready(server)
        assert left[0] in after
        assert not {killed[0], drained[0]} & set(after)
        assert server.engines.worker_counts("fine").crashes == 1


@pytest.mark.slow
async def test_streams_of_stopped_replica_go_on_elsewhere_and_it_is_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config(load_timeout=300.0, heartbeat_timeout=0.0, step_timeout=0.0)  # the supervisor does not kill it
    async with run_supervisor(monkeypatch, MODELS, config) as server:
        moves: list[str] = []
        server.engines.on_move = lambda model, reason, same: moves.append(reason)
        found = await ready(server)
        with server.hold():
            streams = Streams(server, 6)
            await streams.begin()
            stopped = found[streams.replica()]
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: "silence" in moves)
        await streams.check()
        os.kill(stopped, signal.SIGCONT)
        again = Streams(server, 9)
        await again.begin()
        await again.check()
        assert stopped in processes(server).values()


async def test_drain_of_the_only_replica_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [ModelSpec(id="fine", path="fine", preload=True, idle_seconds=0.0)]
    async with run_supervisor(monkeypatch, models, CONFIG) as server:
        moves: list[str] = []
        server.engines.on_move = lambda model, reason, same: moves.append(reason)
        ((old, _),) = (await ready(server, 1)).items()
        with server.hold():
            streams = Streams(server, 4)
            await streams.begin()
            server.engines.drain(old, 0.0)
            await until(lambda: "drain" in moves)
        await streams.check()
        (new,) = await ready(server, 1)
        assert new != old
