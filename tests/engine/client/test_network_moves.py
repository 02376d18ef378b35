"""Two workers, of which one is reached over a bad network: its streams go on, or move to the other one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from syringa.engine.client import model_replicas
from syringa.engine.client.silence import SilenceMonitor
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.interface import ReplicaState
from tests.cluster.certificates import Certificates
from tests.engine.client.engine_harness import EngineHarness, state
from tests.engine.client.test_silence import FakeTimers
from tests.engine.processes.supervisor_harness import answer
from tests.engine.worker.proxy import Proxy
from tests.engine.worker.serving import HANG_SECONDS, EchoCore, core_of, tls_serving, until

TOKENS = 400
PROMPTS = [[number] * TOKENS for number in range(1, 7)]


class BadNetwork:
    """The engine of a model with a replica behind a proxy, and one that is near.

    The time by which the first one is judged to be silent is the test's; for the other one no time passes.
    """

    def __init__(self, proxy: Proxy, near: str, far_core: EchoCore, harness: EngineHarness) -> None:
        self.proxy, self.far_core, self.harness, self.engine = proxy, far_core, harness, harness.engine
        self._state = state("loaded", ReplicaState("far", "ready", proxy.address), ReplicaState("near", "ready", near))

    async def connect(self) -> None:
        self.engine.update(self._state)
        await until(lambda: self.engine.replicas.usable.keys() == set(self.engine.replicas.ids))

    def run_streams(self) -> tuple[list[asyncio.Task[list[int]]], list[asyncio.Event]]:
        """Run a stream for each prompt. Return the tasks, and an event for the first token of each."""
        begun = [asyncio.Event() for _ in PROMPTS]
        streams = [
            asyncio.create_task(answer(self.engine, str(number), TOKENS, begun[number], prompt))
            for number, prompt in enumerate(PROMPTS)
        ]
        return streams, begun

    async def check(self, streams: list[asyncio.Task[list[int]]]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            assert await asyncio.gather(*streams) == PROMPTS


@pytest.fixture
def timers() -> FakeTimers:
    return FakeTimers()


@pytest.fixture
async def network(tmp_path: Path, timers: FakeTimers, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BadNetwork]:
    certificates = Certificates(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        far, far_address = stack.enter_context(tls_serving(certificates))
        _, near_address = stack.enter_context(tls_serving(certificates))
        proxy = await stack.enter_async_context(Proxy(far_address).running())

        def make_client(address: str, **options: Any) -> WorkerClient:
            time = timers if address == proxy.address else FakeTimers()
            monitor = functools.partial(SilenceMonitor, clock=time.clock, call_later=time.call_later)
            return WorkerClient(address, monitor=monitor, **options)

        monkeypatch.setattr(model_replicas, "WorkerClient", make_client)
        monkeypatch.setattr(model_replicas, "RECONNECT_SECONDS", 0.01)
        harness = EngineHarness(tls=certificates.client)
        network = BadNetwork(proxy, near_address, core_of(far), harness)
        await network.connect()
        yield network
        await harness.engine.close()


async def test_streams_go_on_over_a_slow_network(network: BadNetwork) -> None:
    network.proxy.delay, network.proxy.piece = 0.0005, 256
    streams, _ = network.run_streams()
    await network.check(streams)
    assert len(network.far_core.requests) == len(PROMPTS) // 2
    assert network.harness.moves == []


async def test_streams_move_when_the_network_loses_all_data_and_the_replica_is_used_again(
    network: BadNetwork, timers: FakeTimers
) -> None:
    network.proxy.delay, network.proxy.piece = 0.002, 64
    streams, begun = network.run_streams()
    async with asyncio.timeout(HANG_SECONDS):
        for each in begun:
            await each.wait()
        network.proxy.blackhole = True
        while not network.harness.moves:
            timers.advance(0.25)
            await asyncio.sleep(0)
    await network.check(streams)
    assert set(network.harness.moves) == {("silence", True)}
    # What was lost is missing in the encrypted stream: the connection breaks, and is made again.
    network.proxy.blackhole, network.proxy.delay = False, 0.0
    await until(lambda: network.harness.sent)
    await network.connect()
    network.far_core.requests.clear()
    streams, _ = network.run_streams()
    await network.check(streams)
    assert network.far_core.requests
