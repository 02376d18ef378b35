"""The API process's side of a model worker: an `Engine` over a Unix socket, which comes back when the worker does."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from typing import cast

import msgspec

from syringa.engine.client import protocol
from syringa.engine.interface import Hear, Take
from syringa.errors import ContextLengthExceeded, EngineOverloaded, EngineUnavailable, InvalidRequest, SyringaError
from syringa.sweep import this_sweep
from syringa.types import EngineDelta, EngineRequest, EngineStats, ModelInfo

RETRY_SECONDS = 0.05


class WorkerLost(EngineUnavailable):
    """The connection to a worker ended with requests in it. `begun`: whether this one had got anything back."""

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


class _Run:
    """A request in the worker, and who takes its deltas."""

    __slots__ = ("begun", "ended", "hear", "number", "open", "over", "take")

    def __init__(self, number: str, request: EngineRequest, take: Take) -> None:
        self.number = number
        self.take = take
        self.hear: Hear | None = None
        self.begun = self.over = False
        self.open = set(range(request.choices))
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def push(self, delta: EngineDelta) -> None:
        if self.over:
            return
        self.begun = True
        if delta.finish is not None:
            self.open.discard(delta.choice)
        try:
            if self.take(delta) or not self.open:
                self.end(None)
            else:
                self.hear = getattr(self.take, "hear", None)
        except Exception as error:
            self.end(error)

    def fail(self, error: SyringaError) -> None:
        self.open.clear()
        if not self.over:
            self.end(error)

    def end(self, error: Exception | None) -> None:
        self.over, self.hear = True, None
        if self.ended.done():  # given up by who waited for it
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


class _Connection(asyncio.Protocol):
    """Hands each message over as it arrives: no task wakes between the socket and a stream."""

    def __init__(self, take: Callable[[object, asyncio.WriteTransport], None]) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take = take
        self._frames = protocol.client_frames()
        self._sweep = this_sweep()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's are not declared as such

    def data_received(self, data: bytes) -> None:
        with self._sweep:
            for message in self._frames.feed(data):
                self._take(message, self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class WorkerClient:
    """Talks to the worker at `path`. Call `start` inside the event loop, `close` at the end."""

    def __init__(self, path: str, *, changed: Callable[[], None] | None = None) -> None:
        """With `changed`, which is called when the worker is ready and when it is gone, one that is gone stays so."""
        self.path = path
        self._changed = changed
        self._info: ModelInfo | None = None
        self._known: ModelInfo | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._runs: dict[str, _Run] = {}  # by their requests' ids
        self._numbered: dict[int, _Run] = {}
        self._count = 0
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._stay_connected(), name="worker-connection")

    @property
    def ready(self) -> bool:
        return self._info is not None

    @property
    def info(self) -> ModelInfo | None:
        """What the worker says of its model; None: it is not ready."""
        return self._info

    async def wait_ready(self) -> ModelInfo:
        await self._ready.wait()
        if self._info is None:
            raise EngineUnavailable("The model went away while it was being waited for.")
        return self._info

    async def submit(self, request: EngineRequest, take: Take) -> None:
        if not self.ready:
            raise EngineUnavailable(self._absence())
        if request.id in self._runs:
            raise InvalidRequest(f"A request with the id {request.id!r} is running already.")
        number = self._fresh_number()
        run = self._runs[request.id] = self._numbered[number] = _Run(str(number), request, take)
        self._send(protocol.Submit(msgspec.structs.replace(request, id=run.number)))
        try:
            await run.ended
        finally:
            if run.open:
                self.abort(request.id)
            del self._runs[request.id], self._numbered[number]

    def abort(self, request_id: str, choice: int | None = None) -> None:
        run = self._runs.get(request_id)
        if run is None:
            return
        if choice is not None:
            run.open.discard(choice)  # it will not finish
        if self.ready:
            self._send(protocol.Abort(run.number, choice))

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

    def _fresh_number(self) -> int:
        while True:
            self._count = (self._count + 1) % protocol.MOST_NUMBERS
            if self._count not in self._numbered:
                return self._count

    def _absence(self) -> str:
        if self._known is not None:
            return "The model worker has ended and is being started again: try again shortly."
        return "The model is still loading: try again shortly."

    def _send(self, message: protocol.ToWorker) -> None:
        """What is said in one turn of the event loop goes out together: each write wakes the worker."""
        if self._transport is not None:
            if not self._unsent:
                this_sweep().at_end(self._flush)
            self._unsent.append(protocol.frame(message))

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._transport is not None and unsent:
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    async def _stay_connected(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):
                transport, connection = await loop.create_unix_connection(lambda: _Connection(self._take), self.path)
                try:
                    await connection.ended
                finally:
                    self._lose("The model worker ended while it was answering. It is being started again.")
                    transport.abort()
            if self._changed is not None:
                return
            await asyncio.sleep(RETRY_SECONDS)

    def _take(self, message: object, transport: asyncio.WriteTransport) -> None:
        if type(message) is array:
            self._hear(message)
            return
        match message:
            case protocol.Deltas(deltas):
                for delta in deltas:
                    if (run := self._run(delta.request)) is not None:
                        run.push(delta)
            case protocol.Ready(info):
                self._info = self._known = info
                self._transport = transport
                self._ready.set()
                self._tell()
            case protocol.Refused(request_id, text, param, overloaded, code):
                if (run := self._run(request_id)) is not None:
                    kind = ContextLengthExceeded if code == ContextLengthExceeded.code else InvalidRequest
                    run.fail(EngineOverloaded(text) if overloaded else kind(text, param=param))
            case protocol.Stats(stats):
                future = self._stats.popleft()
                if not future.done():
                    future.set_result(stats)

    def _hear(self, said: Iterable[int]) -> None:
        runs, numbers = self._numbered, iter(said)
        for number, token in zip(numbers, numbers, strict=False):
            if (run := runs.get(number)) is not None:
                try:
                    if run.hear is None or not run.hear(token):
                        run.push(EngineDelta(run.number, 0, [token]))
                except Exception as error:
                    run.end(error)

    def _run(self, number: str) -> _Run | None:
        return self._numbered.get(int(number))

    def _lose(self, reason: str) -> None:
        """Everything in flight gets its error now; nobody waits for a worker that is gone."""
        self._info = None
        self._transport = None
        self._ready.clear()
        for run in list(self._runs.values()):
            run.fail(WorkerLost(reason, begun=run.begun))
        while self._stats:
            future = self._stats.popleft()
            if not future.done():
                future.set_exception(EngineUnavailable(reason))
        self._tell()

    def _tell(self) -> None:
        if self._changed is not None:
            self._changed()
