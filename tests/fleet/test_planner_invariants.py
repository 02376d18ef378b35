"""What holds for the decisions about any snapshot."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from syringa.fleet.decisions import FleetSnapshot, ModelHistory, ModelTarget, NodeHistory, PoolHistory, StartReplica
from syringa.fleet.planner import plan
from syringa.fleet.pools import PoolCapacity, PoolPreemption, PoolSpec, PoolTarget
from syringa.fleet.provider import Node, NodeCondition, OwnerLoad, Replica, ReplicaCondition
from syringa.fleet.schedule import PoolSchedule, PoolWindow

NOW = 10_000.0
CONDITIONS: tuple[ReplicaCondition, ...] = ("ready", "ready", "ready", "starting", "fetching", "hanging", "draining")
NODE_CONDITIONS: tuple[NodeCondition, ...] = ("ready", "ready", "ready", "ready", "draining", "lost")
SCHEDULES = (
    PoolSchedule(),
    PoolSchedule(mode="idle"),
    PoolSchedule(mode="scheduled", windows=(PoolWindow(days=("mon",)),)),  # 1970-01-01 was a Thursday
    PoolSchedule(mode="scheduled", windows=(PoolWindow(days=("thu",)),)),
)
POOLS = ("p", "q", "r", "default")


def random_snapshot(draw: random.Random) -> FleetSnapshot:
    pools = [
        PoolTarget(
            PoolSpec(
                name=name,
                schedule=draw.choice(SCHEDULES),
                capacity=PoolCapacity(
                    max_gpus=draw.choice((0, 0, 3, 8)), max_utilization_pct=draw.choice((100, 100, 50))
                ),
                preemption=PoolPreemption(priority=draw.randint(-1, 1)),
            ),
            draw.choice((None, None, None, True, False)),
        )
        for name in POOLS
    ]
    nodes = [
        Node(
            f"n{number}",
            condition=draw.choice(NODE_CONDITIONS),
            labels={"pool": draw.choice((*POOLS, "unknown"))},
            gpus=draw.choice((0, 1, 4)),
            cpus=8,
            memory=100,
            owner_load=draw.choice((None, OwnerLoad(), OwnerLoad(90.0, cpu_pct=90.0))),
        )
        for number in range(draw.randint(0, 12))
    ]
    models = [
        ModelTarget(
            f"m{number}",
            f"m{number}",
            low := draw.randint(1, 3),
            low + draw.randint(0, 3),
            active=draw.random() < 0.9,
            pools=draw.sample(POOLS, draw.randint(0, 3)),
            gpus=draw.choice((0, 1, 2)),
            cpus=draw.choice((0, 2)),
            memory=draw.choice((0, 30)),
            device=draw.choice(("auto", "auto", "cpu", "cuda")),
        )
        for number in range(draw.randint(1, 5))
    ]
    replicas = [
        Replica(
            f"r{number}",
            draw.choice([*(model.key for model in models), "unknown"]),
            draw.choice([*(node.name for node in nodes), "gone"]),
            draw.choice(CONDITIONS),
            waiting=draw.choice((0, 0, 5)),
            idle_seconds=draw.choice((0.0, 100.0)),
            started_at=float(draw.randint(0, 50)),
        )
        for number in range(draw.randint(0, 20))
    ]
    history = {
        model.key: ModelHistory(
            waiting_since=draw.choice((None, NOW - 60)),
            failures=(failures := draw.choice((0, 0, 3))),
            failed_at=NOW - draw.choice((1, 600)) if failures else -1e9,
            replaces=draw.choice(("", "r0")),
            replacement=draw.choice(("", "r1")),
        )
        for model in models
    }
    node_history = {
        node.name: NodeHistory(
            idle_since=NOW - 1000 if node.owner_load == OwnerLoad() and draw.random() < 0.7 else None,
            failures=draw.choice((0, 0, 2)),
            failed_at=NOW - 5,
        )
        for node in nodes
    }
    pool_history = {name: PoolHistory(opened_at=NOW - 3600) for name in POOLS}
    return FleetSnapshot(NOW, models, replicas, nodes, history, pools, NOW, node_history, pool_history)


@pytest.mark.parametrize("seed", range(10))
def test_plan_keeps_its_promises_for_any_snapshot(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        check(random_snapshot(draw))


def check(snapshot: FleetSnapshot) -> None:
    found = plan(snapshot)
    assert plan(snapshot) == found  # it is a function
    replicas = {each.id: each for each in snapshot.replicas}
    nodes = {each.name: each for each in snapshot.nodes}
    models = {each.key: each for each in snapshot.models}
    pools = {each.spec.name: each for each in snapshot.pools}
    starts = [each for each in found.decisions if isinstance(each, StartReplica)]
    stops = [each for each in found.decisions if not isinstance(each, StartReplica)]
    assert all(each.reason for each in found.decisions)
    assert len({each.replica for each in stops}) == len(stops)
    for stop in stops:
        stopped = replicas[stop.replica]
        assert stopped.condition != "draining"
        assert stop.grace == 0 or stopped.condition in ("ready", "hanging")
    for start in starts:
        node, model = nodes[start.node], models[start.model]
        assert node.condition == "ready"
        assert model.active
        pool = pools[snapshot.pool_of[node.name]]
        assert not model.pools or pool.spec.name in model.pools
        assert pool.override is not False
        if pool.spec.schedule.mode == "idle":
            assert snapshot.node_history[node.name].idle_since is not None
    leaving = {each.replica for each in stops}
    for key, model in models.items():
        own = [each for each in snapshot.replicas if each.model == key and each.condition != "draining"]
        here = [each for each in own if each.node in nodes and nodes[each.node].condition != "lost"]
        stay = [each for each in here if each.id not in leaving]
        added = [each for each in starts if each.model == key and not each.replaces]
        assert len(stay) + len(added) <= max(len(here), model.max_replicas + 1)
        assert sum(bool(each.replaces) for each in starts if each.model == key) <= 1
        chosen = [each for each in stops if replicas[each.replica].model == key and each.cause in ("idle", "replaced")]
        assert not chosen or len(stay) >= model.min_replicas
    check_room(snapshot, starts)


def check_room(snapshot: FleetSnapshot, starts: list[StartReplica]) -> None:
    """No start may take more than its node and its pool have."""
    models = {each.key: each for each in snapshot.models}
    added = {each.node for each in starts}
    gpus: Counter[str] = Counter()
    pool_gpus: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for node in snapshot.nodes:
        if node.condition == "lost" or node.name not in snapshot.pool_of:
            continue
        total[snapshot.pool_of[node.name]] += node.gpus
        placed = [*(each.model for each in snapshot.replicas if each.node == node.name)]
        placed += [each.model for each in starts if each.node == node.name]
        for key in placed:
            device, count = ("auto", 0) if key not in models else (models[key].device, models[key].gpus)
            units = 0 if device == "cpu" or not node.gpus else max(count, 1)
            gpus[node.name] += units
            pool_gpus[snapshot.pool_of[node.name]] += units
    for node in snapshot.nodes:
        gpu_starts = [each for each in starts if each.node == node.name and models[each.model].device != "cpu"]
        if node.name in added and node.gpus and gpu_starts:
            assert gpus[node.name] <= node.gpus
    for pool in snapshot.pools:
        name, capacity = pool.spec.name, pool.spec.capacity
        share = capacity.max_utilization_pct
        limit = min(total[name] * share // 100 if share < 100 else 10**9, capacity.max_gpus or 10**9)
        gpu_nodes = {node.name for node in snapshot.nodes if node.gpus and snapshot.pool_of.get(node.name) == name}
        if any(each.node in gpu_nodes and models[each.model].device != "cpu" for each in starts):
            assert pool_gpus[name] <= limit
