from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from syringa.engine.client import protocol
from syringa.engine.client.worker_client import WorkerClient
from syringa.sweep import this_sweep
from syringa.types import EngineDelta, EngineRequest, Sampling, Stopping
from tests.engine.processes.stub_worker import INFO


class Worker:
    """The other end of a client: keeps what it is told, and says what a test wants."""

    def __init__(self) -> None:
        self.told: list[protocol.ToWorker] = []
        self._frames = protocol.worker_frames()
        self._more = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        writer.write(protocol.frame(protocol.Ready(INFO)))
        while data := await reader.read(1 << 16):
            self.told += self._frames.feed(data)
            self._more.set()
        writer.close()

    async def hear(self, count: int) -> list[protocol.ToWorker]:
        """The first messages, once there are as many."""
        async with asyncio.timeout(60):
            while len(self.told) < count:
                self._more.clear()
                await self._more.wait()
        return self.told

    def say(self, *deltas: EngineDelta) -> None:
        self.writer.write(protocol.frame_step(deltas))


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[WorkerClient, Worker]]:
    worker = Worker()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "worker")
        async with await asyncio.start_unix_server(worker.serve, path):
            client = WorkerClient(path)
            client.start()
            await client.wait_ready()
            yield client, worker
            await client.close()


class Taker:
    """Takes deltas, and from the first one on hears tokens below 50."""

    def __init__(self, *, hears: bool = True) -> None:
        self.got: list[EngineDelta | int] = []
        self.hear = None
        self._hears = hears
        self.held: list[bool] = []

    def __call__(self, delta: EngineDelta) -> bool:
        self.got.append(delta)
        if self._hears:
            self.hear = self._hear  # type: ignore[assignment]
        return delta.finish is not None

    def _hear(self, token: int) -> bool:
        self.held.append(this_sweep().held)
        if token == 13:
            raise RuntimeError("nobody says 13")
        if token < 50:
            self.got.append(token)
        return token < 50


def request(name: str) -> EngineRequest:
    return EngineRequest(id=name, prompt=[1], sampling=Sampling(seed=1), stopping=Stopping(max_tokens=9))


async def test_tokens_are_heard_from_the_first_delta_on_and_else_told() -> None:
    async with connected() as (client, worker):
        first, second = Taker(), Taker(hears=False)
        runs = asyncio.gather(client.submit(request("a"), first), client.submit(request("b"), second))
        one, two = [message.request.id for message in await worker.hear(2)]  # type: ignore[union-attr]
        assert {one, two}.isdisjoint({"a", "b"})
        for token in (7, 8, 60, 9):
            worker.say(EngineDelta(one, 0, [token]), EngineDelta(two, 0, [token]), EngineDelta("999", 0, [1]))
        worker.say(*[EngineDelta(id, 0, [5], finish="length") for id in (one, two)])
        await runs
        last = EngineDelta(one, 0, [5], finish="length")
        assert first.got == [EngineDelta(one, 0, [7]), 8, EngineDelta(one, 0, [60]), 9, last]
        assert second.got == [
            *(EngineDelta(two, 0, [token]) for token in (7, 8, 60, 9)),
            EngineDelta(two, 0, [5], finish="length"),
        ]
        assert all(first.held)
        await asyncio.sleep(0.05)
        assert len(worker.told) == 2  # nothing had to be aborted


async def test_what_hearing_raises_ends_the_request_and_no_other() -> None:
    async with connected() as (client, worker):
        bad, good = Taker(), Taker()
        failing = asyncio.create_task(client.submit(request("a"), bad))
        going = asyncio.create_task(client.submit(request("b"), good))
        one, two = [message.request.id for message in await worker.hear(2)]  # type: ignore[union-attr]
        worker.say(EngineDelta(one, 0, [1]), EngineDelta(two, 0, [1]))
        worker.say(EngineDelta(one, 0, [13]), EngineDelta(two, 0, [2]))
        worker.say(EngineDelta(one, 0, [3]), EngineDelta(two, 0, [3]))
        with pytest.raises(RuntimeError, match="nobody says 13"):
            await failing
        assert (await worker.hear(3))[2] == protocol.Abort(one)
        worker.say(EngineDelta(two, 0, [4], finish="stop"))
        await going
        assert good.got[1:3] == [2, 3]
        assert len(bad.got) == 1


async def test_abort_knows_requests_by_the_names_that_they_were_given() -> None:
    async with connected() as (client, worker):
        taker = Taker()
        run = asyncio.create_task(client.submit(request("a"), taker))
        (submitted,) = await worker.hear(1)
        assert isinstance(submitted, protocol.Submit)
        client.abort("nobody")
        client.abort("a", 0)
        assert (await worker.hear(2))[1] == protocol.Abort(submitted.request.id, 0)
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert len(worker.told) == 2  # its only choice was aborted before
