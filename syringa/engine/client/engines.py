"""The engines of an API process: one for each model, whose worker the supervisor starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.client.probe_client import ProbeClient
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.interface import DeltaHandler, Engine, LoadStatus, WorkerCounts
from syringa.engine.processes.control import (
    AcquireModel,
    AcquireProbe,
    ClearSuspect,
    ReleaseModel,
    SupervisorReport,
    SupervisorRequest,
    WorkerState,
    api_decoder,
    worker_key,
)
from syringa.engine.processes.probes import probe_path
from syringa.engine.processes.suspects import REFUSED, fingerprint
from syringa.engine.structured_output.probe_protocol import ProbeOptions
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import EngineUnavailable, RequestSuspected, WorkerLost
from syringa.types import EngineRequest, EngineStats, Grammar, Isolation, ModelInfo

logger = logging.getLogger("syringa.engine")

Send = Callable[[SupervisorRequest], None]

REPORT_SECONDS = 2.0  # for the supervisor to report that a worker has died
MAX_RETRIES = 3  # of a request that was waiting when its worker died


class ModelEngine:
    """The engine of one model. It asks the supervisor for a worker when a request needs one."""

    def __init__(
        self,
        name: str,
        acquire: AcquireModel,
        send: Send,
        load_timeout: float,
        on_loaded: Callable[[ModelInfo], None],
    ) -> None:
        """`load_timeout` is how many seconds a request waits for the model; 0: without limit."""
        self.name = name
        self.status: LoadStatus = "cold"
        self.removed = False  # whether the model is no longer configured
        self.suspects: Mapping[bytes, int] = {}  # requests that were running at crashes, see `SuspectTable.levels`
        self._key = worker_key(acquire.options)
        self._socket = ""  # of the worker that serves the model, as last reported
        self._acquire, self._send, self._load_timeout, self._on_loaded = acquire, send, load_timeout, on_loaded
        self._reason = ""
        self._client: WorkerClient | None = None
        self._retiring_socket = ""  # of a worker that the supervisor is unloading
        self._updates = 0  # number of states received from the supervisor
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def ready(self) -> bool:
        return self.status == "loaded" and self._client is not None and self._client.ready

    def update(self, state: WorkerState) -> None:
        """Apply a state that the supervisor reports of the worker.

        The reason of a failure may name files of the server: it is logged, and not shown to clients.
        """
        if state.status == "failed" and (state.status, state.reason) != (self.status, self._reason):
            logger.error("model cannot be loaded: model=%s reason=%r", self.name, state.reason)
        self.status, self._reason = state.status, state.reason
        self._updates += 1
        serving = state.status in ("loaded", "hanging")
        self._socket = state.socket if serving else ""
        self._retiring_socket = "" if serving else state.socket or self._retiring_socket
        client = self._client
        if state.status == "loaded" and (client is None or client.path != state.socket or client.lost):
            self._client = WorkerClient(state.socket, on_change=self._notify)
            self._client.start()
        self._notify()

    def _notify(self) -> None:
        """Wake all waiters to look at the state again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self.ready and self._client is not None and self._client.info is not None:
            self._on_loaded(self._client.info)

    async def wait_ready(self) -> ModelInfo:
        client = await self._get_client()
        assert client.info is not None
        return client.info

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        """Run a request. One that its worker had not begun when it retired or died is sent to the next worker.

        A request that was being computed when workers died is computed alone, and raises `RequestSuspected` after it
        was alone in a second crash.
        """
        request = msgspec.structs.replace(request, fingerprint=fingerprint(request))
        retries = 0
        while True:
            client = await self._get_client()
            crashes = self._crashes(request)
            isolation: Isolation = "none" if not crashes else "start" if crashes == 1 else "full"
            try:
                await client.submit(msgspec.structs.replace(request, isolation=isolation), on_delta)
            except WorkerLost as lost:
                if client.path != self._retiring_socket:
                    await self._wait_for_report(client)
                    retries += 1
                    # It is computed once more at most: a second crash with others at its side is reported.
                    if self._crashes(request) > 1 or retries > MAX_RETRIES:
                        raise
                if lost.begun or self._closed:
                    raise
            else:
                if crashes:
                    self._send(ClearSuspect(self._key, request.fingerprint))
                return

    def _crashes(self, request: EngineRequest) -> int:
        """Return the number of crashes at which a request was computed. Raises `RequestSuspected`."""
        crashes = self.suspects.get(request.fingerprint, 0)
        if crashes == REFUSED:
            raise RequestSuspected("The model worker ended twice while it computed this request: it is not run again.")
        return crashes

    async def _wait_for_report(self, client: WorkerClient) -> None:
        """Wait until the supervisor has reported the end of a worker, and with it the requests that are suspected."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                while self._socket == client.path and not self._closed:
                    await self._changed.wait()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        if self._client is not None:
            self._client.abort(request_id, choice)

    async def stats(self) -> EngineStats:
        if self._client is None or not self.ready:
            raise self._unavailable("is not loaded")
        return await self._client.stats()

    async def close(self) -> None:
        self._closed = True
        self._notify()
        if self._client is not None:
            await self._client.close()

    async def _get_client(self) -> WorkerClient:
        """Return the client of a ready worker, which is acquired if there is none."""
        if self._client is not None and self.ready:
            return self._client
        try:
            async with asyncio.timeout(self._load_timeout or None):
                return await self._wait_for_client()
        except TimeoutError:
            why = f": {self._reason}" if self._reason and self.status != "failed" else ""
            raise self._unavailable(f"could not be loaded within {self._load_timeout:g} seconds{why}") from None

    async def _wait_for_client(self) -> WorkerClient:
        acquired_at = -1
        while True:
            if self._closed:
                raise self._unavailable("is not loaded: the server is being stopped")
            if self._client is not None and self.ready:
                return self._client
            if self.removed:
                raise self._unavailable("is no longer configured")
            if acquired_at < 0 or (self.status == "cold" and self._updates > acquired_at):
                self._send(self._acquire)
                acquired_at = self._updates
            elif self.status == "failed" and self._updates > acquired_at:
                raise self._unavailable("cannot be loaded: the log of the server has the reason")
            await self._changed.wait()

    def _unavailable(self, problem: str) -> EngineUnavailable:
        return EngineUnavailable(f"The model {self.name!r} {problem}", code="model_unavailable")


class ModelEngines:
    """The engines of all configured models. Call `start` inside the event loop, and `close` at the end."""

    def __init__(self, path: str, config: Config) -> None:
        """`path` is the supervisor's control socket."""
        self.on_loaded: Callable[[str, ModelInfo], None] = lambda model, info: None  # set by the API server
        self._path, self._config = path, config
        self._models: dict[str, tuple[str, AcquireModel]] = {}  # by model id, with the key of its worker
        self._engines: dict[str, ModelEngine] = {}  # by worker key
        self._states: dict[str, WorkerState] = {}
        self._suspects: dict[str, Mapping[bytes, int]] = {}  # by worker key
        self._probes: dict[str, ProbeClient] = {}  # by the path of their sockets
        self._unsent: list[SupervisorRequest] = []
        self._transport: asyncio.WriteTransport | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Connect to the supervisor and send what was queued."""
        transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: _ControlProtocol(self._handle_report, self._handle_disconnect), self._path
        )
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop does not declare its transports as such
        for message in self._unsent:
            self._send(message)
        self._unsent.clear()

    def set_specs(self, specs: Sequence[ModelSpec]) -> None:
        """Replace the configured models: load those to be preloaded, and release the workers of removed ones."""
        before = {key for key, _ in self._models.values()}
        requests = {spec.id: _acquire_request(spec, self._config) for spec in specs}
        self._models = {model: (worker_key(acquire.options), acquire) for model, acquire in requests.items()}
        now = {key for key, _ in self._models.values()}
        for key, engine in self._engines.items():
            engine.removed = key not in now
        for key in before - now:
            self._send(ReleaseModel(key))
        for key, acquire in self._models.values():
            if acquire.restart and key not in before:
                self._send(msgspec.structs.replace(acquire, opportunistic=True))

    def engine(self, model: str) -> Engine:
        try:
            key, acquire = self._models[model]
        except KeyError:
            message = f"The model {model!r} is no longer configured"
            raise EngineUnavailable(message, code="model_unavailable") from None
        engine = self._engines.get(key)
        if engine is None:
            timeout = self._config.load_timeout
            engine = self._engines[key] = ModelEngine(model, acquire, self._send, timeout, self._loaded_callback(key))
            engine.suspects = self._suspects.get(key, {})
            if state := self._states.get(key):
                engine.update(state)
        return engine

    async def check_grammar(self, model: str, grammar: Grammar, tenant: str, cache_key: bytes) -> int:
        """Return the memory that a grammar takes in the worker of a model. Raises like `ProbeClient.check`."""
        if model not in self._models:
            raise EngineUnavailable(f"The model {model!r} is no longer configured", code="model_unavailable")
        options = ProbeOptions(
            model=self._models[model][1].options.model,
            cpu_seconds=self._config.grammar_timeout,
            memory_bytes=self._config.grammar_memory_bytes,
        )
        path = probe_path(str(Path(self._path).parent), options)
        probe = self._probes.get(path)
        if probe is None:
            acquire = functools.partial(self._send, AcquireProbe(options))
            probe = self._probes[path] = ProbeClient(path, acquire)
        return await probe.check(grammar, tenant, cache_key)

    def status(self, model: str) -> LoadStatus:
        key, _ = self._models.get(model, ("", None))
        state = self._states.get(key)
        return state.status if state else "cold"

    def worker_counts(self, model: str) -> WorkerCounts:
        key, _ = self._models.get(model, ("", None))
        state = self._states.get(key)
        return WorkerCounts(state.hangs, state.crashes) if state else WorkerCounts()

    async def close(self) -> None:
        for probe in self._probes.values():
            probe.close()
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))
        if self._transport is not None:
            self._transport.close()

    def _loaded_callback(self, key: str) -> Callable[[ModelInfo], None]:
        """Return a function that reports a loaded worker for all models that share it."""

        def on_loaded(info: ModelInfo) -> None:
            for model, (own, _) in self._models.items():
                if own == key:
                    self.on_loaded(model, info)

        return on_loaded

    def _send(self, message: SupervisorRequest) -> None:
        if self._transport is None:
            self._unsent.append(message)
        else:
            self._transport.write(protocol.frame(message))

    def _handle_report(self, report: SupervisorReport) -> None:
        if isinstance(report, WorkerState):
            self._handle_state(report)
        else:
            self._suspects[report.key] = report.levels
            if engine := self._engines.get(report.key):
                engine.suspects = report.levels

    def _handle_state(self, state: WorkerState) -> None:
        self._states[state.key] = state
        if engine := self._engines.get(state.key):
            engine.update(state)
            if engine.removed and state.status == "cold" and not state.socket:
                del self._engines[state.key], self._states[state.key]
                self._suspects.pop(state.key, None)

    def _handle_disconnect(self) -> None:
        """Close all engines: the supervisor is gone, and this process is about to exit."""
        for engine in self._engines.values():
            task = asyncio.ensure_future(engine.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _ControlProtocol(asyncio.Protocol):
    def __init__(self, on_report: Callable[[SupervisorReport], None], on_disconnect: Callable[[], None]) -> None:
        self._on_report, self._on_disconnect = on_report, on_disconnect
        self._decoder = api_decoder()

    def data_received(self, data: bytes) -> None:
        for report in self._decoder.feed(data):
            self._on_report(report)

    def connection_lost(self, error: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop may be closed already
            self._on_disconnect()


def _acquire_request(spec: ModelSpec, config: Config) -> AcquireModel:
    options = WorkerOptions.from_config(spec, config)
    return AcquireModel(options, spec.idle_seconds or 0.0, restart=bool(spec.preload), name=spec.id)
