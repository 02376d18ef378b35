"""The client of a model worker: an `Engine` over a Unix socket, or over TCP with TLS."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import cast

import msgspec

from syringa.cluster.tls import TlsFiles, describe_tls_error
from syringa.engine.client import protocol, transport
from syringa.engine.client.silence import SilenceMonitor
from syringa.engine.interface import DeltaHandler, ReadyModel
from syringa.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineOverdue,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
    SyringaError,
    WorkerLost,
)
from syringa.flush_queue import flush_queue
from syringa.types import EmbeddingRequest, EmbeddingResult, EngineDelta, EngineRequest, EngineStats, ModelInfo

logger = logging.getLogger("syringa.engine")

RETRY_SECONDS = 0.05


class _Active:
    """A request that was sent to the worker, and its answer, which only one for embeddings has."""

    __slots__ = ("done", "future", "wire_id")

    def __init__(self, wire_id: str) -> None:
        self.wire_id = wire_id
        self.done = False
        self.future: asyncio.Future[EmbeddingResult | None] = asyncio.get_running_loop().create_future()

    def fail(self, error: SyringaError) -> None:
        if not self.done:
            self.end(error)

    def end(self, error: Exception | None, result: EmbeddingResult | None = None) -> None:
        self.done = True
        if self.future.done():  # the caller was canceled
            return
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)


class _ActiveRequest(_Active):
    """A request for generated text, and the handler of its deltas."""

    __slots__ = ("on_delta", "open_choices")

    def __init__(self, wire_id: str, request: EngineRequest, on_delta: DeltaHandler) -> None:
        super().__init__(wire_id)
        self.on_delta = on_delta
        self.open_choices = set(request.open_choices)

    def handle_delta(self, delta: EngineDelta) -> None:
        if self.done:
            return
        if delta.finish is not None:
            self.open_choices.discard(delta.choice)
        try:
            if self.on_delta(delta) or not self.open_choices:
                self.end(None)
        except Exception as error:
            self.end(error)

    def fail(self, error: SyringaError) -> None:
        self.open_choices.clear()
        super().fail(error)


class _WorkerProtocol(asyncio.Protocol):
    """Pass each message to a handler as it arrives: no task wakes between the socket and a stream."""

    def __init__(
        self, on_message: Callable[[object, asyncio.WriteTransport], None], on_data: Callable[[], None]
    ) -> None:
        """`on_data` is called with every piece of data, before the messages that it completes."""
        self.closed: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._on_message, self._on_data = on_message, on_data
        self._decoder = protocol.client_decoder()
        self._flushes = flush_queue()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop does not declare its transports as such

    def data_received(self, data: bytes) -> None:
        self._on_data()
        with self._flushes:
            for message in self._decoder.feed(data):
                self._on_message(message, self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)


class WorkerClient:
    """The client of the worker at an address. Call `start` inside the event loop, and `close` at the end."""

    def __init__(
        self,
        address: str,
        *,
        tls: TlsFiles | None = None,
        on_change: Callable[[], None] | None = None,
        monitor: Callable[[Callable[[bool], None]], SilenceMonitor] = SilenceMonitor,
    ) -> None:
        """`address` is one of `transport.parse_address`; TCP needs `tls`.

        `on_change` is called when the worker becomes ready, silent and heard again, and when it is lost; the client
        then does not reconnect. Without `on_change`, the client reconnects until it is closed.
        """
        self.address = transport.parse_address(address)
        self.error = ""  # why the last attempt to connect failed, or the connection broke
        self._tls = tls
        self._silence = monitor(lambda silent: self._notify())
        self._lost = False
        self._on_change = on_change
        self._info: ModelInfo | None = None
        self._was_ready = False
        self._transport: asyncio.WriteTransport | None = None
        self._unsent: list[bytes] = []
        self._requests: dict[str, _Active] = {}  # by request id
        self._by_wire_id: dict[str, _ActiveRequest] = {}
        self._embeddings: dict[str, _Active] = {}  # by wire id
        self._last_wire_id = 0
        self._stats: deque[asyncio.Future[EngineStats]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._connect(), name="worker-connection")

    @property
    def ready(self) -> bool:
        return self._info is not None

    @property
    def lost(self) -> bool:
        """Whether the connection has ended and will not be made again."""
        return self._lost

    @property
    def silent(self) -> bool:
        """Whether the worker was ready and has sent nothing for `SILENT_SECONDS`, not even a heartbeat."""
        return self._silence.silent

    @property
    def info(self) -> ModelInfo | None:
        """The worker's description of its model; None while it is not ready."""
        return self._info

    async def wait_ready(self, *, background: bool = False) -> ReadyModel:
        await self._ready.wait()
        if self._info is None:
            reason = f": {self.error}" if self.error else ""
            raise EngineUnavailable(f"The model went away while it was being waited for{reason}.")
        return ReadyModel(self._info)

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        wire_id = self._next_wire_id(request.id)
        active = self._requests[request.id] = self._by_wire_id[wire_id] = _ActiveRequest(wire_id, request, on_delta)
        self._send(protocol.Submit(msgspec.structs.replace(request, id=wire_id)))
        try:
            await active.future
        finally:
            if active.open_choices:
                self.abort(request.id)
            del self._requests[request.id], self._by_wire_id[wire_id]

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        wire_id = self._next_wire_id(request.id)
        active = self._requests[request.id] = self._embeddings[wire_id] = _Active(wire_id)
        self._send(protocol.Embed(msgspec.structs.replace(request, id=wire_id)))
        try:
            result = await active.future
            assert result is not None
            return msgspec.structs.replace(result, request_id=request.id)
        except BaseException:  # canceled or interrupted; one that the worker has refused is aborted without effect
            self.abort(request.id)
            raise
        finally:
            del self._requests[request.id], self._embeddings[wire_id]

    def _next_wire_id(self, request_id: str) -> str:
        """Return an id for a new request. Raises `EngineUnavailable`, and `InvalidRequest` if its own id is in use."""
        if not self.ready:
            raise EngineUnavailable(self._unavailable_reason())
        if request_id in self._requests:
            raise InvalidRequest(f"A request with the id {request_id!r} is running already.")
        self._last_wire_id += 1
        return str(self._last_wire_id)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        active = self._requests.get(request_id)
        if active is None:
            return
        if choice is not None and isinstance(active, _ActiveRequest):
            active.open_choices.discard(choice)  # it gets no last delta
        if self.ready:
            self._send(protocol.Abort(active.wire_id, choice))

    def interrupt(self, request_id: str, error: Exception) -> None:
        """End the `submit` of a request with an error, and abort what still runs of it."""
        active = self._requests.get(request_id)
        if active is not None and not active.done:
            active.end(error)

    async def stats(self) -> EngineStats:
        if not self.ready:
            raise EngineUnavailable(self._unavailable_reason())
        future: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._send(protocol.GetStats())
        return await future

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._lost = True
        self._fail_all("The engine was closed.")

    def _unavailable_reason(self) -> str:
        if self._was_ready:
            return "The model worker has ended and is being started again: try again shortly."
        return "The model is still loading: try again shortly."

    def _send(self, message: protocol.ToWorker) -> None:
        """Send a message with all others of this event loop iteration: each write wakes the worker."""
        if self._transport is not None:
            if not self._unsent:
                flush_queue().schedule(self._flush)
            self._unsent.append(protocol.frame(message))

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        # A write to a transport that has closed raises in uvloop. What was to be sent fails with the connection.
        if self._transport is not None and unsent and not self._transport.is_closing():
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    async def _connect(self) -> None:
        """Connect and wait for the end of the connection; reconnect unless `on_change` is set."""
        while True:
            try:
                error = await self._run_connection()
            except (OSError, ConfigError) as failed:
                error = failed
            self._report(error)
            self._lost = self._on_change is not None
            self._fail_all("The model worker ended while it was answering. It is being started again.")
            if self._lost:
                self._ready.set()  # there is nothing to wait for
                return
            await asyncio.sleep(RETRY_SECONDS)

    async def _run_connection(self) -> Exception | None:
        """Connect, and return at the end of the connection what broke it, if anything did."""
        connected, connection = await transport.connect(
            self.address, self._tls, lambda: _WorkerProtocol(self._handle_message, self._silence.heard)
        )
        try:
            return await connection.closed
        finally:
            connected.abort()

    def _report(self, error: Exception | None) -> None:
        """Log why there is no connection, once. Local workers are watched by the supervisor."""
        reason = describe_tls_error(error) if error is not None else ""
        if reason and reason != self.error and self.address.kind == "tcp":
            logger.error("no connection to a model worker: address=%s reason=%r", self.address, reason)
        self.error = reason

    def _handle_message(self, message: object, connected: asyncio.WriteTransport) -> None:
        match message:
            case protocol.Deltas(deltas):
                for delta in deltas:
                    if (active := self._by_wire_id.get(delta.request_id)) is not None:
                        active.handle_delta(delta)
            case protocol.Ready(info):
                self._info = info
                self._was_ready = True
                self._transport = connected
                self.error = ""
                self._silence.start()
                self._ready.set()
                self._notify()
            case protocol.Embedded(result):
                if (embedding := self._embeddings.get(result.request_id)) is not None and not embedding.done:
                    embedding.end(None, result)
            case protocol.RequestRejected(wire_id):
                if (rejected := self._by_wire_id.get(wire_id) or self._embeddings.get(wire_id)) is not None:
                    rejected.fail(_rejection_error(message))
            case protocol.StatsReply(stats):
                future = self._stats.popleft()
                if not future.done():
                    future.set_result(stats)

    def _fail_all(self, reason: str) -> None:
        """Fail everything in flight: the worker is gone."""
        self._info = None
        self._transport = None
        self._silence.stop()
        self._ready.clear()
        for active in list(self._requests.values()):
            active.fail(WorkerLost(reason))
        while self._stats:
            future = self._stats.popleft()
            if not future.done():
                future.set_exception(EngineUnavailable(reason))
        self._notify()

    def _notify(self) -> None:
        if self._on_change is not None:
            self._on_change()


def _rejection_error(message: protocol.RequestRejected) -> SyringaError:
    if message.overdue is not None:
        return EngineOverdue(message.overdue)
    if message.overloaded:
        return EngineOverloaded(message.message, code=message.code)
    kind = ContextLengthExceeded if message.code == ContextLengthExceeded.code else InvalidRequest
    return kind(message.message, param=message.param)
