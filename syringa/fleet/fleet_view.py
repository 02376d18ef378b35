"""What operators see of nodes and pools, from the snapshot and the plan of a controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from syringa.fleet.decisions import (
    FleetSnapshot,
    NodeHistory,
    Plan,
    PoolHistory,
    pool_rooms,
    reclaim_reason,
)
from syringa.fleet.placement import PoolRoom, ReplicaNeeds
from syringa.fleet.pools import DEFAULT_POOL, PoolTarget, with_default
from syringa.fleet.provider import Node, Replica
from syringa.fleet.status import FleetMove, FleetStatus, NodeStatus, PoolState, PoolStatus
from syringa.types import HistogramCounts


def describe(
    snapshot: FleetSnapshot,
    plan: Plan,
    evictions: Mapping[str, int],
    recovery: HistogramCounts,
    moves: Sequence[FleetMove] = (),
) -> FleetStatus:
    """Return the nodes and pools of a snapshot. The implicit pool is listed while it has nodes."""
    rooms = {room.spec.name: room for room in pool_rooms(snapshot)}
    members: dict[str, list[NodeStatus]] = {name: [] for name in rooms}
    counts = Counter(replica.node for replica in snapshot.replicas)
    nodes = []
    for node in snapshot.nodes:
        room = rooms.get(snapshot.pool_of.get(node.name, ""))
        status = _node_status(node, room, snapshot, counts[node.name])
        nodes.append(status)
        if room is not None:
            members[room.spec.name].append(status)
    targets = {pool.spec.name: pool for pool in snapshot.pools}
    used = _usage(snapshot)
    pools = []
    for name, room in rooms.items():
        target = targets.get(name, PoolTarget(room.spec))
        if members[name] or name != DEFAULT_POOL or target.override is not None:
            waiting = _waiting_models(snapshot, plan, name)
            pools.append(_pool_status(room, target, members[name], snapshot, used[name], waiting))
    return FleetStatus(nodes, pools, dict(evictions), recovery, list(moves))


def _node_status(node: Node, room: PoolRoom | None, snapshot: FleetSnapshot, replicas: int) -> NodeStatus:
    history = snapshot.node_history.get(node.name, NodeHistory())
    offered, reason = False, "it does not respond"
    if node.condition != "lost":
        reclaim = reclaim_reason(node, room, history, snapshot.now, snapshot.pools)
        offered = reclaim is None
        reason = "" if reclaim is None else reclaim.reason.removeprefix(f"node {node.name}").lstrip(": ")
    return NodeStatus(
        name=node.name,
        state=node.condition,
        pool=room.spec.name if room is not None else "",
        offered=offered,
        reason=reason,
        gpus=node.gpus,
        cpus=node.cpus,
        memory=node.memory,
        replicas=replicas,
        labels=dict(node.labels),
    )


class _PoolUsage:
    def __init__(self) -> None:
        self.gpus = self.cpus = self.replicas = 0


def _usage(snapshot: FleetSnapshot) -> dict[str, _PoolUsage]:
    """Return what is in use of each pool."""
    used = {pool.spec.name: _PoolUsage() for pool in with_default(snapshot.pools)}
    needs = {model.key: model.needs for model in snapshot.models}
    by_node: dict[str, list[Replica]] = {}
    for replica in snapshot.replicas:
        by_node.setdefault(replica.node, []).append(replica)
    for node in snapshot.nodes:
        if node.name not in snapshot.pool_of or node.condition == "lost":
            continue
        usage, threads = used[snapshot.pool_of[node.name]], 0
        for replica in by_node.get(node.name, ()):
            need = needs.get(replica.model, ReplicaNeeds())
            usage.gpus += need.gpus_on(node)
            threads += 0 if node.gpus else need.cpus_on(node)
            usage.replicas += 1
        usage.cpus += min(threads, node.cpus)
    return used


def _waiting_models(snapshot: FleetSnapshot, plan: Plan, pool: str) -> list[str]:
    """Return the names of models that have no room and may run in a pool."""
    waiting = [model for model in snapshot.models if model.key in plan.shortages]
    return [model.name for model in waiting if not model.pools or pool in model.pools]


def _pool_status(
    room: PoolRoom,
    target: PoolTarget,
    members: list[NodeStatus],
    snapshot: FleetSnapshot,
    used: _PoolUsage,
    waiting: list[str],
) -> PoolStatus:
    present = [each for each in members if each.state != "lost"]
    lost = [each.name for each in members if each.state == "lost"]
    history = snapshot.pool_history.get(room.spec.name, PoolHistory())
    state: PoolState = "active"
    reason = ""
    if not room.open:
        state = "closing" if used.replicas else "inactive"
        reason = "closed by an operator" if target.override is False else "outside of its windows"
    elif lost:
        state, reason = "degraded", f"lost: {_shorten(lost)}"
    elif waiting:
        state, reason = "degraded", f"no room for {_shorten(waiting)}"
    elif not present:
        state, reason = "degraded", "no nodes"
    elif target.override:
        reason = "opened by an operator"
    return PoolStatus(
        name=room.spec.name,
        state=state,
        mode=room.spec.schedule.mode,
        override=target.override,
        reason=reason,
        nodes=len(present),
        offered=sum(each.offered for each in present),
        gpus=sum(each.gpus for each in present),
        gpus_used=used.gpus,
        cpus=sum(each.cpus for each in present if not each.gpus),
        cpus_used=used.cpus,
        replicas=used.replicas,
        changes_at=None if target.override is not None else history.changes_at,
    )


def _shorten(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
