"""The controller: how many replicas of each model there should be, decided from a snapshot once a second.

`decide` is a pure function: it needs neither processes nor a clock, and each decision has a reason, which is logged.
What runs the replicas is a `ReplicaProvider`. A provider that is shared by several servers needs a lease, so that one
controller decides at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syringa.fleet.provider import Node, Replica, ReplicaProvider

logger = logging.getLogger("syringa.fleet")

INTERVAL_SECONDS = 1.0
SCALE_UP_SECONDS = 2.0  # requests have waited for so long, without a pause
SCALE_DOWN_SECONDS = 60.0  # a replica above the minimum has been idle for so long
SCALE_DOWN_GRACE = 30.0  # for a request that reached it at that moment
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 300.0  # after a replica failed to start or died; doubled each time


@dataclass(frozen=True)
class ModelTarget:
    """What is wanted of a model."""

    key: str
    name: str  # for logs
    min_replicas: int = 1
    max_replicas: int = 1
    active: bool = True  # whether it is loaded, being loaded or in use; otherwise the first request starts a replica


@dataclass(frozen=True)
class ModelHistory:
    """What the controller remembers of a model from one snapshot to the next."""

    waiting_since: float | None = None  # requests have waited ever since
    failures: int = 0  # in a row
    failed_at: float = -math.inf


@dataclass(frozen=True)
class FleetSnapshot:
    now: float
    models: Sequence[ModelTarget]
    replicas: Sequence[Replica]
    nodes: Sequence[Node]
    history: dict[str, ModelHistory]  # by key of the model


@dataclass(frozen=True)
class StartReplica:
    model: str
    node: str
    reason: str


@dataclass(frozen=True)
class StopReplica:
    replica: str
    grace: float
    reason: str


Decision = StartReplica | StopReplica


def decide(snapshot: FleetSnapshot) -> list[Decision]:
    """Return what is to be started and stopped. At most one replica of a model is added to those that it needs."""
    decisions: list[Decision] = []
    counts = {node.name: 0 for node in snapshot.nodes if not node.draining}
    limits = {node.name: node.max_replicas or math.inf for node in snapshot.nodes}
    for replica in snapshot.replicas:
        if replica.node in counts:
            counts[replica.node] += 1
    draining_nodes = {node.name for node in snapshot.nodes if node.draining}
    for model in snapshot.models:
        history = snapshot.history.get(model.key, ModelHistory())
        own = [each for each in snapshot.replicas if each.model == model.key and each.condition != "draining"]
        for replica in own:
            if replica.node in draining_nodes:
                decisions.append(StopReplica(replica.id, SCALE_DOWN_GRACE, f"node {replica.node} is drained"))
        own = [each for each in own if each.node not in draining_nodes]
        starts, reason = _missing(model, own, history, snapshot.now)
        for _ in range(starts):
            free = [name for name, count in counts.items() if count < limits[name]]
            if not free:
                break
            node = min(free, key=lambda name: (counts[name], name))
            counts[node] += 1
            decisions.append(StartReplica(model.key, node, reason))
        if not starts and (surplus := _surplus(model, own)) is not None:
            reason = f"idle for {surplus.idle_seconds:.0f} s, {len(own)} replicas, min={model.min_replicas}"
            decisions.append(StopReplica(surplus.id, SCALE_DOWN_GRACE, reason))
    return decisions


def _missing(model: ModelTarget, replicas: Sequence[Replica], history: ModelHistory, now: float) -> tuple[int, str]:
    """Return how many replicas to start, and why."""
    if not model.active or now < history.failed_at + backoff(history.failures):
        return 0, ""
    if len(replicas) < model.min_replicas:
        return model.min_replicas - len(replicas), f"{len(replicas)} replicas, min={model.min_replicas}"
    waits = history.waiting_since is not None and now - history.waiting_since >= SCALE_UP_SECONDS
    all_ready = all(each.condition == "ready" for each in replicas)
    if waits and all_ready and len(replicas) < model.max_replicas:
        waiting = sum(each.waiting for each in replicas)
        return 1, f"{waiting} requests wait, {len(replicas)} replicas, max={model.max_replicas}"
    return 0, ""


def _surplus(model: ModelTarget, replicas: Sequence[Replica]) -> Replica | None:
    """Return the replica that is no longer needed: above the maximum, or idle for long above the minimum."""
    ready = [each for each in replicas if each.condition == "ready"]
    if len(ready) <= model.min_replicas or not ready:
        return None
    most_idle = max(ready, key=lambda each: each.idle_seconds)
    if len(replicas) > model.max_replicas or most_idle.idle_seconds >= SCALE_DOWN_SECONDS:
        return most_idle
    return None


def backoff(failures: int) -> float:
    """Return the seconds to wait after so many failures in a row."""
    return min(MIN_BACKOFF_SECONDS * 2 ** min(failures - 1, 32), MAX_BACKOFF_SECONDS) if failures else 0.0


class Controller:
    """Applies the decisions to a provider. Call `tick` often; it decides once per interval."""

    def __init__(
        self,
        provider: ReplicaProvider,
        targets: Callable[[], Sequence[ModelTarget]],
        clock: Callable[[], float],
        holds_lease: Callable[[], bool] = lambda: True,
    ) -> None:
        """`holds_lease` says whether this controller may decide; the one without the lease waits."""
        self._provider, self._targets, self._clock, self._holds_lease = provider, targets, clock, holds_lease
        self._history: dict[str, ModelHistory] = {}
        self._next_at = -math.inf

    def tick(self) -> None:
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + INTERVAL_SECONDS
        if not self._holds_lease():
            return
        snapshot = self._observe(now)
        names = {model.key: model.name for model in snapshot.models}
        for decision in decide(snapshot):
            match decision:
                case StartReplica(model, node, reason):
                    logger.info("replica is started: model=%s node=%s reason=%r", names[model], node, reason)
                    self._provider.start(model, node)
                case StopReplica(replica, grace, reason):
                    logger.info("replica is stopped: replica=%s reason=%r", replica, reason)
                    self._provider.stop(replica, grace)

    def _observe(self, now: float) -> FleetSnapshot:
        models, replicas = self._targets(), self._provider.replicas()
        known = {model.key for model in models}
        history = {key: each for key, each in self._history.items() if key in known}
        for event in self._provider.events():
            before = history.get(event.model, ModelHistory())
            if event.kind == "failed":
                after = ModelHistory(before.waiting_since, before.failures + 1, now)
            else:
                after = ModelHistory(before.waiting_since) if event.kind == "ready" else before
            if event.model in known:
                history[event.model] = after
        for model in models:
            before = history.get(model.key, ModelHistory())
            waits = any(each.waiting for each in replicas if each.model == model.key)
            since = (now if before.waiting_since is None else before.waiting_since) if waits else None
            history[model.key] = ModelHistory(since, before.failures, before.failed_at)
        self._history = history
        return FleetSnapshot(now, models, replicas, self._provider.nodes(), history)
