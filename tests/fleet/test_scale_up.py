"""How many replicas are started for waiting requests."""

from __future__ import annotations

import pytest

from syringa.fleet.controller import FleetSnapshot, ModelHistory, ModelTarget, StartReplica, plan
from syringa.fleet.provider import Node, Replica

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
