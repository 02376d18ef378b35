"""What the supervisor knows of one model on this machine: the replicas that it has, and what memory it needs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from syringa.engine.interface import LoadStatus, ReplicaState
from syringa.engine.processes import eviction
from syringa.engine.processes.model_state import ModelState, furthest
from syringa.engine.worker.options import WorkerOptions
from syringa.types import LoadProgress

if TYPE_CHECKING:
    from syringa.engine.processes.handle import WorkerHandle


class ModelWorkers(ModelState):
    def __init__(
        self,
        key: str,
        options: WorkerOptions,
        memory_needs: Mapping[eviction.Device, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(key, options, clock)
        self.memory_needs = memory_needs
        self.replicas: list[WorkerHandle] = []  # the first is there as long as the model is known
        self.planned_free = 0  # bytes of memory that its next worker was planned for; 0: what is free at its start
        self.retryable = True  # whether another start may succeed without intervention
        self.insufficient_free = self.insufficient_when_empty = 0  # see `eviction.PendingModel`
        self.insufficient_reason = ""

    @property
    def active_replicas(self) -> list[WorkerHandle]:
        """The replicas that serve requests or are about to."""
        return [each for each in self.replicas if each.phase in ("queued", "loading", "ready") and not each.drained]

    @property
    def status(self) -> LoadStatus:
        """A model that is requested again while it is unloaded is "loading"."""
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
    def reason(self) -> str:
        return "" if self.status == "loaded" else next((each.reason for each in self.replicas if each.reason), "")

    @property
    def progress(self) -> LoadProgress:
        return furthest(each.progress for each in self.replicas if each.phase == "loading")

    def replica_states(self) -> list[ReplicaState]:
        return [each.state() for each in self.replicas if each.phase not in ("cold", "failed")]

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
