"""A worker behind a bad network: streams go on, silence is noticed, and a lost connection is reported."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from syringa.engine.client.silence import SilenceMonitor
from syringa.engine.client.worker_client import WorkerClient
from syringa.errors import WorkerLost
from syringa.types import EngineDelta
from tests.cluster.certificates import Certificates
from tests.engine.client.test_silence import FakeTimers
from tests.engine.worker.proxy import Proxy
from tests.engine.worker.serving import HANG_SECONDS, EchoCore, core_of, request, tls_serving, until


class Network:
    """A client that reaches its worker through a proxy. The time by which it judges silence is the test's."""

    def __init__(self, core: EchoCore, proxy: Proxy, certificates: Certificates) -> None:
        self.core, self.proxy, self.timers = core, proxy, FakeTimers()
        self.changes: list[tuple[bool, bool, bool]] = []
        monitor = functools.partial(SilenceMonitor, clock=self.timers.clock, call_later=self.timers.call_later)
        self.client = WorkerClient(proxy.address, tls=certificates.client, on_change=self._changed, monitor=monitor)
        self.tokens: list[int] = []

    def _changed(self) -> None:
        self.changes.append((self.client.ready, self.client.silent, self.client.lost))

    async def submit(self, prompt: list[int]) -> None:
        def on_delta(delta: EngineDelta) -> bool:
            self.tokens.extend(delta.tokens)
            return False

        async with asyncio.timeout(HANG_SECONDS):
            await self.client.submit(request(prompt), on_delta)

    async def pass_time_until_silent(self) -> float:
        """Let time pass until the worker counts as silent, and return for how long it did."""
        start = self.timers.now
        async with asyncio.timeout(HANG_SECONDS):
            while not self.client.silent:
                self.timers.advance(0.25)
                await asyncio.sleep(0)
        return self.timers.now - start


@pytest.fixture
async def network(tmp_path: Path) -> AsyncIterator[Network]:
    certificates = Certificates(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        server, address = stack.enter_context(tls_serving(certificates))
        proxy = await stack.enter_async_context(Proxy(address).running())
        network = Network(core_of(server), proxy, certificates)
        network.client.start()
        await network.client.wait_ready()
        yield network
        await network.client.close()


async def test_stream_passes_a_network_that_delays_and_cuts_messages_into_pieces(network: Network) -> None:
    network.proxy.delay, network.proxy.piece = 0.0005, 37
    prompt = list(range(100))
    await network.submit(prompt)
    assert network.tokens == prompt


async def test_stalled_worker_becomes_silent_and_is_heard_again(network: Network) -> None:
    prompt = list(range(2000))
    network.proxy.delay, network.proxy.piece = 0.001, 64
    stream = asyncio.create_task(network.submit(prompt))
    await until(lambda: network.tokens)
    network.changes.clear()
    network.proxy.stall()
    assert await network.pass_time_until_silent() >= 2.0
    assert network.changes == [(True, True, False)]
    assert not stream.done()
    network.timers.advance(3.0)
    network.proxy.delay = 0.0
    network.proxy.resume()
    await until(lambda: not network.client.silent)
    await stream
    assert network.changes == [(True, True, False), (True, False, False)]
    assert network.tokens == prompt  # nothing is lost, nothing comes twice


async def test_worker_that_has_nothing_to_send_is_heard_by_its_heartbeats(network: Network) -> None:
    """Four silent intervals pass without silence, as long as one heartbeat arrives in each."""
    for _ in range(4):
        network.timers.advance(1.4)
        await until(lambda: network.client._silence._heard_at == network.timers.now)
    assert network.changes == [(True, False, False)]


async def test_cut_connection_raises_worker_lost(network: Network) -> None:
    with network.core.hold():
        stream = asyncio.create_task(network.submit([1, 2, 3]))
        await until(network.core.stepping.is_set)
        network.proxy.cut()
        with pytest.raises(WorkerLost):
            await stream
    assert network.client.lost
    assert network.changes[-1] == (False, False, True)
    await until(lambda: network.core.disconnected)


async def test_lost_data_breaks_the_connection_instead_of_the_stream(network: Network) -> None:
    """TLS notices that bytes are missing, so no wrong token is ever delivered."""
    prompt = list(range(500))
    network.proxy.piece = 64
    with network.core.hold():
        stream = asyncio.create_task(network.submit(prompt))
        await until(network.core.stepping.is_set)
        network.proxy.drop_pieces = 1
    with pytest.raises(WorkerLost):
        await stream
    assert network.tokens == prompt[: len(network.tokens)]
    assert network.client.error


async def test_silence_ends_with_the_connection(network: Network) -> None:
    network.proxy.stall()
    await network.pass_time_until_silent()
    network.proxy.cut()
    await until(lambda: network.client.lost)
    assert not network.client.silent
    assert network.timers.pending == 0
