"""The replicas of this machine, as the controller sees them: one node, on which the worker manager runs them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from syringa.engine.processes.handle import WorkerHandle
from syringa.engine.processes.manager import WorkerManager
from syringa.engine.processes.model_workers import ModelWorkers
from syringa.fleet.decisions import ModelTarget
from syringa.fleet.provider import LOCAL_NODE, Node, Replica, ReplicaCondition, ReplicaEvent


class LocalProvider:
    """A `ReplicaProvider` of one node. Memory, eviction and the restart of what dies are up to the manager."""

    def __init__(self, workers: WorkerManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers, self._clock = workers, clock

    def nodes(self) -> Sequence[Node]:
        return [Node(LOCAL_NODE)]

    def replicas(self) -> Sequence[Replica]:
        now = self._clock()
        return [_observe(each, now) for model in self._workers.models for each in model.replicas if _exists(each)]

    def start(self, model: str, node: str) -> str:
        return self._workers.add_replica(model)

    def stop(self, replica: str, grace: float) -> None:
        self._workers.drain(replica, grace)

    def events(self) -> Sequence[ReplicaEvent]:
        return self._workers.take_events()

    def targets(self) -> Sequence[ModelTarget]:
        """Return what is wanted of the models that are loaded or in use."""
        now = self._clock()
        return [
            ModelTarget(model.key, model.name, model.min_replicas, model.max_replicas, _is_active(model, now))
            for model in self._workers.models
        ]


def _exists(worker: WorkerHandle) -> bool:
    return worker.phase not in ("cold", "failed")


def _is_active(model: ModelWorkers, now: float) -> bool:
    """Return whether a model should have its replicas, also if one of them was drained."""
    if model.released or model.failed:
        return False
    return bool(model.active_replicas) or any(each.drained and each.is_needed(now) for each in model.replicas)


def _observe(worker: WorkerHandle, now: float) -> Replica:
    condition: ReplicaCondition = "starting"
    if worker.phase == "unloading":
        condition = "draining"
    elif worker.phase == "ready":
        condition = "hanging" if worker.hanging else "ready"
    stats = worker.stats
    return Replica(
        id=worker.id,
        model=worker.model.key,
        condition=condition,
        running=stats.running,
        waiting=stats.waiting - stats.preparing,
        idle_seconds=0.0 if worker.busy or condition != "ready" else now - max(worker.used_at, worker.ready_at),
    )
