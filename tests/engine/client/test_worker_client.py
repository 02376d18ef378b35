from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from syringa.engine.client import protocol
from syringa.engine.client.worker_client import WorkerClient
from syringa.errors import EngineUnavailable
from syringa.flush_queue import flush_queue
from syringa.types import EngineDelta, EngineRequest, ResumedChoice, SamplingParams, StopConditions
from tests.engine.processes.stub_worker import INFO


class FakeWorker:
    """A worker that records messages and sends the deltas of a test."""

    def __init__(self) -> None:
        self.received: list[protocol.ToWorker] = []
        self._decoder = protocol.worker_decoder()
        self._more = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        writer.write(protocol.frame(protocol.Ready(INFO)))
        while data := await reader.read(1 << 16):
            self.received += self._decoder.feed(data)
            self._more.set()
        writer.close()

    async def receive(self, count: int) -> list[protocol.ToWorker]:
        """Return the messages received, once there are `count`."""
        async with asyncio.timeout(60):
            while len(self.received) < count:
                self._more.clear()
                await self._more.wait()
        return self.received

    def send(self, *deltas: EngineDelta) -> None:
        self.writer.write(protocol.frame(protocol.Deltas(deltas)))


@contextlib.asynccontextmanager
async def connected() -> AsyncIterator[tuple[WorkerClient, FakeWorker]]:
    worker = FakeWorker()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "worker")
        async with await asyncio.start_unix_server(worker.serve, path):
            client = WorkerClient(f"unix:{path}")
            client.start()
            await client.wait_ready()
            yield client, worker
            await client.close()


class Recorder:
    """Collects deltas, and whether each came inside a batch of flushes. Raises at token 13."""

    def __init__(self) -> None:
        self.deltas: list[EngineDelta] = []
        self.batched: list[bool] = []

    def __call__(self, delta: EngineDelta) -> bool:
        if delta.tokens == [13]:
            raise RuntimeError("token 13")
        self.deltas.append(delta)
        self.batched.append(flush_queue().batching)
        return delta.finish is not None


def request(name: str) -> EngineRequest:
    return EngineRequest(id=name, prompt=[1], sampling=SamplingParams(seed=1), stopping=StopConditions(max_tokens=9))


async def test_client_delivers_each_delta_to_its_request() -> None:
    async with connected() as (client, worker):
        first, second = Recorder(), Recorder()
        submits = asyncio.gather(client.submit(request("a"), first), client.submit(request("b"), second))
        one, two = [message.request.id for message in await worker.receive(2)]  # type: ignore[union-attr]
        assert {one, two}.isdisjoint({"a", "b"})
        for token in (7, 8):
            worker.send(EngineDelta(one, 0, [token]), EngineDelta(two, 0, [token + 1]), EngineDelta("999", 0, [1]))
        worker.send(*[EngineDelta(id, 0, [5], finish="length") for id in (one, two)])
        await submits
        for id, recorder, start in ((one, first, 7), (two, second, 8)):
            tokens = [EngineDelta(id, 0, [token]) for token in (start, start + 1)]
            assert recorder.deltas == [*tokens, EngineDelta(id, 0, [5], finish="length")]
            assert all(recorder.batched)
        await asyncio.sleep(0.05)
        assert len(worker.received) == 2  # nothing had to be aborted


async def test_error_in_a_delta_callback_ends_that_request_only() -> None:
    async with connected() as (client, worker):
        bad, good = Recorder(), Recorder()
        failing = asyncio.create_task(client.submit(request("a"), bad))
        going = asyncio.create_task(client.submit(request("b"), good))
        one, two = [message.request.id for message in await worker.receive(2)]  # type: ignore[union-attr]
        worker.send(EngineDelta(one, 0, [1]), EngineDelta(two, 0, [1]))
        worker.send(EngineDelta(one, 0, [13]), EngineDelta(two, 0, [2]))
        worker.send(EngineDelta(one, 0, [3]), EngineDelta(two, 0, [3]))
        with pytest.raises(RuntimeError, match="token 13"):
            await failing
        assert (await worker.receive(3))[2] == protocol.Abort(one)
        worker.send(EngineDelta(two, 0, [4], finish="stop"))
        await going
        assert [delta.tokens for delta in good.deltas] == [[1], [2], [3], [4]]
        assert len(bad.deltas) == 1


async def test_abort_uses_ids_of_submitted_requests() -> None:
    async with connected() as (client, worker):
        recorder = Recorder()
        submit = asyncio.create_task(client.submit(request("a"), recorder))
        (submitted,) = await worker.receive(1)
        assert isinstance(submitted, protocol.Submit)
        client.abort("unknown")
        client.abort("a", 0)
        assert (await worker.receive(2))[1] == protocol.Abort(submitted.request.id, 0)
        submit.cancel()
        await asyncio.gather(submit, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert len(worker.received) == 2  # its only choice was aborted before


async def test_resumed_request_ends_when_its_open_choices_do() -> None:
    async with connected() as (client, worker):
        choices = (ResumedChoice([1], finished=True), ResumedChoice([2]), ResumedChoice([3], finished=True))
        resumed = msgspec.structs.replace(request("a"), choices=3, resumed=choices)
        received: list[EngineDelta] = []
        submit = asyncio.create_task(client.submit(resumed, lambda delta: bool(received.append(delta))))
        (submitted,) = await worker.receive(1)
        assert isinstance(submitted, protocol.Submit)
        assert submitted.request.resumed == choices
        worker.send(EngineDelta(submitted.request.id, 1, [4], finish="stop"))
        async with asyncio.timeout(60):
            await submit
        assert [delta.tokens for delta in received] == [[4]]
        await asyncio.sleep(0.05)
        assert len(worker.received) == 1  # nothing had to be aborted


def test_what_is_sent_while_the_connection_closes_fails_with_it() -> None:
    failed: list[dict[str, object]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failed.append(context))
        async with connected() as (client, worker):
            worker.writer.transport.abort()
            calls = []
            while client.ready:  # in every iteration until the client has noticed it
                calls.append(asyncio.create_task(client.stats()))
                await asyncio.sleep(0)
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(each) for each in results} == {EngineUnavailable}

    uvloop.run(run())
    assert failed == []
