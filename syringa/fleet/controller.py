"""The controller: how many replicas of each model there should be, and where, decided from a snapshot once a second.

The decisions are made by `plan`, a pure function; each has a reason, which is logged. What runs the replicas is a
`ReplicaProvider`. A provider that is shared by several servers needs a lease, so that one controller decides at a time.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from syringa.fleet.decisions import (
    EVICTIONS,
    NO_NODE_HISTORY,
    NODE_MEMORY_SECONDS,
    FleetSnapshot,
    ModelHistory,
    ModelTarget,
    NodeHistory,
    Plan,
    PoolHistory,
    StartReplica,
    StopReplica,
    backoff,
    pool_is_open,
)
from syringa.fleet.fleet_view import describe
from syringa.fleet.overrides import PoolOverrides
from syringa.fleet.planner import plan
from syringa.fleet.pools import IdleThresholds, PoolSpec, PoolTarget, owner_activity, with_default
from syringa.fleet.provider import Node, Replica, ReplicaEvent, ReplicaProvider
from syringa.fleet.schedule import next_change
from syringa.fleet.status import FleetMove, FleetStatus, RecoveryTimes
from syringa.types import HistogramCounts

logger = logging.getLogger("syringa.fleet")

INTERVAL_SECONDS = 1.0
MAX_MOVES = 50  # that operators see


class Controller:
    """Applies the decisions to a provider. Call `tick` often; it decides once per interval."""

    def __init__(
        self,
        provider: ReplicaProvider,
        targets: Callable[[], Sequence[ModelTarget]],
        clock: Callable[[], float],
        holds_lease: Callable[[], bool] = lambda: True,
        *,
        pools: Sequence[PoolSpec] = (),
        overrides: PoolOverrides | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`holds_lease` says whether this controller may decide; the one without the lease waits.

        `overrides`: what operators have opened and closed, by default kept in memory only. `wall`: the Unix time, for
        the schedules of pools.
        """
        self._provider, self._targets, self._clock, self._holds_lease = provider, targets, clock, holds_lease
        self._pools = [each.spec for each in with_default([PoolTarget(spec) for spec in pools])]
        self._wall = wall
        self._overrides = PoolOverrides() if overrides is None else overrides
        self._history: dict[str, ModelHistory] = {}
        self._node_history: dict[str, NodeHistory] = {}
        self._pool_history: dict[str, PoolHistory] = {}
        self._started_on: dict[str, str] = {}  # the nodes of replicas since the last snapshot, by their ids
        self._next_at = -math.inf
        self._snapshot = FleetSnapshot(clock(), (), (), (), {}, wall=wall())
        self._plan = Plan([], {})
        self._evictions: Counter[str] = Counter(dict.fromkeys(EVICTIONS, 0))
        self._recovery = RecoveryTimes()
        self._moves: deque[FleetMove] = deque(maxlen=MAX_MOVES)

    @property
    def shortages(self) -> Mapping[str, str]:
        """Why models have fewer replicas than their minimum for want of room, by key."""
        return self._plan.shortages

    def backs_off(self, key: str) -> bool:
        """Return whether nothing is started for a model because its replicas have failed."""
        history = self._history.get(key, ModelHistory())
        return self._clock() < history.failed_at + backoff(history.failures)

    @property
    def recovery(self) -> HistogramCounts:
        """How long it took until models had their minimum of replicas again."""
        return self._recovery.counts()

    def set_pool(self, name: str, open: bool | None) -> bool:
        """Open or close a pool, whatever its schedule says; None: by its schedule. Return whether there is such one."""
        if all(spec.name != name for spec in self._pools):
            return False
        action = "follows its schedule" if open is None else "is opened" if open else "is closed"
        logger.info("pool %s: pool=%s", action, name)
        self._overrides.set(name, open)
        self._next_at = -math.inf
        return True

    def status(self) -> FleetStatus:
        """Return what operators see of nodes and pools, as of the last decision."""
        return describe(self._snapshot, self._plan, dict(self._evictions), self.recovery, list(self._moves))

    def tick(self) -> None:
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + INTERVAL_SECONDS
        self._snapshot = self._observe(now)
        if not self._holds_lease():
            self._plan = Plan([], {})
            return
        self._plan = plan(self._snapshot)
        names = {model.key: model.name for model in self._snapshot.models}
        for decision in self._plan.decisions:
            match decision:
                case StartReplica(model, node, reason, _, replaces):
                    logger.info("replica is started: model=%s node=%s reason=%r", names[model], node, reason)
                    id = self._provider.start(model, node)
                    self._started_on[id] = node
                    self._moves.appendleft(FleetMove(self._snapshot.wall, "start", id, names[model], node, reason))
                    if replaces:
                        self._history[model] = dataclasses.replace(
                            self._history[model], replaces=replaces, replacement=id
                        )
                case StopReplica(id, grace, reason, cause):
                    found = next((each for each in self._snapshot.replicas if each.id == id), Replica(id, ""))
                    where = f"replica={id} node={found.node} sequences={found.running}"
                    logger.info("replica is stopped: %s grace=%g reason=%r", where, grace, reason)
                    self._provider.stop(id, grace)
                    name = names.get(found.model, "")
                    self._moves.appendleft(FleetMove(self._snapshot.wall, "stop", id, name, found.node, reason))
                    if cause in EVICTIONS:
                        self._evictions[cause] += 1

    # From one snapshot to the next

    def _observe(self, now: float) -> FleetSnapshot:
        models, replicas, nodes = self._targets(), self._provider.replicas(), self._provider.nodes()
        pools, wall = self._pool_targets(), self._wall()
        failed = self._read_events(models, now)
        self._observe_models(models, replicas, now)
        self._observe_pools(pools, now, wall)
        self._started_on = {}
        before, self._node_history = self._node_history, {}
        known = self._snapshot.index if nodes is self._snapshot.nodes else None  # providers change lists by new ones
        snapshot = FleetSnapshot(
            now, models, replicas, nodes, self._history, pools, wall, self._node_history, self._pool_history, known
        )
        self._observe_nodes(snapshot, before, failed)
        return snapshot

    def _pool_targets(self) -> list[PoolTarget]:
        return [PoolTarget(spec, self._overrides.get(spec.name)) for spec in self._pools]

    def _read_events(self, models: Sequence[ModelTarget], now: float) -> Counter[str]:
        """Count the failures of models, and return those of nodes. Failures at the same time count as one."""
        known = {model.key for model in models}
        self._history = {key: each for key, each in self._history.items() if key in known}
        failed: Counter[str] = Counter()
        kinds: dict[str, set[str]] = {}
        for event in self._provider.events():
            kinds.setdefault(event.model, set()).add(event.kind)
            if event.kind == "failed" and (node := self._node(event)):
                failed[node] += 1
        for key, happened in kinds.items():
            before = self._history.get(key, ModelHistory())
            if "ready" in happened:
                before = dataclasses.replace(before, failures=0, failed_at=-math.inf)
            if "failed" in happened:
                before = dataclasses.replace(before, failures=before.failures + 1, failed_at=now)
            if key in known:
                self._history[key] = before
        return failed

    def _node(self, event: ReplicaEvent) -> str:
        """Return where a replica runs or ran, also one that has just been started."""
        if event.node or event.replica in self._started_on:
            return event.node or self._started_on[event.replica]
        return next((each.node for each in self._snapshot.replicas if each.id == event.replica), "")

    def _observe_models(self, models: Sequence[ModelTarget], replicas: Sequence[Replica], now: float) -> None:
        waiting: dict[str, int] = {}  # requests of a replica for which others wait
        ready: Counter[str] = Counter()
        for each in replicas:
            if each.waiting:
                waiting[each.model] = max(each.running, waiting.get(each.model, 1))
            if each.condition == "ready":
                ready[each.model] += 1
        ids: set[str] = set()
        if any(history.replacement for history in self._history.values()):
            ids = {each.id for each in replicas if each.condition != "draining"}
        for model in models:
            before = self._history.get(model.key, ModelHistory())
            since = (now if before.waiting_since is None else before.waiting_since) if model.key in waiting else None
            moving = before.replaces in ids and before.replacement in ids
            complete, short_since = model.active and before.complete, before.short_since if model.active else None
            if model.active and ready[model.key] >= model.min_replicas:
                if short_since is not None:
                    self._recovery.observe(now - short_since)
                complete, short_since = True, None
            elif complete and short_since is None:
                short_since = now
            after = ModelHistory(
                since,
                before.failures,
                before.failed_at,
                before.replaces if moving else "",
                before.replacement if moving else "",
                complete,
                short_since,
                waiting.get(model.key, before.full_load),
            )
            if after != before or model.key not in self._history:
                self._history[model.key] = after

    def _observe_nodes(self, snapshot: FleetSnapshot, before: Mapping[str, NodeHistory], failed: Counter[str]) -> None:
        """Remember how long nodes have been idle, and on which of them replicas fail; also by being lost with them."""
        now, history, none = snapshot.now, self._node_history, NO_NODE_HISTORY
        unchanged = snapshot.nodes is self._snapshot.nodes
        if not unchanged:
            present = {each.name for each in snapshot.nodes if each.condition != "lost"}
            for node in self._snapshot.nodes:
                if node.condition == "ready" and node.name not in present:
                    failed[node.name] += 1
        for name, each in before.items():  # also of nodes that are gone, which may come back
            if each.failures and now - each.failed_at < NODE_MEMORY_SECONDS:
                history[name] = NodeHistory(failures=each.failures, failed_at=each.failed_at)
        for name, count in failed.items():
            history[name] = NodeHistory(failures=history.get(name, none).failures + count, failed_at=now)
        for pool in snapshot.pools:
            if pool.spec.schedule.mode == "idle":
                for node in snapshot.index.members.get(pool.spec.name, ()):
                    name = node.name
                    last = before.get(name)
                    if unchanged and last is not None and not last.failures and name not in history:
                        history[name] = last
                    else:
                        current = history.get(name, none)
                        history[name] = _observe_idle(node, pool.spec.idle, last or none, current, now)

    def _observe_pools(self, pools: Sequence[PoolTarget], now: float, wall: float) -> None:
        history: dict[str, PoolHistory] = {}
        for pool in pools:
            before = self._pool_history.get(pool.spec.name, PoolHistory())
            changes_at = before.changes_at
            if changes_at is None or wall >= changes_at:
                changes_at = next_change(pool.spec.schedule, wall)
            opened_at = now if before.opened_at is None else before.opened_at
            history[pool.spec.name] = PoolHistory(
                opened_at if pool_is_open(pool, wall) else None, changes_at, pool.override is not None
            )
        self._pool_history = history


def _observe_idle(
    node: Node, thresholds: IdleThresholds, last: NodeHistory, current: NodeHistory, now: float
) -> NodeHistory:
    """Return the history of a node in `idle` mode. `current` has its failures."""
    idle_since = unmeasured_since = None
    if node.owner_load is None:
        unmeasured_since = now if last.unmeasured_since is None else last.unmeasured_since
    elif not owner_activity(thresholds, node):
        idle_since = now if last.idle_since is None else last.idle_since
    same = last.idle_since == idle_since and last.unmeasured_since == unmeasured_since
    if same and last.failures == current.failures and last.failed_at == current.failed_at:
        return last
    return NodeHistory(idle_since, unmeasured_since, current.failures, current.failed_at)
