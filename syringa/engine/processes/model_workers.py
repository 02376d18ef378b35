"""What the supervisor knows of one model: how many replicas it should have, and those that it has."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from syringa.engine.interface import LoadStatus
from syringa.engine.processes import eviction, managed_process
from syringa.engine.processes.control import AcquireModel, Suspects, WorkerState
from syringa.engine.processes.suspects import SuspectTable
from syringa.engine.worker.options import WorkerOptions
from syringa.types import ModelInfo

if TYPE_CHECKING:
    from syringa.engine.processes.handle import WorkerHandle

_MAX_NAME = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class ModelWorkers:
    def __init__(
        self,
        key: str,
        options: WorkerOptions,
        memory_needs: Mapping[eviction.Device, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key, self.options, self.memory_needs = key, options, memory_needs
        self.name = options.model  # for logs
        self.min_replicas = self.max_replicas = 1
        self.idle_timeout, self.restart, self.released = 0.0, False, False
        self.replicas: list[WorkerHandle] = []  # the first is there as long as the model is known
        self.info: ModelInfo | None = None  # of the replica that was loaded last
        self.planned_free = 0  # bytes of memory that its next worker was planned for; 0: what is free at its start
        self.requested_at = -math.inf
        self.retry_at = 0.0
        self.failed_starts = 0  # in a row
        self.retryable = True  # whether another start may succeed without intervention
        self.failure_reported = False  # whether the worker printed why it failed
        self.insufficient_free = self.insufficient_when_empty = 0  # see `eviction.PendingModel`
        self.insufficient_reason = ""
        self.hangs = self.crashes = 0  # see `WorkerCounts`
        self.suspects = SuspectTable(clock)
        self._backoff = managed_process.MIN_BACKOFF_SECONDS

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
    def active_replicas(self) -> list[WorkerHandle]:
        """The replicas that serve requests or are about to."""
        return [each for each in self.replicas if each.phase in ("queued", "loading", "ready") and not each.drained]

    @property
    def status(self) -> LoadStatus:
        """The status for API servers. A model that is requested again while it is unloaded is "loading"."""
        phases = {each.phase for each in self.replicas}
        if any(each.phase == "ready" and not each.hanging for each in self.replicas):
            return "loaded"
        if "ready" in phases:
            return "hanging"
        requested_again = any(
            each.phase == "unloading" and self.requested_at > each.unload_requested_at for each in self.replicas
        )
        if phases & {"queued", "loading"} or requested_again:
            return "loading"
        return "failed" if "failed" in phases else "cold"

    @property
    def failed(self) -> bool:
        return self.status == "failed"

    @property
    def reason(self) -> str:
        """Why the model waits, hangs or failed."""
        return "" if self.status == "loaded" else next((each.reason for each in self.replicas if each.reason), "")

    def state(self) -> WorkerState:
        listed = [each.state() for each in self.replicas if each.phase not in ("cold", "failed")]
        return WorkerState(self.key, self.status, self.reason, self.hangs, self.crashes, listed)

    def suspects_message(self) -> Suspects:
        return Suspects(self.key, self.suspects.levels())

    def back_off(self, now: float, healthy_since: float | None = None) -> None:
        """Delay the next start after a failure. The delay doubles, unless the worker had been healthy for long."""
        if healthy_since is not None and now - healthy_since > managed_process.HEALTHY_SECONDS:
            self._backoff = managed_process.MIN_BACKOFF_SECONDS
        self.retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, managed_process.MAX_BACKOFF_SECONDS)

    def pending_model(self, device: eviction.Device, gpu: int) -> eviction.PendingModel:
        return eviction.PendingModel(
            model=self.key,
            device=device,
            gpu=gpu,
            estimate=self.memory_needs[device],
            insufficient_free=self.insufficient_free,
            insufficient_when_empty=self.insufficient_when_empty,
        )

    def resident_model(self, now: float) -> eviction.ResidentModel | None:
        """Return the model with all of its replicas, for its idle timeout; None if it has no process."""
        running = [each.resident_model(now) for each in self.replicas if each.process is not None]
        if not running:
            return None
        return eviction.ResidentModel(
            key=self.key,
            model=self.key,
            used_at=max(each.used_at for each in running),
            busy=any(each.busy for each in running),
            state="loaded" if all(each.state == "loaded" for each in running) else "loading",
            idle_timeout=self.idle_timeout,
            released=self.released,
        )
