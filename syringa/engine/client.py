"""The API process's side of a model worker: an `Engine` over a Unix socket, which comes back when the worker does."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from syringa.engine import protocol
from syringa.errors import EngineOverloaded, EngineUnavailable, InvalidRequest, SyringaError
from syringa.types import EngineDelta, EngineRequest, EngineStats, ModelInfo

RETRY_SECONDS = 0.05
READ_SIZE = 1 << 18


class Stream:
    """The deltas of one request. Ends by itself when every choice has finished; `aclose` aborts the rest."""

    __slots__ = ("_client", "_error", "_open", "_ready", "_request", "_waiter")

    def __init__(self, client: WorkerClient, request: EngineRequest) -> None:
        self._client = client
        self._request = request
        self._ready: deque[EngineDelta] = deque()
        self._open = set(range(request.choices))
        self._waiter: asyncio.Future[None] | None = None
        self._error: SyringaError | None = None

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> EngineDelta:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._ready.popleft()

    async def aclose(self) -> None:
        self._client.forget(self._request.id)
        if self._open and self._error is None:
            self._open.clear()
            self._client.abort(self._request.id)

    def push(self, delta: EngineDelta) -> None:
        self._ready.append(delta)
        if delta.finish is not None:
            self._open.discard(delta.choice)
            if not self._open:
                self._client.forget(self._request.id)
        self._wake()

    def drop(self, choice: int) -> None:
        """Its reader has aborted this choice: it will not finish."""
        self._open.discard(choice)

    def fail(self, error: SyringaError) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class WorkerClient:
    """Talks to the worker at `path`. Call `start` inside the event loop, `close` at the end."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._info: ModelInfo | None = None
        self._known: ModelInfo | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._streams: dict[str, Stream] = {}
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._stay_connected(), name="worker-connection")

    @property
    def ready(self) -> bool:
        return self._info is not None

    async def wait_ready(self) -> ModelInfo:
        await self._ready.wait()
        if self._info is None:
            raise EngineUnavailable("The model went away while it was being waited for.")
        return self._info

    def submit(self, request: EngineRequest) -> Stream:
        stream = Stream(self, request)
        if not self.ready:
            stream.fail(EngineUnavailable(self._absence()))
        elif request.id in self._streams:
            stream.fail(InvalidRequest(f"A request with the id {request.id!r} is running already."))
        else:
            self._streams[request.id] = stream
            self._send(protocol.Submit(request))
        return stream

    def abort(self, request_id: str, choice: int | None = None) -> None:
        if choice is not None and (stream := self._streams.get(request_id)):
            stream.drop(choice)
        if self.ready:
            self._send(protocol.Abort(request_id, choice))

    async def stats(self) -> EngineStats:
        if not self.ready:
            raise EngineUnavailable(self._absence())
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._send(protocol.AskStats())
        return await future

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lose("The engine was closed.")

    def forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def _absence(self) -> str:
        if self._known is not None:
            return "The model worker has ended and is being started again: try again shortly."
        return "The model is still loading: try again shortly."

    def _send(self, message: protocol.ToWorker) -> None:
        if self._writer is not None:
            self._writer.write(protocol.frame(message))

    async def _stay_connected(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(self.path)
                try:
                    await self._read(reader, writer)
                finally:
                    self._lose("The model worker ended while it was answering. It is being started again.")
                    writer.close()
                    with contextlib.suppress(OSError):  # the error is known; unread, it would be logged
                        await writer.wait_closed()
            await asyncio.sleep(RETRY_SECONDS)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = protocol.client_frames()
        while data := await reader.read(READ_SIZE):
            for message in frames.feed(data):
                self._take(message, writer)

    def _take(self, message: object, writer: asyncio.StreamWriter) -> None:
        match message:
            case protocol.Deltas(deltas):
                streams = self._streams
                for delta in deltas:
                    if (stream := streams.get(delta.request)) is not None:
                        stream.push(delta)
            case protocol.Ready(info):
                self._info = self._known = info
                self._writer = writer
                self._ready.set()
            case protocol.Refused(request_id, text, param, overloaded):
                if stream := self._streams.pop(request_id, None):
                    stream.fail(EngineOverloaded(text) if overloaded else InvalidRequest(text, param=param))
            case protocol.Stats(stats):
                future = self._stats.popleft()
                if not future.done():
                    future.set_result(stats)

    def _lose(self, reason: str) -> None:
        """Everything in flight gets its error now; nobody waits for a worker that is gone."""
        self._info = None
        self._writer = None
        self._ready.clear()
        for stream in list(self._streams.values()):
            stream.fail(EngineUnavailable(reason))
        self._streams.clear()
        while self._stats:
            future = self._stats.popleft()
            if not future.done():
                future.set_exception(EngineUnavailable(reason))
