"""The decisions of the controller, a pure function of a snapshot: it needs neither processes nor a clock.

The work is proportional to the number of replicas, and to the number of nodes only where a place is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from syringa.fleet.decisions import (
    MOVE_AFTER_SECONDS,
    MOVE_BEFORE_SECONDS,
    SCALE_DOWN_GRACE,
    SCALE_DOWN_SECONDS,
    SPARE_LOAD,
    Decision,
    FleetSnapshot,
    ModelHistory,
    ModelTarget,
    Plan,
    PoolHistory,
    Reclaim,
    StartReplica,
    StopCause,
    StopReplica,
    backoff,
    pool_rooms,
)
from syringa.fleet.demand import MissingReplica, missing_replicas
from syringa.fleet.occupancy import Occupancy
from syringa.fleet.placement import NodeRoom, PoolRoom, ReplicaNeeds, in_preference
from syringa.fleet.provider import Replica
from syringa.fleet.reservations import Reservations

_NO_HISTORY = ModelHistory()


def plan(snapshot: FleetSnapshot) -> Plan:
    """Return what is to be started and stopped, and which models have no room.

    1. Replicas leave nodes and pools that may not be used any more, the last that came first.
    2. Missing replicas are started: first those of models that have none, then those below the minimum, then those for
       which requests wait, at most as many as the model has. Where there is no room, replicas above the minimum of
       other models give way; for waiting requests, those that are not needed by the requests of their own model.
    3. Replicas that are not needed any more are stopped.
    4. Replicas move to pools that their models prefer, one at a time for each model.
    """
    return _Planner(snapshot).run()


class _Planner:
    def __init__(self, snapshot: FleetSnapshot) -> None:
        self._snapshot, self._now = snapshot, snapshot.now
        self._decisions: list[Decision] = []
        self._shortages: dict[str, str] = {}
        self._pools = pool_rooms(snapshot)
        self._by_name = {pool.spec.name: pool for pool in self._pools}
        self._by_priority = in_preference(self._pools)
        self._needs = {model.key: model.needs for model in snapshot.models}
        self._occupancy = Occupancy(snapshot, self._by_name, self._needs)
        self._own: dict[str, list[Replica]] = {model.key: [] for model in snapshot.models}  # without those that leave
        self._stopped: set[str] = set()
        self._reservations = Reservations(self._occupancy)
        self._spare: list[Replica] | None = None  # may be stopped for others, see `_spare_replicas`
        self._ranks: dict[tuple[str, ...], dict[str, int]] = {}  # of pools, by the pools of a model
        self._excess: dict[str, int] = {}  # how many of them, by key of their model
        self._unused: dict[str, int] = {}  # of these, those without which no request would have to wait

    def run(self) -> Plan:
        self._add_replicas()
        for pool in self._pools:
            if pool.is_limited:
                self._occupancy.measure(pool)
                self._fit_capacity(pool)
        starting = self._start_missing()
        for model in self._snapshot.models:
            if model.key not in starting:
                self._stop_unneeded(model)
        for model in self._snapshot.models:
            if model.pools and model.active and model.key not in starting:
                self._move_to_preferred(model)
        return Plan(self._decisions, self._shortages)

    # What may not stay

    def _add_replicas(self) -> None:
        """Find out which replicas models have, and stop what may not stay. What was on a lost node is not there."""
        evicted: list[tuple[Replica, Reclaim]] = []
        offered, own = self._occupancy.offered, self._own
        for replica in self._snapshot.replicas:
            if replica.condition == "draining":
                self._reservations.note_leaving(replica)
            elif replica.node in offered:
                if (found := own.get(replica.model)) is not None:
                    found.append(replica)
            elif (node := self._occupancy.node(replica.node)) is not None:
                reclaim = self._occupancy.reclaim(node)
                if reclaim is not None and reclaim.cause is not None:
                    evicted.append((replica, reclaim))
                elif replica.model in own:
                    own[replica.model].append(replica)
        reclaims = {replica.id: reclaim for replica, reclaim in evicted}
        for replica in _newest_first([replica for replica, _ in evicted]):
            reclaim = reclaims[replica.id]
            assert reclaim.cause is not None
            self._stop(replica, reclaim.grace, reclaim.reason, reclaim.cause)

    def _fit_capacity(self, pool: PoolRoom) -> None:
        """Stop replicas of a pool that uses more than it may, the last that came first."""
        gpu_limit, cpu_limit = pool.limits
        gpus, threads = pool.used_gpus - gpu_limit, pool.used_cpus - cpu_limit
        if gpus <= 0 and threads <= 0:
            return
        name, occupancy = pool.spec.name, self._occupancy
        for replica in occupancy.replicas_in(pool):
            if replica.condition == "draining" or replica.id in self._stopped:  # they leave already
                gpus -= occupancy.gpus(replica)
                threads -= occupancy.threads(replica)
        running = [each for own in self._own.values() for each in own if occupancy.pool(each.node) is pool]
        for replica in _newest_first(running):
            if gpus <= 0 and threads <= 0:
                break
            units, cpus = occupancy.gpus(replica), occupancy.threads(replica)
            if (gpus > 0 and units) or (threads > 0 and cpus):
                used = f"{pool.used_gpus} of {gpu_limit:.0f} GPUs" if gpus > 0 else (
                    f"{pool.used_cpus} of {cpu_limit:.0f} CPU threads"
                )  # fmt: skip
                gpus, threads = gpus - units, threads - cpus
                self._stop(replica, pool.spec.preemption.grace_period, f"pool {name} uses {used}", "capacity")
        for key, own in self._own.items():
            self._own[key] = [each for each in own if each.id not in self._stopped]

    # What is missing

    def _start_missing(self) -> set[str]:
        """Start what is missing. Return the models that need more replicas, whether there was room or not."""
        wants: list[MissingReplica] = []
        count = len(self._snapshot.models)
        for position, model in enumerate(self._snapshot.models):
            wants += missing_replicas(model, self._counted(model), self._history(model), self._now, position, count)
        wants.sort(key=lambda each: each[:2])
        full: set[str] = set()  # models for which there is no room
        for want in wants:
            if want.model.key in full:
                continue
            needs = self._needs[want.model.key]
            room = self._choose(want.model, self._allowed(want.model))
            if room is not None:
                self._decisions.append(StartReplica(want.model.key, room.node.name, want.reason, want.cause))
                continue
            full.add(want.model.key)
            if want.tier < 2:
                self._shortages[want.model.key] = self._shortage(want.model, needs)
                self._make_room(want.model, needs, self._excess, "has too few replicas and no room")
            else:
                self._make_room(want.model, needs, self._unused, "has waiting requests and no room")
        return {want.model.key for want in wants}

    def _make_room(self, model: ModelTarget, needs: ReplicaNeeds, spares: dict[str, int], problem: str) -> None:
        """Keep the room that replicas leave for a model. Stop others that can be spared if it is not enough.

        `spares`: how many, by model.
        """
        pools = [pool for pool in self._allowed(model) if pool.open]
        if self._reservations.reserve_leaving(model.key, needs, pools):
            return
        if not self._excess:
            self._count_spares()
        if not any(count for key, count in spares.items() if key != model.key):
            return
        offered, stopped = self._occupancy.offered, self._stopped
        spare = [
            each
            for each in self._spare_replicas()
            if each.model != model.key and each.node in offered and each.id not in stopped
        ]
        found = self._reservations.choose_victims(needs, pools, spare, spares)
        if found is None:
            return
        victims, room = found
        for victim in victims:
            home = self._occupancy.pool(victim.node)
            assert home is not None
            self._stop(victim, home.spec.preemption.grace_period, f"model {model.name} {problem}", "preempted")
            self._excess[victim.model] -= 1
            self._unused[victim.model] = max(0, self._unused[victim.model] - 1)
        self._reservations.reserve(room, model.key, needs)

    def _count_spares(self) -> None:
        for model in self._snapshot.models:
            own = self._counted(model)
            if len(own) > model.min_replicas:
                self._excess[model.key] = len(own) - model.min_replicas
                self._unused[model.key] = self._count_unused(model, own)

    def _spare_replicas(self) -> list[Replica]:
        """Return the replicas of models that have more than their minimum: those of pools with a low priority first,
        and of these, the last that came."""
        if self._spare is None:
            found = [
                each for model in self._snapshot.models if model.key in self._excess for each in self._counted(model)
            ]
            self._spare = sorted(_newest_first(found), key=self._priority)
        return self._spare

    def _count_unused(self, model: ModelTarget, own: Sequence[Replica]) -> int:
        """Return how many replicas a model can spare without requests waiting: the others are not full then."""
        full = SPARE_LOAD * self._history(model).full_load
        if not full or any(each.waiting or each.condition != "ready" for each in own):
            return 0
        needed = max(model.min_replicas, math.ceil(sum(each.running for each in own) / full))
        return max(0, len(own) - needed)

    # What is not needed, or would be better elsewhere

    def _stop_unneeded(self, model: ModelTarget) -> None:
        if len(self._own[model.key]) <= model.min_replicas:
            return
        own = self._counted(model)
        if self._stopped:
            own = [each for each in own if each.id not in self._stopped]
        above = len(own) > model.max_replicas
        if not above and not any(each.idle_seconds >= SCALE_DOWN_SECONDS for each in own):
            return
        ready = [each for each in own if each.condition == "ready"]
        if len(ready) <= model.min_replicas or not ready:
            return
        idle = [each for each in ready if above or each.idle_seconds >= SCALE_DOWN_SECONDS]
        if not idle:
            return
        surplus = self._least_preferred(model, idle)
        reason = f"idle for {surplus.idle_seconds:.0f} s, {len(own)} replicas, min={model.min_replicas}"
        if above:
            reason = f"{len(own)} replicas, max={model.max_replicas}"
        self._stop(surplus, SCALE_DOWN_GRACE, reason, "surplus" if above else "idle")

    def _move_to_preferred(self, model: ModelTarget) -> None:
        """Start a replica in a pool that the model prefers, or stop the one whose replacement is ready."""
        history = self._history(model)
        own = self._own[model.key]
        if self._stopped:
            own = [each for each in own if each.id not in self._stopped]
        if history.replacement:
            by_id = {each.id: each for each in own}
            old, new = by_id.get(history.replaces), by_id.get(history.replacement)
            enough = len(own) > model.min_replicas
            if old is not None and new is not None and new.condition == "ready" and enough:
                pool = self._occupancy.pool(old.node)
                grace = pool.spec.preemption.grace_period if pool is not None else SCALE_DOWN_GRACE
                self._stop(old, grace, f"replaced by {new.id} in a preferred pool", "replaced")
            return
        if not own or any(each.condition != "ready" for each in own):
            return
        if self._now < history.failed_at + backoff(history.failures):
            return
        worst = self._least_preferred(model, own)
        rank = self._ranks_of(model).get(self._snapshot.pool_of.get(worst.node, ""), len(self._allowed(model)))
        preferred = [pool for pool in self._allowed(model)[:rank] if self._is_stable(pool)] if rank else []
        room = self._choose(model, preferred, max_penalty=0)
        if room is not None:
            reason = f"pool {self._snapshot.pool_of[room.node.name]} is preferred"
            self._decisions.append(StartReplica(model.key, room.node.name, reason, "preferred_pool", worst.id))

    def _is_stable(self, pool: PoolRoom) -> bool:
        """Return whether a pool has been open for a while, and will be, so that moving there is worth it."""
        history = self._snapshot.pool_history.get(pool.spec.name, PoolHistory())
        if not pool.open or history.opened_at is None or self._now - history.opened_at < MOVE_AFTER_SECONDS:
            return False
        if history.overridden or history.changes_at is None:
            return True
        return history.changes_at - self._snapshot.wall >= MOVE_BEFORE_SECONDS

    # Lookups and records

    def _history(self, model: ModelTarget) -> ModelHistory:
        return self._snapshot.history.get(model.key, _NO_HISTORY)

    def _counted(self, model: ModelTarget) -> Sequence[Replica]:
        """Return the replicas of a model without one that is to replace another, unless it is needed."""
        own, replacement = self._own[model.key], self._history(model).replacement
        if replacement and len(own) > model.min_replicas:
            return [each for each in own if each.id != replacement]
        return own

    def _allowed(self, model: ModelTarget) -> list[PoolRoom]:
        """Return the pools of a model, the preferred one first."""
        if not model.pools:
            return self._by_priority
        return [self._by_name[name] for name in model.pools if name in self._by_name]

    def _ranks_of(self, model: ModelTarget) -> dict[str, int]:
        """Return the positions of pools among those of a model."""
        pools = tuple(model.pools)
        ranks = self._ranks.get(pools)
        if ranks is None:
            ranks = self._ranks[pools] = {pool.spec.name: rank for rank, pool in enumerate(self._allowed(model))}
        return ranks

    def _least_preferred(self, model: ModelTarget, replicas: Sequence[Replica]) -> Replica:
        """Return the replica in the last of a model's pools, and of these the one that is idle for longest.

        A pool that is not among those of the model comes after them.
        """
        ranks, pool_of = self._ranks_of(model), self._snapshot.pool_of
        last, worst, worst_rank = len(ranks), replicas[0], -1
        for each in replicas:
            rank = ranks.get(pool_of.get(each.node, ""), last)
            if rank > worst_rank or (rank == worst_rank and each.idle_seconds > worst.idle_seconds):
                worst, worst_rank = each, rank
        return worst

    def _choose(
        self, model: ModelTarget, pools: Sequence[PoolRoom], *, max_penalty: float = math.inf
    ) -> NodeRoom | None:
        needs = self._needs[model.key]
        for pool in pools:
            if not pool.open:
                continue
            if pool.nodes is None:
                pool.nodes = self._occupancy.offered_rooms(pool)
            if (room := pool.choose(model.key, needs, max_penalty=max_penalty)) is not None:
                return room
        return None

    def _shortage(self, model: ModelTarget, needs: ReplicaNeeds) -> str:
        reasons = [pool.shortage(needs) for pool in self._allowed(model)]
        return "no capacity: " + ("; ".join(reasons) or "none of its pools exists")

    def _priority(self, replica: Replica) -> int:
        pool = self._occupancy.pool(replica.node)
        return 0 if pool is None else pool.spec.preemption.priority

    def _stop(self, replica: Replica, grace: float, reason: str, cause: StopCause) -> None:
        """Stop a replica. One that serves no requests yet needs no grace."""
        self._stopped.add(replica.id)
        self._reservations.note_leaving(replica)
        serves = replica.condition in ("ready", "hanging")
        self._decisions.append(StopReplica(replica.id, grace if serves else 0.0, reason, cause))


def _newest_first(replicas: Sequence[Replica]) -> list[Replica]:
    return [replicas[index] for index in sorted(range(len(replicas)), key=lambda i: (-replicas[i].started_at, -i))]
