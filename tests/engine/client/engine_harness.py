"""The engine of a model, with workers that the test scripts, and a supervisor that is the test itself."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from syringa.cluster.tls import TlsFiles
from syringa.config.specs import EngineName
from syringa.engine.client import protocol
from syringa.engine.client.model_engine import ModelEngine
from syringa.engine.interface import LoadStatus, ReplicaState, ReplicaStatus
from syringa.engine.processes.control import AcquireModel, SupervisorRequest, WorkerState
from syringa.engine.worker.options import WorkerOptions
from syringa.types import EmbeddingRequest, EmbeddingResult, EngineDelta, EngineRequest, EngineStats
from tests.engine.processes.stub_worker import INFO
from tests.engine.processes.supervisor_harness import answer, until


class ScriptedWorker:
    """A ready worker. It records the requests, and answers only when the test says so."""

    def __init__(self, path: str) -> None:
        self.path, self.info, self.stats = path, INFO, EngineStats()
        self.requests: list[EngineRequest] = []
        self.embeddings: list[EmbeddingRequest] = []
        self.aborted: list[tuple[str, int | None]] = []
        self.on_request: Callable[[ScriptedWorker], None] = lambda worker: None
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def replica(self) -> str:
        return f"m-{Path(self.path).name}"

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        writer.write(protocol.frame(protocol.Ready(self.info)))
        beating = asyncio.create_task(self._beat(writer))
        try:
            await self._serve(reader, writer)
        finally:
            beating.cancel()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        """Send heartbeats: without them, a worker counts as silent in a test that takes seconds."""
        while True:
            await asyncio.sleep(protocol.HEARTBEAT_SECONDS)
            writer.write(protocol.frame(protocol.Heartbeat()))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = protocol.worker_decoder()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                for message in decoder.feed(data):
                    if isinstance(message, protocol.Submit):
                        self.requests.append(message.request)
                        self.on_request(self)
                    elif isinstance(message, protocol.Embed):
                        self.embeddings.append(message.request)
                        self.on_request(self)
                    elif isinstance(message, protocol.Abort):
                        self.aborted.append((message.request_id, message.choice))
                    elif isinstance(message, protocol.GetStats):
                        writer.write(protocol.frame(protocol.StatsReply(self.stats)))

    def send(self, *tokens: int, finish: bool = False, choice: int = 0, **fields: object) -> None:
        """Send tokens of the last request."""
        reason = "stop" if finish else None
        delta = EngineDelta(self.requests[-1].id, choice, list(tokens), finish=reason, **fields)  # type: ignore[arg-type]
        self._writers[-1].write(protocol.frame(protocol.Deltas([delta])))

    def send_embedding(self, values: bytes = b"\0\0\x80?") -> None:
        """Send a vector of one value as the result of the last request for embeddings."""
        result = EmbeddingResult(self.embeddings[-1].id, 1, values)
        self._writers[-1].write(protocol.frame(protocol.Embedded(result)))

    def refuse(self, message: str, *, overdue: float | None = None, code: str | None = None) -> None:
        """Refuse the last request because the queue is full, it has waited for `overdue` seconds, or by `code`."""
        last = [*self.requests, *self.embeddings][-1].id
        refusal = protocol.RequestRejected(last, message, overloaded=True, code=code, overdue=overdue)
        self._writers[-1].write(protocol.frame(refusal))

    def die(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


def answers(*tokens: int) -> Callable[[ScriptedWorker], None]:
    return lambda worker: worker.send(*tokens, finish=True)


@contextlib.asynccontextmanager
async def workers(count: int) -> AsyncIterator[list[ScriptedWorker]]:
    with tempfile.TemporaryDirectory() as folder:
        made = [ScriptedWorker(str(Path(folder) / str(number))) for number in range(1, count + 1)]
        async with contextlib.AsyncExitStack() as stack:
            for worker in made:
                await stack.enter_async_context(await asyncio.start_unix_server(worker.connected, worker.path))
            yield made
            for worker in made:
                worker.die()


def replica(worker: ScriptedWorker, status: ReplicaStatus = "ready", **fields: object) -> ReplicaState:
    return ReplicaState(worker.replica, status, f"unix:{worker.path}", **fields)  # type: ignore[arg-type]


def state(status: LoadStatus, *replicas: ReplicaState) -> WorkerState:
    return WorkerState("k", status, replicas=list(replicas))


class EngineHarness:
    def __init__(
        self, *, queue_timeout: float = 0.0, tls: TlsFiles | None = None, engine: EngineName = "syringa"
    ) -> None:
        self.sent: list[SupervisorRequest] = []
        self.moves: list[tuple[str, bool]] = []
        self.routes: list[bool] = []
        acquire = AcquireModel(WorkerOptions(socket="", model="m", engine=engine, queue_timeout=queue_timeout))
        self.engine = ModelEngine(
            "m",
            acquire,
            self.sent.append,
            60.0,
            lambda info: None,
            lambda reason, same: self.moves.append((reason, same)),
            self.routes.append,
            queue_timeout=queue_timeout,
            tls=tls,
        )

    async def ready(self, *found: ScriptedWorker, **fields: object) -> None:
        """Report these workers as ready replicas, and wait until the engine is connected to all of them."""
        self.engine.update(state("loaded", *(replica(worker, **fields) for worker in found)))
        await until(lambda: self.engine.replicas.usable.keys() >= {worker.replica for worker in found})


async def begin(
    engine: ModelEngine, made: list[ScriptedWorker], *tokens: int, **fields: object
) -> asyncio.Task[list[int]]:
    """Begin a request on one of the workers, which becomes the first in the list, and let it send tokens."""
    task = asyncio.create_task(answer(engine))
    await until(lambda: any(worker.requests for worker in made))
    made.sort(key=lambda worker: not worker.requests)
    if tokens:
        made[0].send(*tokens, **fields)  # type: ignore[arg-type]
        await until(lambda: engine._runs["r"].progress.begun)
    return task
