"""What the supervisor keeps of a model, wherever its replicas run, and the interface of what manages them."""

from __future__ import annotations

import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, get_args

from syringa.engine.interface import LoadStatus, ReplicaState
from syringa.engine.processes import managed_process
from syringa.engine.processes.control import AcquireModel, SupervisorReport, Suspects, WorkerState
from syringa.engine.processes.suspects import SuspectTable
from syringa.engine.worker.options import WorkerOptions
from syringa.fleet.status import FleetStatus
from syringa.types import LoadPhase, LoadProgress, ModelInfo

QUEUED = LoadProgress("queued")

_MAX_NAME = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def furthest(progress: Iterable[LoadProgress]) -> LoadProgress:
    """Return the progress of the replica that is ahead; without any, that of a model that waits for one."""
    phases: tuple[LoadPhase, ...] = get_args(LoadPhase)
    return max(progress, key=lambda each: (phases.index(each.phase), each.fraction or 0.0), default=QUEUED)


class ModelState(ABC):
    def __init__(self, key: str, options: WorkerOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.key, self.options = key, options
        self.name = options.model  # for logs
        self.min_replicas = self.max_replicas = 1
        self.idle_timeout, self.restart, self.released = 0.0, False, False
        self.info: ModelInfo | None = None  # of the replica that was loaded last
        self.requested_at = -math.inf
        self.retry_at = 0.0
        self.failed_starts = 0  # in a row
        self.failure_reported = False  # whether the worker printed why it failed
        self.hangs = self.crashes = 0  # see `WorkerCounts`
        self.suspects = SuspectTable(clock)
        self._backoff = managed_process.MIN_BACKOFF_SECONDS
        self._clock = clock
        self._loading_since: float | None = None

    def configure(self, request: AcquireModel) -> None:
        self.name = request.name or self.name
        self.idle_timeout, self.released = request.idle_timeout, False
        self.restart = request.restart or self.restart
        self.min_replicas, self.max_replicas = request.min_replicas, max(request.min_replicas, request.max_replicas)

    @property
    def short_name(self) -> str:
        """The name in the ids of its replicas, which are part of URLs."""
        return _UNSAFE.sub("-", Path(self.name).name)[:_MAX_NAME] or "model"

    @property
    @abstractmethod
    def status(self) -> LoadStatus:
        """The status for API servers."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why the model waits, hangs or failed."""

    @property
    @abstractmethod
    def progress(self) -> LoadProgress:
        """How far it is in being loaded; of several replicas, the one that is ahead. For the status "loading"."""

    @abstractmethod
    def replica_states(self) -> list[ReplicaState]:
        """Return the replicas that have not ended."""

    @property
    def starts_server(self) -> bool:
        """Whether it is the server's default model and was never loaded: the server ends if it cannot be."""
        return self.restart and self.info is None

    @property
    def failed(self) -> bool:
        return self.status == "failed"

    def state(self) -> WorkerState:
        """Return what API servers know of it. Called with every change, so it knows since when the model loads."""
        status = self.status
        if status != "loading":
            self._loading_since = None
        elif self._loading_since is None:
            self._loading_since = self._clock()
        return WorkerState(
            self.key,
            status,
            self.reason,
            self.hangs,
            self.crashes,
            self.replica_states(),
            self.idle_timeout,
            self.progress if status == "loading" else None,
            self._loading_since or 0.0,
        )

    def suspects_message(self) -> Suspects:
        return Suspects(self.key, self.suspects.levels())

    def reset_back_off(self) -> None:
        """Let the next failure delay a start as little as the first one."""
        self._backoff = managed_process.MIN_BACKOFF_SECONDS

    def back_off(self, now: float, healthy_since: float | None = None) -> None:
        """Delay the next start after a failure. The delay doubles, unless the worker had been healthy for long."""
        if healthy_since is not None and now - healthy_since > managed_process.HEALTHY_SECONDS:
            self.reset_back_off()
        self.retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, managed_process.MAX_BACKOFF_SECONDS)


class ReplicaManager(Protocol):
    """Runs the replicas of models. Called by the supervisor from its only thread; only `stop` blocks."""

    def acquire(self, request: AcquireModel, planned_free: int = 0) -> ModelState:
        """Return a model, and see to it that a replica of it is started.

        `planned_free`: the bytes of this machine's memory that the model was planned for; 0: not planned.
        """
        ...

    def release(self, key: str) -> None:
        """Unload the replicas of a model that is no longer configured, once they are idle."""
        ...

    def keep(self, key: str, idle_timeout: float) -> None:
        """Set the idle timeout of a loaded model, until it is loaded again."""
        ...

    def drain(self, id: str, grace: float) -> bool:
        """End a replica: its requests finish within `grace` seconds or move. Return whether there is such a replica."""
        ...

    def drain_node(self, name: str, grace: float | None) -> None:
        """Take a node out of use. `grace`: as in `drain`; None: that of its pool."""
        ...

    def set_pool(self, name: str, open: bool | None) -> None:
        """Open or close a pool, whatever its schedule says; None: let it follow its schedule again."""
        ...

    def fleet_status(self) -> FleetStatus:
        """Return what operators see of nodes and pools."""
        ...

    def clear_suspect(self, key: str, fingerprint: bytes) -> None:
        """Forget a suspected request that was answered."""
        ...

    def reports(self) -> list[SupervisorReport]:
        """Return what a new API server has to know."""
        ...

    def processes(self) -> dict[str, int]:
        """Return the process ids of workers on this machine, by model."""
        ...

    def tick(self) -> None:
        """Go on with what has begun."""
        ...

    def stop(self, grace: float, *, leave_replicas: bool = False) -> None:
        """End what runs with this server. What has not ended after `grace` seconds is killed.

        `leave_replicas`: but not what can outlive this process, which has failed.
        """
        ...
