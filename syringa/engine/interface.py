"""The interface of engines. Other layers use nothing else of an engine, and do not know which one it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from syringa.fleet.provider import LOCAL_NODE
from syringa.fleet.status import FleetStatus, NodeStatus
from syringa.types import (
    EmbeddingRequest,
    EmbeddingResult,
    EngineDelta,
    EngineRequest,
    EngineStats,
    ModelInfo,
    ModelLoading,
)

DeltaHandler = Callable[[EngineDelta], bool]
"""Handle a delta, and return whether no more deltas are wanted. An exception ends the request.

Called from the event loop outside of any task, because waking a task for each token of each stream would cost more than
handling the token.
"""

LoadStatus = Literal["loaded", "hanging", "loading", "cold", "failed"]
"""Whether a model is in memory. A cold model is loaded when a request needs it; a hanging one does not respond."""

NOT_READY: frozenset[LoadStatus] = frozenset(("hanging", "loading", "failed"))
"""The states of a model that should answer requests and does not. A cold model is loaded on demand."""


ReplicaStatus = Literal["queued", "fetching", "loading", "ready", "hanging", "draining", "ended"]

MoveReason = Literal["drain", "crash", "silence", "balance"]
"""Why a request goes on at another replica: its replica was drained, died, did not respond, or was busy, and another
one has become ready."""


class WorkerCounts(NamedTuple):
    """What the supervisor has counted of a model's workers since the server was started."""

    hangs: int = 0  # times that one did not respond
    crashes: int = 0  # times that one died or was killed because it hung


class ReplicaState(msgspec.Struct, frozen=True, array_like=True):
    """The state of one replica of a model."""

    id: str  # unique in the life of the server
    status: ReplicaStatus
    address: str = ""  # "unix:PATH" or "tcp:HOST:PORT"; of ready, hanging and draining replicas
    node: str = "local"
    fingerprint: str = ""  # replicas with the same one give the same outputs, bit by bit
    reason: str = ""
    grace: float = 0.0  # of a draining replica: the seconds that were granted when draining began


class ReadyModel(NamedTuple):
    """A model that can run requests."""

    info: ModelInfo
    waited: float = 0.0  # seconds of the wait for it that count toward `queue_timeout`: no replica was being started


class Engine(Protocol):
    """Generate token ids from token ids. An engine knows no text, no roles and no endpoints."""

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would run."""
        ...

    async def wait_ready(self, *, background: bool = False) -> ReadyModel:
        """Wait until the model is loaded, for a request that may run in the `background`.

        The request is submitted as one that has `waited`. Raises `EngineUnavailable` if the model cannot be loaded.
        """
        ...

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        """Run `request`, its choices interleaved, until each has finished or `on_delta` wants no more.

        Cancellation and errors abort what is still running. Raises `EngineOverloaded` when the queue is full, and
        `EngineUnavailable` when the engine dies, at any time.
        """
        ...

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Compute the vectors of `request`. Cancellation drops what has not run.

        Raises as `submit` does, and `InvalidRequest` if the model generates text; `submit` raises it if it does not.
        """
        ...

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Stop one choice, or all, at the next step; the deltas of the others go on.

        Unknown ids are ignored: the request may just have finished.
        """
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop the engine and free its memory."""
        ...


class EngineProvider(Protocol):
    """The engines of a server's models."""

    def engine(self, model: str) -> Engine:
        """Return the engine of a configured model by its id. If it is not `ready`, `wait_ready` loads the model.

        Raises `EngineUnavailable` for a model that is no longer configured.
        """
        ...

    def status(self, model: str) -> LoadStatus:
        """Return the load status of a model, without waiting."""
        ...

    def reason(self, model: str) -> str:
        """Return why a model waits, hangs or failed, without waiting. It may name files of the server."""
        ...

    def loading(self, model: str) -> ModelLoading | None:
        """Return how far a model is in being loaded, without waiting; None: it is not, or that is not known."""
        ...

    def worker_counts(self, model: str) -> WorkerCounts:
        """Return what was counted of a model's workers, without waiting."""
        ...

    def replicas(self, model: str) -> Sequence[ReplicaState]:
        """Return the replicas of a model, without waiting."""
        ...

    def keep(self, model: str, idle_timeout: float) -> None:
        """Unload a model after so many idle seconds, or never if 0, until it is loaded again."""
        ...

    def idle_timeout(self, model: str) -> float:
        """Return the idle seconds after which a model is unloaded, without waiting; 0: never."""
        ...

    def drain(self, replica: str, grace: float) -> None:
        """End a replica: its requests finish within `grace` seconds or move to another one."""
        ...

    def fleet(self) -> FleetStatus:
        """Return the nodes and pools, without waiting."""
        ...

    def drain_node(self, node: str, grace: float | None) -> None:
        """Take a node out of use. `grace`: as in `drain`; None: that of its pool."""
        ...

    def set_pool(self, pool: str, open: bool | None) -> None:
        """Open or close a pool, whatever its schedule says; None: let it follow its schedule again."""
        ...


class SingleEngineProvider:
    """A provider of one engine for every model id."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def engine(self, model: str) -> Engine:
        return self._engine

    def status(self, model: str) -> LoadStatus:
        return "loaded" if self._engine.ready else "loading"

    def reason(self, model: str) -> str:
        return ""

    def loading(self, model: str) -> ModelLoading | None:
        return None

    def worker_counts(self, model: str) -> WorkerCounts:
        return WorkerCounts()

    def replicas(self, model: str) -> Sequence[ReplicaState]:
        return ()

    def keep(self, model: str, idle_timeout: float) -> None:
        """Do nothing: the engine is not unloaded."""

    def idle_timeout(self, model: str) -> float:
        return 0.0

    def drain(self, replica: str, grace: float) -> None:
        """Do nothing: there are no replicas."""

    def fleet(self) -> FleetStatus:
        return FleetStatus([NodeStatus(LOCAL_NODE, "ready")])

    def drain_node(self, node: str, grace: float | None) -> None:
        """Do nothing: the only node is this machine."""

    def set_pool(self, pool: str, open: bool | None) -> None:
        """Do nothing: there are no pools."""
