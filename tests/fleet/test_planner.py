"""Decisions about one snapshot: capacity, preference, priority and the order of evictions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest

from syringa.fleet.decisions import FleetSnapshot, ModelHistory, ModelTarget, NodeHistory, StartReplica, StopReplica
from syringa.fleet.planner import plan
from syringa.fleet.pools import PoolCapacity, PoolPreemption, PoolSpec, PoolTarget
from syringa.fleet.provider import Node, Replica
from syringa.fleet.schedule import PoolSchedule, PoolWindow
from tests.fleet.fleet_harness import gpu_node

NOW = 1000.0
CLOSED = PoolSchedule(mode="scheduled", windows=(PoolWindow(days=("mon",)),))  # 1970-01-01 was a Thursday


def snapshot(
    models: Sequence[ModelTarget],
    nodes: Sequence[Node],
    replicas: Sequence[Replica] = (),
    pools: Sequence[PoolSpec | PoolTarget] = (),
    node_history: Mapping[str, NodeHistory] = {},
    history: Mapping[str, ModelHistory] = {},
) -> FleetSnapshot:
    targets = [pool if isinstance(pool, PoolTarget) else PoolTarget(pool) for pool in pools]
    return FleetSnapshot(NOW, models, replicas, nodes, history, targets, 1000.0, node_history)


def model(key: str = "m", low: int = 1, high: int = 0, **fields: object) -> ModelTarget:
    return ModelTarget(key, key, low, max(low, high), **fields)  # type: ignore[arg-type]


def replica(id: str, node: str, started_at: float = 0.0, **fields: object) -> Replica:
    return Replica(id, id.partition("-")[0], node, started_at=started_at, **fields)  # type: ignore[arg-type]


def starts(of: FleetSnapshot) -> list[str]:
    return [each.node for each in plan(of).decisions if isinstance(each, StartReplica)]


def stops(of: FleetSnapshot) -> list[str]:
    return [each.replica for each in plan(of).decisions if isinstance(each, StopReplica)]


def test_plan_gives_each_gpu_to_one_replica() -> None:
    nodes = [gpu_node("a", gpus=2), gpu_node("b", gpus=1)]
    assert starts(snapshot([model(low=9)], nodes)) == ["a", "b", "a"]
    assert starts(snapshot([model(low=9, gpus=2)], nodes)) == ["a"]
    assert starts(snapshot([model(low=9)], nodes, [replica("x-1", "a")])) == ["b", "a"]  # of a model that is not known


def test_plan_uses_cpu_nodes_by_threads_and_memory() -> None:
    nodes = [Node("a", cpus=8, memory=100), Node("b", cpus=8, memory=10)]
    assert starts(snapshot([model(low=9, cpus=4)], nodes)) == ["a", "b", "a", "b"]
    assert starts(snapshot([model(low=9, cpus=1, memory=10)], nodes)) == ["a", "b", *(["a"] * 7)]
    assert starts(snapshot([model(low=2, device="cuda")], nodes)) == []
    assert starts(snapshot([model(low=3)], nodes)) == ["a", "b", "a"]  # replicas share threads


def test_plan_runs_a_model_for_cpus_on_the_threads_of_a_gpu_node() -> None:
    nodes = [gpu_node("a", gpus=1)]
    full = [replica("x-1", "a")]
    assert starts(snapshot([model(cpus=4, device="cpu")], nodes, full)) == ["a"]
    assert starts(snapshot([model()], nodes, full)) == []


@pytest.mark.parametrize(
    ("capacity", "count"),
    [
        (PoolCapacity(), 8),
        (PoolCapacity(max_gpus=3), 3),
        (PoolCapacity(max_utilization_pct=50), 4),
        (PoolCapacity(max_utilization_pct=62), 4),  # rounded down
        (PoolCapacity(max_gpus=5, max_utilization_pct=99), 5),
        (PoolCapacity(max_utilization_pct=0), 0),
    ],
)
def test_plan_keeps_within_the_capacity_of_a_pool(capacity: PoolCapacity, count: int) -> None:
    pools = [PoolSpec(name="p", capacity=capacity)]
    nodes = [gpu_node(f"n{number}", "p", gpus=2) for number in range(4)]
    assert len(starts(snapshot([model(low=9)], nodes, pools=pools))) == count


def test_plan_counts_cpu_threads_of_nodes_without_gpus() -> None:
    pools = [PoolSpec(name="p", capacity=PoolCapacity(max_utilization_pct=50, max_gpus=1))]
    nodes = [Node(f"n{number}", labels={"pool": "p"}, cpus=8) for number in range(4)]
    assert len(starts(snapshot([model(low=9, cpus=4)], nodes, pools=pools))) == 4
    assert starts(snapshot([model(low=3)], nodes, pools=pools)) == ["n0", "n1", "n0"]  # half of the nodes, shared


def test_plan_places_a_model_in_its_pools_by_preference() -> None:
    pools = [PoolSpec(name="always"), PoolSpec(name="night")]
    nodes = [gpu_node("a", "always", 4), gpu_node("n", "night", 2), gpu_node("x")]
    assert starts(snapshot([model(low=4, pools=("night", "always"))], nodes, pools=pools)) == ["n", "n", "a", "a"]
    assert starts(snapshot([model(low=4, pools=("night",))], nodes, pools=pools)) == ["n", "n"]
    assert starts(snapshot([model(low=2, pools=("night", "default"))], nodes[::2], pools=pools)) == ["x"]


def test_plan_uses_pools_by_priority_for_a_model_that_names_none() -> None:
    pools = [PoolSpec(name="p"), PoolSpec(name="q", preemption=PoolPreemption(priority=5))]
    nodes = [gpu_node("a", "p"), gpu_node("b", "q"), gpu_node("c")]
    assert starts(snapshot([model(low=3)], nodes, pools=pools)) == ["b", "a", "c"]


def test_plan_assigns_a_node_to_the_first_pool_that_selects_it() -> None:
    pools = [
        PoolSpec(name="h100", selector={"gpu": "h100", "site": "x"}, schedule=CLOSED),
        PoolSpec(name="rest", selector={"site": "x"}),
    ]
    labels = [{"gpu": "h100", "site": "x"}, {"gpu": "a100", "site": "x"}, {"gpu": "h100", "pool": "mistyped"}]
    nodes = [Node(f"n{number}", labels=each, gpus=1) for number, each in enumerate(labels)]
    assert starts(snapshot([model(low=3)], nodes, pools=pools)) == ["n1"]


def test_plan_names_why_a_model_has_no_room() -> None:
    pools = [
        PoolSpec(name="night", schedule=CLOSED),
        PoolSpec(name="day", capacity=PoolCapacity(max_gpus=1)),
        PoolSpec(name="full"),
        PoolSpec(name="empty"),
    ]
    nodes = [gpu_node("a", "night"), gpu_node("b", "day", 2), gpu_node("c", "full")]
    running = [replica("x-1", "b"), replica("x-2", "c")]
    wanted = model(pools=("night", "day", "full", "empty"))
    found = plan(snapshot([wanted, model("x", 2)], nodes, running, pools))
    assert found.decisions == []
    assert found.shortages == {
        "m": "no capacity: pool night is closed; pool day uses 1 of 1 GPUs; no node of pool full has room; "
        "pool empty has no node that may be used now"
    }


def test_plan_evicts_from_a_closed_pool_last_in_first_out() -> None:
    pools = [PoolSpec(name="night", schedule=CLOSED, preemption=PoolPreemption(grace_period=12))]
    nodes = [gpu_node("a", "night", 2), gpu_node("b", "night", 2)]
    running = [
        replica("m-1", "a", 10),
        replica("m-3", "a", 30, condition="starting"),
        replica("m-2", "b", 20, condition="draining"),
        replica("m-4", "b", 40),
        replica("gone-1", "b", 50),  # of a model that is not configured any more
    ]
    decisions = plan(snapshot([model(low=2)], nodes, running, pools)).decisions
    reason = "pool night is closed"
    assert decisions == [
        StopReplica("gone-1", 12, reason, "pool_closed"),
        StopReplica("m-4", 12, reason, "pool_closed"),
        StopReplica("m-3", 0, reason, "pool_closed"),  # it serves nothing yet
        StopReplica("m-1", 12, reason, "pool_closed"),
    ]


def test_plan_evicts_the_newest_replicas_when_capacity_shrinks() -> None:
    pools = [PoolSpec(name="p", capacity=PoolCapacity(max_utilization_pct=50))]
    nodes = [gpu_node("a", "p", 2), gpu_node("b", "p", 4), gpu_node("c", "p", 2)]
    running = [replica(f"m-{number}", "b", number) for number in range(4)]
    assert stops(snapshot([model(low=4)], nodes, running, pools)) == []
    lost = [*nodes[:2], dataclasses.replace(nodes[2], condition="lost")]  # three of six GPUs may be used
    (decision,) = plan(snapshot([model(low=4)], lost, running, pools)).decisions
    assert decision == StopReplica("m-3", 30, "pool p uses 4 of 3 GPUs", "capacity")
    leaving = [*running[:1], dataclasses.replace(running[1], condition="draining"), *running[2:]]
    assert stops(snapshot([model(low=3)], lost, leaving, pools)) == []


def test_plan_does_not_count_what_was_on_a_lost_node() -> None:
    nodes = [dataclasses.replace(gpu_node("a"), condition="lost"), gpu_node("b")]
    assert starts(snapshot([model()], nodes, [replica("m-1", "a")])) == ["b"]


def test_plan_serves_models_without_any_replica_first() -> None:
    waiting = {"busy": ModelHistory(waiting_since=0.0)}
    models = [model("busy", 1, 9), model("low", 3), model("none", 2)]
    running = [replica("busy-1", "a", waiting=50), replica("low-1", "a")]
    nodes = [gpu_node("a", gpus=5)]
    found = plan(snapshot(models, nodes, running, history=waiting))
    assert [each.model for each in found.decisions if isinstance(each, StartReplica)] == ["none", "low", "none"]
    assert list(found.shortages) == ["low"]


def test_plan_stops_what_another_model_does_not_need_for_one_below_its_minimum() -> None:
    pools = [PoolSpec(name="p", preemption=PoolPreemption(priority=1, grace_period=7)), PoolSpec(name="q")]
    nodes = [gpu_node("a", "p", 2), gpu_node("b", "q", 2)]
    running = [replica("big-1", "b", 1), replica("big-2", "b", 2), replica("big-3", "a", 3), replica("big-4", "a", 4)]
    big, small = model("big", 1, 4), model("small", 2)
    (decision,) = plan(snapshot([big, small], nodes, running, pools)).decisions
    assert decision == StopReplica("big-2", 30, "model small has too few replicas and no room", "preempted")
    chosen = dataclasses.replace(small, pools=("p",))
    (decision,) = plan(snapshot([big, chosen], nodes, running, pools)).decisions
    assert decision == StopReplica("big-4", 7, "model small has too few replicas and no room", "preempted")
    leaving = [*running[:3], dataclasses.replace(running[3], condition="draining")]
    assert stops(snapshot([big, small], nodes, leaving, pools)) == []  # there will be room
    needed = dataclasses.replace(big, min_replicas=4)
    assert stops(snapshot([needed, small], nodes, running, pools)) == []


def test_plan_stops_several_replicas_of_one_node_for_a_model_that_needs_their_gpus_together() -> None:
    nodes = [gpu_node("a", gpus=2), gpu_node("b", gpus=2)]
    running = [replica(f"big-{number}", node, number) for number, node in enumerate("abab")]
    models = [model("big", 1, 4), model("pair", 1, gpus=2)]
    found = plan(snapshot(models, nodes, running)).decisions
    assert found == [
        StopReplica(name, 30, "model pair has too few replicas and no room", "preempted") for name in ("big-3", "big-1")
    ]
    needed = [dataclasses.replace(models[0], min_replicas=3), models[1]]  # it can spare one, which is not enough
    assert stops(snapshot(needed, nodes, running)) == []
    other = [*running[:3], replica("other-3", "b", 3)]
    models.append(model("other", 0, 1))
    assert stops(snapshot(models, nodes, other)) == ["other-3", "big-1"]


def test_plan_stops_the_replicas_that_suffice() -> None:
    nodes = [gpu_node("a", gpus=3)]
    running = [replica("pair-1", "a", 1), replica("one-1", "a", 2)]
    models = [model("one", 0, 1), model("pair", 0, 1, gpus=2), model("new", 1, gpus=2)]
    assert stops(snapshot(models, nodes, running)) == ["pair-1"]


def test_plan_keeps_the_room_of_replicas_that_leave_for_the_model_that_needs_it() -> None:
    waiting = {"big": ModelHistory(waiting_since=0.0)}
    nodes = [gpu_node("a", gpus=2), gpu_node("b", gpus=2)]
    models = [model("big", 1, 4), model("pair", 1, gpus=2)]
    left = replica("big-3", "b", 3, condition="draining")  # the other one of b has gone: its GPU is not for big again
    running = [replica("big-0", "a", waiting=50), replica("big-2", "a", 2, waiting=50), left]
    found = plan(snapshot(models, nodes, running, history=waiting))
    assert found.decisions == []
    assert list(found.shortages) == ["pair"]


def test_plan_does_not_wait_for_replicas_that_leave_too_little_room() -> None:
    nodes = [gpu_node("a", gpus=1), gpu_node("b", gpus=2)]
    running = [replica("big-1", "a", condition="draining"), replica("big-2", "b", 2), replica("big-3", "b", 3)]
    models = [model("big", 0, 4), model("pair", 1, gpus=2)]
    assert stops(snapshot(models, nodes, running)) == ["big-3", "big-2"]


def test_plan_counts_what_leaves_when_it_makes_room() -> None:
    nodes = [gpu_node("a", gpus=4)]
    left = replica("big-1", "a", condition="draining")
    running = [left, *(replica(f"big-{number}", "a", number) for number in (2, 3, 4))]
    assert stops(snapshot([model("big", 1, 4), model("pair", 1, gpus=2)], nodes, running)) == ["big-4"]


def test_plan_does_not_make_room_where_nothing_may_be_started() -> None:
    idle = PoolSpec(name="p", schedule=PoolSchedule(mode="idle"))
    history = {"a": NodeHistory(unmeasured_since=NOW - 1)}  # its owner's load is not known yet
    running = [replica("big-1", "a", 1), replica("big-2", "a", 2)]
    models = [model("big", 1, 4), model("new", 1)]
    assert stops(snapshot(models, [gpu_node("a", "p", 2)], running, [idle], history)) == []


def test_plan_does_not_stop_replicas_on_gpus_for_a_model_that_needs_memory() -> None:
    nodes = [dataclasses.replace(gpu_node("a", gpus=2), memory=100, cpus=8)]
    running = [replica("big-1", "a", 1), replica("big-2", "a", 2)]
    models = [model("big", 1, 2, memory=80), model("new", 1, device="cpu", memory=120, cpus=1)]
    assert stops(snapshot(models, nodes, running)) == []


def test_plan_reserves_the_node_that_just_suffices() -> None:
    nodes = [gpu_node("a", gpus=2), gpu_node("b", gpus=1), gpu_node("c", gpus=2)]
    leaving = [replica(f"big-{node}", node[0], condition="draining") for node in ("a1", "a2", "b1")]
    running = [*leaving, replica("big-c1", "c"), replica("big-c2", "c")]
    models = [model("big", 0, 9), model("one", 1), model("pair", 1, gpus=2)]
    assert stops(snapshot(models, nodes, running)) == []  # one waits for b, and pair for a


def test_plan_counts_what_leaves_nodes_that_are_not_offered_towards_the_limit_of_a_pool() -> None:
    pools = [PoolSpec(name="default", capacity=PoolCapacity(max_gpus=2))]
    nodes = [dataclasses.replace(gpu_node("a"), condition="draining"), gpu_node("b", gpus=2)]
    models = [model("big", 0, 4), model("new", 1)]
    running = [replica("big-1", "a", 1), replica("big-2", "b", 2)]
    assert stops(snapshot(models, nodes, running, pools)) == ["big-1"]
    left = [dataclasses.replace(running[0], condition="draining"), running[1]]
    assert stops(snapshot(models, nodes, left, pools)) == []


def test_plan_takes_replicas_of_pools_with_a_low_priority_first_also_from_pools_with_limits() -> None:
    pools = [
        PoolSpec(name="p", capacity=PoolCapacity(max_gpus=1), preemption=PoolPreemption(priority=5)),
        PoolSpec(name="q"),
    ]
    nodes = [gpu_node("a", "p", 2), gpu_node("b", "q", 1)]
    running = [replica("big-1", "a", 1), replica("big-2", "b", 2)]
    assert stops(snapshot([model("big", 0, 4), model("new", 1)], nodes, running, pools)) == ["big-2"]


def test_plan_stops_no_more_than_the_limit_of_a_pool_requires() -> None:
    pools = [PoolSpec(name="default", capacity=PoolCapacity(max_gpus=3))]
    nodes = [gpu_node("a"), gpu_node("b", gpus=2), gpu_node("c", gpus=2)]
    running = [replica("one-1", "a", 2), replica("pair-1", "b", 1)]
    models = [model("one", 0, 1), model("pair", 0, 1, gpus=2), model("new", 1, gpus=2)]
    assert stops(snapshot(models, nodes, running, pools)) == ["pair-1"]


def test_plan_does_not_stop_one_of_two_replicas_that_share_threads_for_these_threads() -> None:
    pools = [PoolSpec(name="default", capacity=PoolCapacity(max_utilization_pct=50))]
    nodes = [Node("a", cpus=8, memory=10), Node("b", cpus=8, memory=100)]
    running = [replica("big-1", "a", 1), replica("big-2", "a", 2)]
    new = model("new", 1, cpus=8, memory=50)
    assert stops(snapshot([model("big", 1, 2), new], nodes, running, pools)) == []
    assert stops(snapshot([model("big", 0, 2), new], nodes, running, pools)) == ["big-2", "big-1"]


def test_plan_gives_up_where_the_limit_of_a_pool_cannot_be_met() -> None:
    pools = [PoolSpec(name="default", capacity=PoolCapacity(max_gpus=160))]
    nodes = [gpu_node(f"n{number}", gpus=8) for number in range(40)]
    running = [replica(f"big-{number}", f"n{number % 40}", number) for number in range(160)]
    models = [model("big", 156, 160), model("new", 1, gpus=8)]
    assert stops(snapshot(models, nodes, running, pools)) == []


def run_plans(models: Sequence[ModelTarget], nodes: Sequence[Node], **fields: object) -> tuple[list[Replica], int]:
    """Follow the plans of a minute, in which requests wait at "big". Return what runs then, and how many stopped."""
    found = [replica(f"big-{number}", "ab"[number % 2], number, waiting=50) for number in range(4)]
    stopped = 0
    for second in range(60):
        if second % 3 == 0:  # draining takes a while
            found = [each for each in found if each.condition != "draining"]
        history = {"big": ModelHistory(waiting_since=0.0, full_load=4)}
        for each in plan(snapshot(models, nodes, found, history=history, **fields)).decisions:  # type: ignore[arg-type]
            if isinstance(each, StartReplica):
                waiting = 50 if each.model == "big" else 0
                new = replica(f"{each.model}-{second}{len(found)}", each.node, 100 + second, waiting=waiting)
                found.append(new)
            else:
                stopped += 1
                found = [
                    dataclasses.replace(old, condition="draining") if old.id == each.replica else old for old in found
                ]
    return found, stopped


@pytest.mark.parametrize("limit", [0, 4, 5])
def test_plans_give_room_to_a_model_that_needs_several_gpus_within_the_limit_of_a_pool(limit: int) -> None:
    pool = PoolSpec(name="default", capacity=PoolCapacity(max_gpus=limit))
    nodes = [gpu_node("a", gpus=4 if limit else 2), gpu_node("b", gpus=4 if limit else 2)]
    found, stopped = run_plans([model("big", 1, 8), model("pair", 1, gpus=2)], nodes, pools=[pool])
    assert sum(each.model == "pair" for each in found) == 1
    assert sum(each.model == "big" for each in found) == (limit or 4) - 2
    assert stopped == (1 if limit == 5 else 2)


def test_plan_does_not_preempt_for_requests_that_wait() -> None:
    waiting = {"busy": ModelHistory(waiting_since=0.0)}
    running = [replica("busy-1", "a", waiting=5), replica("big-1", "a"), replica("big-2", "a")]
    found = plan(snapshot([model("busy", 1, 2), model("big", 1, 2)], [gpu_node("a", gpus=3)], running, history=waiting))
    assert found.decisions == []
    assert found.shortages == {}


def test_plan_chooses_nodes_without_failures_and_without_the_model_first() -> None:
    nodes = [gpu_node(name, gpus=4) for name in "abc"]
    failing = {"a": NodeHistory(failures=2, failed_at=NOW - 10), "b": NodeHistory(failures=9, failed_at=NOW - 900)}
    assert starts(snapshot([model(low=3)], nodes, node_history=failing)) == ["b", "c", "b"]
    assert starts(snapshot([model(low=1)], nodes[:1], node_history=failing)) == ["a"]  # there is no other
    running = [replica("m-1", "a"), replica("x-1", "b"), replica("x-2", "b"), replica("x-3", "c")]
    assert starts(snapshot([model(low=2), model("x", 3)], nodes, running)) == ["c"]


def test_plan_stops_idle_replicas_of_the_least_preferred_pool_first() -> None:
    pools = [PoolSpec(name="always"), PoolSpec(name="night")]
    nodes = [gpu_node("a", "always", 4), gpu_node("n", "night", 4)]
    running = [
        replica("m-1", "n", idle_seconds=500.0),
        replica("m-2", "a", idle_seconds=100.0),
        replica("m-3", "a", idle_seconds=90.0),
    ]
    wanted = model(low=1, high=3, pools=("night", "always"))
    (decision,) = plan(snapshot([wanted], nodes, running, pools)).decisions
    assert decision == StopReplica("m-2", 30, "idle for 100 s, 3 replicas, min=1", "idle")


def test_plan_follows_an_operator_rather_than_the_schedule() -> None:
    night = PoolSpec(name="night", schedule=CLOSED)
    nodes = [gpu_node("a", "night")]
    assert starts(snapshot([model()], nodes, pools=[PoolTarget(night, True)])) == ["a"]
    always = PoolSpec(name="night")
    assert stops(snapshot([model()], nodes, [replica("m-1", "a")], [PoolTarget(always, False)])) == ["m-1"]
