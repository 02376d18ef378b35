"""How many replicas are started for waiting requests, and which ones of other models make room for them."""

from __future__ import annotations

import pytest

from syringa.fleet.decisions import FleetSnapshot, ModelHistory, ModelTarget, StartReplica, StopReplica
from syringa.fleet.planner import plan
from syringa.fleet.provider import Node, Replica
from tests.fleet.fleet_harness import PoolHarness, gpu_node

NOW = 1000.0
WAITED = ModelHistory(waiting_since=0.0)


def starts(ready: int, waiting: int, running: int, *, starting: int = 0, most: int = 100) -> int:
    """Return the starts of a model whose ready replicas each have so many requests."""
    replicas = [Replica(f"m-{number}", "m", "n", running=running) for number in range(ready)]
    replicas[0] = Replica("m-0", "m", "n", running=running, waiting=waiting)
    replicas += [Replica(f"s-{number}", "m", "n", "starting") for number in range(starting)]
    target = ModelTarget("m", "m", 1, most, gpus=1)
    nodes = [Node("n", gpus=200)]
    decisions = plan(FleetSnapshot(NOW, [target], replicas, nodes, {"m": WAITED})).decisions
    assert all(isinstance(each, StartReplica) and each.cause == "waiting" for each in decisions)
    return len(decisions)


@pytest.mark.parametrize(
    ("ready", "waiting", "running", "expected"),
    [
        (10, 1, 20, 1),
        (10, 60, 20, 3),  # as many as 20 each would fill
        (10, 61, 20, 4),
        (10, 5000, 20, 10),  # twice as many at most
        (1, 5000, 20, 1),
        (1, 3, 0, 1),
    ],
)
def test_plan_starts_as_many_replicas_as_waiting_requests_fill(
    ready: int, waiting: int, running: int, expected: int
) -> None:
    assert starts(ready, waiting, running) == expected


def test_plan_counts_replicas_that_are_being_started_for_waiting_requests() -> None:
    assert starts(10, 60, 20, starting=2) == 1
    assert starts(10, 60, 20, starting=3) == 0
    assert starts(10, 5000, 20, starting=10) == 0


def test_plan_starts_no_more_than_the_maximum_for_waiting_requests() -> None:
    assert starts(10, 5000, 20, most=12) == 2
    assert starts(10, 5000, 20, starting=1, most=12) == 1
    assert starts(10, 5000, 20, most=10) == 0


def test_plan_divides_scarce_room_among_models_by_their_waiting_requests() -> None:
    targets = [ModelTarget(key, key, 1, 100, gpus=1) for key in ("a", "b")]
    replicas = [
        Replica(f"{key}-{number}", key, "n", running=10, waiting=waiting)
        for key, waiting in (("a", 10), ("b", 5))
        for number in range(6)
    ]
    nodes = [Node("n", gpus=len(replicas) + 7)]
    snapshot = FleetSnapshot(NOW, targets, replicas, nodes, {"a": WAITED, "b": WAITED})
    found = [each.model for each in plan(snapshot).decisions if isinstance(each, StartReplica)]
    assert found.count("a") == 5  # from 60 and 30 waiting ones down to 10 each
    assert found.count("b") == 2


def given_way(
    *, running: int, full_load: int = 20, waiting: int = 0, starting: bool = False, minimum: int = 1
) -> list[str]:
    """Return which of four replicas of one model is stopped for another one that has waiting requests and no room."""
    calm = [Replica(f"calm-{number}", "calm", f"n{number}", running=running, started_at=number) for number in range(4)]
    if waiting:
        calm[0] = Replica("calm-0", "calm", "n0", running=running, waiting=waiting)
    if starting:
        calm[0] = Replica("calm-0", "calm", "n0", "starting")
    busy = Replica("busy-0", "busy", "n4", running=10, waiting=30)
    targets = [ModelTarget("calm", "calm", minimum, 9, gpus=1), ModelTarget("busy", "busy", 1, 9, gpus=1)]
    history = {"calm": ModelHistory(full_load=full_load), "busy": WAITED}
    nodes = [Node(f"n{number}", gpus=1) for number in range(5)]
    decisions = plan(FleetSnapshot(NOW, targets, [*calm, busy], nodes, history)).decisions
    assert all(isinstance(each, StopReplica) and each.cause == "preempted" for each in decisions)
    return [each.replica for each in decisions if isinstance(each, StopReplica)]


def test_plan_stops_a_replica_that_its_model_can_spare_for_waiting_requests_of_another_one() -> None:
    assert given_way(running=12) == ["calm-3"]  # 48 requests need three replicas of 16
    assert given_way(running=13) == []  # 52 need four
    assert given_way(running=1, waiting=1) == []
    assert given_way(running=1, starting=True) == []
    assert given_way(running=1, full_load=0) == []  # it is not known how many a replica can run
    assert given_way(running=1, minimum=4) == []


def test_plan_stops_one_replica_at_a_time_for_waiting_requests() -> None:
    targets = [ModelTarget("calm", "calm", 1, 9, gpus=1), ModelTarget("busy", "busy", 1, 9, gpus=1)]
    replicas = [
        Replica("calm-0", "calm", "n0", running=1),
        Replica("calm-1", "calm", "n1", running=1),
        Replica("calm-2", "calm", "n2", "draining"),
        Replica("busy-0", "busy", "n3", running=10, waiting=30),
    ]
    history = {"calm": ModelHistory(full_load=20), "busy": WAITED}
    nodes = [Node(f"n{number}", gpus=1) for number in range(4)]
    assert plan(FleetSnapshot(NOW, targets, replicas, nodes, history)).decisions == []


def test_controller_remembers_how_many_requests_a_full_replica_runs() -> None:
    fleet = PoolHarness([gpu_node("a")], [ModelTarget("m", "m", 1, 1, gpus=1)])
    fleet.run_for(10)
    (id,) = fleet.cluster.running
    for running, waiting, expected in ((9, 0, 0), (7, 2, 7), (3, 0, 7)):
        fleet.cluster.load(id, running=running, waiting=waiting)
        fleet.run_for(1)
        assert fleet.controller._history["m"].full_load == expected
