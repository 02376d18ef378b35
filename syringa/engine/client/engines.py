"""The engines of an API process: one for each model, whose replicas the supervisor starts and stops."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from syringa.cluster.folder import ClusterFolder
from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.client.model_engine import ModelEngine
from syringa.engine.client.probe_client import ProbeClient
from syringa.engine.interface import Engine, LoadStatus, MoveReason, ReplicaState, WorkerCounts
from syringa.engine.processes.control import (
    AcquireModel,
    AcquireProbe,
    DrainNode,
    DrainReplica,
    KeepModel,
    ReleaseModel,
    SetPool,
    SupervisorReport,
    SupervisorRequest,
    WorkerState,
    acquire_request,
    api_decoder,
    merge_requests,
    worker_key,
)
from syringa.engine.processes.probes import probe_path
from syringa.engine.structured_output.probe_protocol import ProbeOptions
from syringa.errors import EngineUnavailable
from syringa.fleet.status import FleetStatus
from syringa.types import Grammar, ModelInfo, ModelLoading

OnMove = Callable[[str, MoveReason, bool], None]
"""Called with each move of a request: model, reason, and whether the replicas have the same fingerprint."""

OnRoute = Callable[[str, bool], None]
"""Called with each choice among several replicas: model, and whether one has served a prefix of the prompt."""


class ModelEngines:
    """The engines of all configured models. Call `start` inside the event loop, and `close` at the end."""

    def __init__(self, path: str, config: Config) -> None:
        """`path` is the supervisor's control socket."""
        # Set by the API server.
        self.on_loaded: Callable[[str, ModelInfo], None] = lambda model, info: None
        self.on_move: OnMove = lambda model, reason, same: None
        self.on_route: OnRoute = lambda model, known: None
        self._path, self._config = path, config
        remote = config.worker_host or config.cluster
        self._tls = ClusterFolder(Path(config.cluster_dir)).files("client") if remote else None
        self._models: dict[str, tuple[str, AcquireModel]] = {}  # by model id, with the key of its worker
        self._engines: dict[str, ModelEngine] = {}  # by worker key
        self._states: dict[str, WorkerState] = {}
        self._suspects: dict[str, Mapping[bytes, int]] = {}  # by worker key
        self._probes: dict[str, ProbeClient] = {}  # by the path of their sockets
        self._fleet = FleetStatus()
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
        """Replace the configured models: load those to be preloaded, and release the workers of removed ones.

        On a cluster, the supervisor gets to know all of them, so that it takes over the replicas that run.
        """
        before = {key for key, _ in self._models.values()}
        requests = {spec.id: acquire_request(spec, self._config) for spec in specs}
        keys = {model: worker_key(acquire.options) for model, acquire in requests.items()}
        shared: dict[str, AcquireModel] = {}
        for model, acquire in requests.items():
            key = keys[model]
            shared[key] = merge_requests(shared[key], acquire) if key in shared else acquire
        self._models = {model: (key, shared[key]) for model, key in keys.items()}
        now = set(shared)
        for key, engine in self._engines.items():
            engine.replicas.removed = key not in now
        for key, acquire in shared.items():
            if key in self._engines:
                self._engines[key].replicas.set_acquire(acquire)
        for key in before - now:
            self._send(ReleaseModel(key))
        for key, acquire in shared.items():
            # On a cluster, this only announces those that are not kept loaded: their replicas may run already.
            if (acquire.restart or self._config.cluster) and key not in before:
                self._send(msgspec.structs.replace(acquire, opportunistic=True))

    def engine(self, model: str) -> Engine:
        try:
            key, acquire = self._models[model]
        except KeyError:
            message = f"The model {model!r} is no longer configured"
            raise EngineUnavailable(message, code="model_unavailable") from None
        engine = self._engines.get(key)
        if engine is None:
            engine = self._engines[key] = ModelEngine(
                model,
                acquire,
                self._send,
                self._config.load_timeout,
                self._loaded_callback(key),
                lambda reason, same: self.on_move(model, reason, same),
                lambda known: self.on_route(model, known),
                queue_timeout=self._config.queue_timeout if self._config.cluster else 0.0,
                tls=self._tls,
            )
            engine.suspects = self._suspects.get(key, {})
            if state := self._states.get(key):
                engine.update(state)
        return engine

    async def check_grammar(
        self, model: str, grammar: Grammar, tenant: str, cache_key: bytes, *, background: bool = False
    ) -> int:
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
        return await probe.check(grammar, tenant, cache_key, background=background)

    def status(self, model: str) -> LoadStatus:
        key, _ = self._models.get(model, ("", None))
        state = self._states.get(key)
        return state.status if state else "cold"

    def reason(self, model: str) -> str:
        key, _ = self._models.get(model, ("", None))
        state = self._states.get(key)
        return state.reason if state else ""

    def loading(self, model: str) -> ModelLoading | None:
        key, _ = self._models.get(model, ("", None))
        state = self._states.get(key)
        if state is None or state.loading is None:
            return None
        return ModelLoading(state.loading, max(0.0, time.monotonic() - state.loading_since))

    def worker_counts(self, model: str) -> WorkerCounts:
        key, _ = self._models.get(model, ("", None))
        state = self._states.get(key)
        return WorkerCounts(state.hangs, state.crashes) if state else WorkerCounts()

    def replicas(self, model: str) -> Sequence[ReplicaState]:
        key, _ = self._models.get(model, ("", None))
        state = self._states.get(key)
        return state.replicas if state else ()

    def keep(self, model: str, idle_timeout: float) -> None:
        if model in self._models:
            self._send(KeepModel(self._models[model][0], idle_timeout))

    def idle_timeout(self, model: str) -> float:
        key, _ = self._models.get(model, ("", None))
        state = self._states.get(key)
        return state.idle_timeout if state else 0.0

    def drain(self, replica: str, grace: float) -> None:
        self._send(DrainReplica(replica, grace))

    def fleet(self) -> FleetStatus:
        return self._fleet

    def drain_node(self, node: str, grace: float | None) -> None:
        self._send(DrainNode(node, grace))

    def set_pool(self, pool: str, open: bool | None) -> None:
        self._send(SetPool(pool, open))

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
        elif isinstance(report, FleetStatus):
            self._fleet = report
        else:
            self._suspects[report.key] = report.levels
            if engine := self._engines.get(report.key):
                engine.suspects = report.levels

    def _handle_state(self, state: WorkerState) -> None:
        self._states[state.key] = state
        if state.status == "loaded" and state.key not in self._engines:
            # Connect before the first request: the replicas tell how long a sequence may be.
            if model := next((model for model, (key, _) in self._models.items() if key == state.key), None):
                self.engine(model)
        elif engine := self._engines.get(state.key):
            engine.update(state)
            if engine.replicas.removed and state.status == "cold" and not state.replicas:
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
