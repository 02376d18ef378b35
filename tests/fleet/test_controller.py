"""The decisions of the controller, with a clock and a provider of the test."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import pytest

from syringa.fleet.controller import INTERVAL_SECONDS, Controller
from syringa.fleet.decisions import (
    SCALE_DOWN_SECONDS,
    SCALE_UP_SECONDS,
    Decision,
    FleetSnapshot,
    ModelHistory,
    ModelTarget,
    StartReplica,
    StopReplica,
    backoff,
)
from syringa.fleet.planner import plan
from syringa.fleet.provider import Node, Replica, ReplicaEvent

NOW = 1000.0


def decide(observed: FleetSnapshot) -> Sequence[Decision]:
    return plan(observed).decisions


def snapshot(
    target: ModelTarget,
    *replicas: Replica,
    history: ModelHistory = ModelHistory(),
    nodes: Sequence[Node] = (Node("local"),),
) -> FleetSnapshot:
    return FleetSnapshot(NOW, [target], replicas, nodes, {target.key: history})


def model(low: int = 1, high: int = 1, *, active: bool = True) -> ModelTarget:
    return ModelTarget("k", "m", low, high, active)


def ready(id: str = "m-1", *, waiting: int = 0, idle: float = 0.0, node: str = "local") -> Replica:
    return Replica(id, "k", node, waiting=waiting, idle_seconds=idle)


def kinds(decisions: list[Decision]) -> list[str]:
    return [f"start {each.node}" if isinstance(each, StartReplica) else f"stop {each.replica}" for each in decisions]


def test_decide_starts_the_minimum_of_an_active_model() -> None:
    starting = Replica("m-1", "k", condition="starting")
    decisions = decide(snapshot(model(3, 3), starting))
    assert kinds(decisions) == ["start local", "start local"]
    assert {each.reason for each in decisions} == {"1 replicas, min=3"}
    assert decide(snapshot(model(3, 3, active=False))) == []
    assert decide(snapshot(model(3, 3), ready("m-1"), ready("m-2"), ready("m-3"))) == []


def test_decide_replaces_a_drained_replica_at_once() -> None:
    drained = Replica("m-1", "k", condition="draining")
    assert kinds(decide(snapshot(model(), drained))) == ["start local"]
    assert decide(snapshot(model(active=False), drained)) == []


def test_decide_scales_up_by_one_when_requests_have_waited() -> None:
    busy = ready(waiting=4)
    waited = ModelHistory(waiting_since=NOW - SCALE_UP_SECONDS)
    (decision,) = decide(snapshot(model(1, 3), busy, history=waited))
    assert decision == StartReplica("k", "local", "4 requests wait, 1 replicas, max=3", "waiting")
    assert decide(snapshot(model(1, 3), busy, history=ModelHistory(waiting_since=NOW - SCALE_UP_SECONDS / 2))) == []
    assert decide(snapshot(model(1, 1), busy, history=waited)) == []
    starting = Replica("m-2", "k", condition="starting")
    assert decide(snapshot(model(1, 3), busy, starting, history=waited)) == []  # it may be enough


def test_decide_scales_down_the_most_idle_replica_but_not_below_the_minimum() -> None:
    replicas = [ready("m-1", idle=SCALE_DOWN_SECONDS), ready("m-2", idle=500.0), ready("m-3", idle=1.0)]
    assert kinds(decide(snapshot(model(1, 3), *replicas))) == ["stop m-2"]
    assert decide(snapshot(model(3, 3), *replicas)) == []
    assert decide(snapshot(model(1, 3), *replicas[2:], ready("m-4"))) == []


def test_decide_stops_replicas_above_the_maximum() -> None:
    assert kinds(decide(snapshot(model(1, 1), ready("m-1"), ready("m-2", idle=5.0)))) == ["stop m-2"]


def test_decide_backs_off_from_what_keeps_failing() -> None:
    for failures, seconds in ((1, 1.0), (2, 2.0), (3, 4.0), (30, 300.0), (5000, 300.0)):
        assert backoff(failures) == seconds
        too_early = ModelHistory(failures=failures, failed_at=NOW - seconds + 0.1)
        assert decide(snapshot(model(2, 2), ready(), history=too_early)) == []
        due = ModelHistory(failures=failures, failed_at=NOW - seconds)
        assert kinds(decide(snapshot(model(2, 2), ready(), history=due))) == ["start local"]


def test_decide_spreads_replicas_over_nodes_with_room() -> None:
    nodes = [Node("a", gpus=2), Node("b", gpus=1), Node("c", condition="draining", gpus=2)]
    decisions = decide(snapshot(model(3, 3), nodes=nodes))
    assert kinds(decisions) == ["start a", "start b", "start a"]
    full = [Node("b", gpus=1)]
    assert decide(snapshot(model(2, 2), ready(node="b"), nodes=full)) == []


def test_decide_moves_replicas_away_from_a_node_that_is_drained() -> None:
    nodes = [Node("a", condition="draining"), Node("b")]
    decisions = decide(snapshot(model(), ready("m-1", node="a"), nodes=nodes))
    assert kinds(decisions) == ["stop m-1", "start b"]


class FakeProvider:
    def __init__(self) -> None:
        self.running: dict[str, Replica] = {}
        self.happened: list[ReplicaEvent] = []
        self.stopped: list[tuple[str, float]] = []
        self._numbers = itertools.count(1)

    def nodes(self) -> Sequence[Node]:
        return [Node("local")]

    def replicas(self) -> Sequence[Replica]:
        return list(self.running.values())

    def start(self, model: str, node: str) -> str:
        id = f"m-{next(self._numbers)}"
        self.running[id] = Replica(id, model, node, "starting")
        return id

    def stop(self, replica: str, grace: float) -> None:
        self.stopped.append((replica, grace))

    def events(self) -> Sequence[ReplicaEvent]:
        happened, self.happened = self.happened, []
        return happened

    def become_ready(self, id: str, **fields: object) -> None:
        self.running[id] = Replica(id, "k", **fields)  # type: ignore[arg-type]
        self.happened.append(ReplicaEvent("ready", id, "k"))

    def fail(self, id: str) -> None:
        del self.running[id]
        self.happened.append(ReplicaEvent("failed", id, "k", "status 1"))


class ControllerHarness:
    def __init__(self, target: ModelTarget, *, lease: bool = True) -> None:
        self.provider, self.now, self.lease = FakeProvider(), 0.0, lease
        self.controller = Controller(self.provider, lambda: [target], lambda: self.now, lambda: self.lease)

    def run_for(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.controller.tick()
            self.now += 0.25


def test_controller_decides_once_per_interval(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "syringa.fleet")
    harness = ControllerHarness(model(2, 2))
    harness.run_for(5 * INTERVAL_SECONDS)
    assert list(harness.provider.running) == ["m-1", "m-2"]
    expected = "replica is started: model=m node=local reason='0 replicas, min=2'"
    assert caplog.messages == [expected, expected]


def test_controller_replaces_what_fails_with_growing_delays() -> None:
    harness = ControllerHarness(model())
    starts = []
    for _ in range(5):
        while not harness.provider.running:
            harness.run_for(0.25)
        starts.append(harness.now)
        harness.provider.fail(next(iter(harness.provider.running)))
    delays = [after - before for before, after in itertools.pairwise(starts)]
    assert delays == sorted(delays)
    assert 1 <= delays[0] <= 2.5
    assert 8 <= delays[3] <= 10
    harness.provider.happened.clear()


def test_controller_forgets_failures_when_a_replica_is_ready() -> None:
    harness = ControllerHarness(model())
    harness.run_for(1)
    for _ in range(4):
        harness.provider.fail(next(iter(harness.provider.running)))
        harness.run_for(40)
    harness.provider.become_ready(next(iter(harness.provider.running)))
    harness.run_for(2)
    harness.provider.fail(next(iter(harness.provider.running)))
    harness.run_for(3)
    assert harness.provider.running


def test_controller_scales_up_after_an_uninterrupted_wait_only() -> None:
    harness = ControllerHarness(model(1, 2))
    provider = harness.provider
    harness.run_for(1)
    for waiting in (1, 0, 1, 0, 1, 0):
        provider.become_ready("m-1", waiting=waiting)
        harness.run_for(1)
    assert list(provider.running) == ["m-1"]
    provider.become_ready("m-1", waiting=1)
    harness.run_for(SCALE_UP_SECONDS + 2)
    assert list(provider.running) == ["m-1", "m-2"]


def test_controller_without_the_lease_does_nothing_until_it_has_it() -> None:
    harness = ControllerHarness(model(), lease=False)
    harness.run_for(5)
    assert not harness.provider.running
    harness.lease = True
    harness.run_for(1)
    assert harness.provider.running


def test_controller_stops_an_idle_replica_with_a_grace_period() -> None:
    harness = ControllerHarness(model(1, 2))
    for id in ("m-1", "m-2"):
        harness.provider.become_ready(id, idle_seconds=SCALE_DOWN_SECONDS)
    harness.controller.tick()
    ((replica, grace),) = harness.provider.stopped
    assert replica == "m-1"
    assert grace > 0


def test_stop_decision_has_a_reason() -> None:
    (decision,) = decide(snapshot(model(1, 2), ready("m-1", idle=61.0), ready("m-2")))
    assert isinstance(decision, StopReplica)
    assert decision.reason == "idle for 61 s, 2 replicas, min=1"
