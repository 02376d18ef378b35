"""What the supervisor knows of one model whose replicas run on a cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Literal, cast

from syringa.engine.interface import LoadStatus, ReplicaState
from syringa.engine.processes.bridge_provider import BridgeProvider
from syringa.engine.processes.cluster_replica import ClusterReplica
from syringa.engine.processes.control import AcquireModel, WorkerState
from syringa.engine.processes.memory import memory_needs
from syringa.engine.processes.model_state import ModelState, furthest
from syringa.engine.worker.options import WorkerOptions
from syringa.fleet.decisions import ModelTarget
from syringa.types import LoadProgress

CPU_DTYPES = ("int8", "gguf", "fp32")


class FleetModel(ModelState):
    """A model, and the replicas that it has on the cluster."""

    def __init__(
        self, key: str, options: WorkerOptions, provider: BridgeProvider, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(key, options, clock)
        self.pools: Sequence[str] = ()
        self.memory = memory_needs(options)["cpu"]
        self.wanted = False  # whether it should have replicas: it is kept loaded, or in use
        self.warm = False  # whether it has had a ready replica since it was wanted
        self.used_at = -math.inf  # when its replicas last had something to do, while one was ready
        self.failure = ""  # why it cannot be loaded, until it is tried again
        self.failed_at = -math.inf  # when a replica last ended that should not have
        self.wait_reason = ""  # why it has no replica yet
        self.published: WorkerState | None = None
        self._provider = provider

    def configure(self, request: AcquireModel) -> None:
        super().configure(request)
        self.pools = tuple(request.pools)

    @property
    def replicas(self) -> list[ClusterReplica]:
        return self._provider.of_model(self.key)

    @property
    def status(self) -> LoadStatus:
        phases = {each.phase for each in self.replicas}
        if "ready" in phases:
            return "loaded"
        if "hanging" in phases:
            return "hanging"
        if phases & {"queued", "fetching", "loading"}:
            return "loading"
        if self.failure:
            return "failed"
        return "loading" if self.wanted else "cold"

    @property
    def reason(self) -> str:
        status = self.status
        if status == "failed":
            return self.failure
        if status in ("loaded", "cold"):
            return ""
        return next((each.report.reason for each in self.replicas if each.report.reason), self.wait_reason)

    @property
    def progress(self) -> LoadProgress:
        return furthest(each.progress for each in self.replicas)

    def replica_states(self) -> list[ReplicaState]:
        return [each.state() for each in self.replicas]

    def target(self) -> ModelTarget:
        options = self.options
        device = options.device
        if device == "auto" and options.engine == "syringa" and options.dtype in CPU_DTYPES:
            device = "cpu"
        return ModelTarget(
            self.key,
            self.name,
            self.min_replicas,
            self.max_replicas,
            active=self.wanted and not self.failure and not self.released,
            pools=self.pools,
            gpus=options.gpus,
            cpus=options.threads,
            memory=self.memory,
            device=cast("Literal['auto', 'cpu', 'cuda']", device),
        )
