"""The controller with pools over time: a clock, nodes and replicas of the test."""

from __future__ import annotations

import logging

import pytest

from syringa.fleet.decisions import MOVE_AFTER_SECONDS, ModelTarget
from syringa.fleet.pools import IdleThresholds, PoolCapacity, PoolPreemption, PoolSpec
from syringa.fleet.provider import Node
from syringa.fleet.schedule import PoolSchedule, PoolWindow
from tests.fleet.fleet_harness import BUSY, IDLE, PoolHarness, gpu_node

ALWAYS = PoolSpec(name="always")
NIGHT = PoolSpec(
    name="night",
    schedule=PoolSchedule(
        mode="scheduled", timezone="Europe/Berlin", windows=(PoolWindow(start="22:00", end="06:00"),)
    ),
    preemption=PoolPreemption(grace_period=20),
)
IDLE_POOL = PoolSpec(name="idle", schedule=PoolSchedule(mode="idle"), idle=IdleThresholds(after=30))
NODES = (gpu_node("a1", "always"), gpu_node("n1", "night", 2), gpu_node("n2", "night", 2))


def model(low: int = 1, high: int = 0, *pools: str, key: str = "m") -> ModelTarget:
    return ModelTarget(key, key, low, max(low, high), pools=pools)


def test_controller_uses_a_pool_in_its_window_over_midnight() -> None:
    fleet = PoolHarness(NODES, [model(3, 0, "night")], [ALWAYS, NIGHT], begin="2026-01-30 21:59")
    fleet.run_until("2026-01-30 22:00")
    assert fleet.pool("night").state == "inactive"
    assert "pool night is closed" in fleet.controller.shortages["m"]
    fleet.run_for(10)
    assert fleet.ready() == ["n1", "n1", "n2"]
    assert fleet.pool("night").state == "active"
    fleet.skip_to("2026-01-31 05:59:50")
    fleet.run_until("2026-01-31 06:00")
    assert len(fleet.ready()) == 3
    fleet.run_for(1)
    assert fleet.ready() == []
    assert [grace for _, grace in fleet.cluster.stops] == [20, 20, 20]
    assert fleet.pool("night").state == "closing"
    fleet.run_for(25)
    assert not fleet.cluster.running
    assert fleet.pool("night").state == "inactive"
    assert fleet.controller.status().evictions["pool_closed"] == 3
    moves = fleet.controller.status().moves
    assert [each.action for each in moves] == ["stop"] * 3 + ["start"] * 3
    assert {(each.model, each.node) for each in moves[:3]} == {("m", "n1"), ("m", "n2")}
    assert all("pool night is closed" in each.reason for each in moves[:3])


@pytest.mark.parametrize(
    ("night", "hours"), [("2026-03-28", 7), ("2026-10-24", 9)], ids=["an hour is skipped", "an hour comes twice"]
)
def test_controller_closes_a_pool_once_in_a_night_with_a_change_of_the_clock(night: str, hours: int) -> None:
    fleet = PoolHarness(NODES, [model(3, 0, "night")], [ALWAYS, NIGHT], begin=f"{night} 22:00", load_seconds=0)
    seconds = 0
    while not fleet.cluster.stops and seconds < 36_000:
        fleet.run_for(1)
        fleet.cluster.advance(59)
        seconds += 60
    assert abs(seconds - 3600 * hours) <= 60
    assert len(fleet.cluster.stops) == 3
    for _ in range(60):
        fleet.run_for(1)
        fleet.cluster.advance(119)
    assert len(fleet.cluster.stops) == 3
    assert not fleet.cluster.running


def test_controller_logs_what_a_replica_runs_that_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    fleet = PoolHarness(NODES, [model(1, 0, "night")], [ALWAYS, NIGHT], begin="2026-01-31 05:59:40")
    fleet.run_for(10)
    replica = fleet.only("m")
    fleet.cluster.load(replica.id, running=7)
    caplog.set_level(logging.INFO, "syringa.fleet")
    fleet.run_for(11)
    where = f"replica={replica.id} node={replica.node} sequences=7 grace=20"
    assert [each for each in caplog.messages if "stopped" in each] == [
        f"replica is stopped: {where} reason='pool night is closed'"
    ]


def test_controller_evicts_last_in_first_out() -> None:
    fleet = PoolHarness(NODES, [model(1, 0, "night")], [ALWAYS, NIGHT], begin="2026-01-30 22:00")
    for count in (2, 3, 4):
        fleet.run_for(10)
        fleet.models = [model(count, 0, "night")]
    fleet.run_for(10)
    started = list(fleet.cluster.running)
    fleet.controller.set_pool("night", False)
    fleet.run_for(1)
    assert [id for id, _ in fleet.cluster.stops] == started[::-1]


def test_controller_moves_from_a_closing_pool_to_the_next_one() -> None:
    fleet = PoolHarness(NODES, [model(1, 0, "night", "always")], [ALWAYS, NIGHT], begin="2026-01-31 05:59")
    fleet.run_for(30)
    assert fleet.ready() == ["n1"]
    fleet.run_until("2026-01-31 06:00:01")
    assert sorted(each.node for each in fleet.cluster.running.values()) == ["a1", "n1"]  # one drains, one loads
    fleet.run_for(30)
    assert fleet.ready() == ["a1"]


def test_controller_moves_to_a_preferred_pool_only_when_the_replacement_is_ready() -> None:
    fleet = PoolHarness(NODES, [model(1, 0, "night", "always")], [ALWAYS, NIGHT], begin="2026-01-30 21:59")
    fleet.run_until("2026-01-30 22:00:01")
    assert fleet.ready() == ["a1"]
    while len(fleet.cluster.running) == 1:
        fleet.run_for(1)
        assert fleet.cluster.now < 600
    assert fleet.cluster.now >= 60 + MOVE_AFTER_SECONDS
    while fleet.ready() != ["a1", "n1"]:
        assert fleet.ready() == ["a1"]
        assert not fleet.cluster.stops
        fleet.run_for(1)
        assert fleet.cluster.now < 600
    fleet.run_for(2)
    assert fleet.ready() == ["n1"]
    assert [id for id, _ in fleet.cluster.stops] == ["m-1"]
    fleet.run_for(600)
    assert len(fleet.cluster.stops) == 1  # and stays there
    assert fleet.controller.status().evictions == dict.fromkeys(fleet.controller.status().evictions, 0)


def test_controller_does_not_move_to_a_pool_that_is_about_to_close() -> None:
    fleet = PoolHarness(NODES, [model(1, 0, "always")], [ALWAYS, NIGHT], begin="2026-01-31 05:45")
    fleet.run_for(10)
    fleet.models = [model(1, 0, "night", "always")]
    fleet.skip_to("2026-01-31 05:52")
    fleet.run_for(300)
    assert fleet.ready() == ["a1"]
    assert not fleet.cluster.stops


def test_controller_keeps_the_old_replica_when_the_replacement_fails() -> None:
    fleet = PoolHarness(NODES, [model(1, 0, "night", "always")], [ALWAYS, NIGHT], begin="2026-01-30 21:59")
    fleet.cluster.failing = {"n1", "n2"}
    fleet.run_for(400)
    assert fleet.ready() == ["a1"]
    assert not fleet.cluster.stops
    fleet.cluster.failing.clear()
    fleet.run_for(400)
    assert fleet.ready()[0].startswith("n")


def test_controller_offers_an_idle_node_after_a_while_and_reclaims_it_at_once() -> None:
    nodes = (gpu_node("i1", "idle", load=BUSY), gpu_node("i2", "idle", load=None))
    fleet = PoolHarness(nodes, [model(1, 0, "idle")], [IDLE_POOL])
    fleet.run_for(60)
    assert not fleet.cluster.running
    assert fleet.node("i1").reason == "its owner uses more than 5 % of a GPU"
    assert fleet.node("i2").reason == "the load of its owner is not measured"
    fleet.cluster.change("i1", owner_load=IDLE)
    fleet.run_for(20)
    fleet.cluster.change("i1", owner_load=BUSY)  # it was idle for too short a time
    fleet.run_for(1)
    fleet.cluster.change("i1", owner_load=IDLE)
    fleet.run_for(29)
    assert not fleet.cluster.running
    assert fleet.node("i1").reason == "has been idle for less than 30 s"
    fleet.run_for(10)
    assert fleet.ready() == ["i1"]
    fleet.cluster.change("i1", owner_load=BUSY)
    fleet.run_for(1)
    assert fleet.cluster.stops == [("m-1", 30)]
    assert fleet.controller.status().evictions["owner_returned"] == 1
    fleet.run_for(60)
    assert not fleet.cluster.running


def test_controller_reclaims_a_replica_that_is_loading_without_grace() -> None:
    nodes = (gpu_node("i1", "idle", load=IDLE), gpu_node("a1", "always"))
    fleet = PoolHarness(nodes, [model(1, 0, "idle", "always")], [IDLE_POOL, ALWAYS], load_seconds=60)
    fleet.cluster.change("a1", condition="draining")
    fleet.run_for(40)
    assert fleet.only("m").node == "i1"
    assert fleet.only("m").condition == "starting"
    fleet.cluster.change("a1", condition="ready")
    fleet.cluster.change("i1", owner_load=BUSY)
    fleet.run_for(1)
    assert fleet.cluster.stops == [("m-1", 0)]
    fleet.run_for(2)
    assert fleet.only("m").node == "a1"
    fleet.run_for(61)
    assert fleet.ready() == ["a1"]


def test_controller_gives_a_node_back_whose_load_is_not_measured_any_more() -> None:
    fleet = PoolHarness([gpu_node("i1", "idle", load=IDLE)], [model(1, 0, "idle")], [IDLE_POOL])
    fleet.run_for(40)
    fleet.cluster.change("i1", owner_load=None)
    fleet.run_for(25)
    assert fleet.ready() == ["i1"]
    fleet.run_for(10)
    assert fleet.ready() == []


def test_controller_gives_a_node_back_whose_load_it_has_never_measured() -> None:
    fleet = PoolHarness([gpu_node("i1", "idle", load=IDLE)], [model(1, 0, "idle")], [IDLE_POOL])
    fleet.run_for(40)
    assert fleet.ready() == ["i1"]
    fleet.cluster.change("i1", owner_load=None)
    fleet.restart()
    fleet.run_for(25)
    assert fleet.ready() == ["i1"]
    fleet.run_for(10)
    assert fleet.ready() == []


def test_controller_measures_the_cpu_of_a_node_without_gpus() -> None:
    nodes = [Node("c1", labels={"pool": "idle"}, cpus=8, owner_load=BUSY)]
    fleet = PoolHarness(nodes, [model(1, 0, "idle")], [IDLE_POOL])
    fleet.run_for(5)
    assert fleet.node("c1").reason == "its owner uses more than 20 % of the CPU"
    fleet.cluster.change("c1", owner_load=IDLE)
    fleet.run_for(40)
    assert fleet.ready() == ["c1"]


def test_controller_keeps_replicas_of_an_idle_pool_over_a_restart() -> None:
    fleet = PoolHarness([gpu_node("i1", "idle", load=IDLE)], [model(1, 0, "idle")], [IDLE_POOL])
    fleet.run_for(40)
    fleet.restart()
    fleet.run_for(40)
    assert not fleet.cluster.stops
    assert fleet.ready() == ["i1"]


def test_controller_replaces_what_a_lost_node_ran_and_measures_how_long_that_takes() -> None:
    nodes = [gpu_node("a1"), gpu_node("a2"), gpu_node("a3")]
    fleet = PoolHarness(nodes, [model(2)])
    fleet.run_for(10)
    assert fleet.ready() == ["a1", "a2"]
    fleet.cluster.lose("a1")
    fleet.run_for(1)
    assert fleet.pool("default").state == "degraded"
    assert fleet.pool("default").reason == "lost: a1"
    assert fleet.node("a1").state == "lost"
    fleet.run_for(10)
    assert fleet.ready() == ["a2", "a3"]
    recovery = fleet.controller.status().recovery
    assert sum(recovery.counts) == 1
    assert 5 <= recovery.sum <= 8
    fleet.run_for(30)
    assert sum(fleet.controller.status().recovery.counts) == 1


def test_controller_does_not_measure_a_recovery_when_a_model_is_first_loaded_or_unloaded() -> None:
    fleet = PoolHarness([gpu_node("a1"), gpu_node("a2")], [model(2)])
    fleet.run_for(10)
    fleet.models = [ModelTarget("m", "m", 2, 2, active=False)]
    fleet.cluster.crash("m-1")
    fleet.run_for(10)
    fleet.models = [model(2)]
    fleet.run_for(20)
    assert fleet.ready() == ["a1", "a2"]
    assert sum(fleet.controller.status().recovery.counts) == 0


def test_controller_puts_replicas_on_other_nodes_than_one_that_flaps() -> None:
    nodes = [gpu_node("a1", gpus=4), gpu_node("a2", gpus=4), gpu_node("a3", gpus=4)]
    fleet = PoolHarness(nodes, [model(1)])
    fleet.run_for(10)
    assert fleet.ready() == ["a1"]
    for _ in range(3):
        fleet.cluster.lose("a1")
        fleet.run_for(10)
        fleet.cluster.change("a1", condition="ready")
        fleet.run_for(10)
    fleet.models = [model(3)]
    fleet.run_for(10)
    assert fleet.ready() == ["a2", "a2", "a3"] or fleet.ready() == ["a2", "a3", "a3"]


def test_controller_puts_replicas_on_other_nodes_than_one_where_they_fail() -> None:
    nodes = [gpu_node("a1", gpus=4), gpu_node("a2", gpus=4)]
    fleet = PoolHarness(nodes, [model(2)])
    fleet.cluster.failing = {"a1"}
    fleet.run_for(60)
    assert fleet.ready() == ["a2", "a2"]
    starts = [each for each in range(1, 10) if f"m-{each}" in fleet.cluster.running]
    assert max(starts) <= 4  # not again and again on the node where they fail
    fleet.cluster.failing.clear()
    fleet.cluster.advance(700)
    fleet.models = [model(3)]
    fleet.run_for(10)
    assert fleet.ready() == ["a1", "a2", "a2"]  # its failures are forgotten


def test_controller_counts_failures_at_the_same_time_as_one() -> None:
    fleet = PoolHarness([gpu_node("a1", gpus=8), gpu_node("a2", gpus=8)], [model(8)])
    fleet.run_for(10)
    fleet.cluster.lose("a1")
    fleet.run_for(3)
    assert len(fleet.cluster.running) == 8  # replaced after the first back-off of one second


def test_controller_drains_a_node_with_the_grace_that_it_grants() -> None:
    fleet = PoolHarness([gpu_node("a1"), gpu_node("a2")], [model(1)])
    fleet.run_for(10)
    fleet.cluster.change("a1", condition="draining", drain_grace=5.0)
    fleet.run_for(1)
    assert fleet.cluster.stops == [("m-1", 5)]
    assert [each.node for each in fleet.cluster.running.values() if each.condition == "starting"] == ["a2"]
    assert fleet.node("a1").state == "draining"
    assert fleet.node("a1").reason == "is drained"
    fleet.run_for(10)
    assert fleet.ready() == ["a2"]
    assert fleet.controller.status().evictions["node_drained"] == 1


def test_controller_fits_a_pool_to_its_capacity() -> None:
    pool = PoolSpec(name="p", capacity=PoolCapacity(max_utilization_pct=50))
    fleet = PoolHarness([gpu_node(f"p{number}", "p", 2) for number in range(4)], [model(9)], [pool])
    fleet.run_for(10)
    assert len(fleet.ready()) == 4
    assert fleet.pool("p").gpus == 8
    assert fleet.pool("p").gpus_used == 4
    assert fleet.pool("p").state == "degraded"
    assert fleet.pool("p").reason == "no room for m"
    reason = "no capacity: pool p uses 4 of 4 GPUs; pool default has no node that may be used now"
    assert fleet.controller.shortages == {"m": reason}
    fleet.cluster.change("p0", gpus=1)  # three of seven
    fleet.run_for(1)
    assert [id for id, _ in fleet.cluster.stops] == ["m-4"]
    fleet.run_for(40)
    assert len(fleet.ready()) == 3
    assert fleet.controller.status().evictions["capacity"] == 1


def test_operator_closes_and_opens_a_pool_and_it_is_remembered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "syringa.fleet")
    fleet = PoolHarness(NODES, [model(1, 0, "always", "night")], [ALWAYS, NIGHT])
    fleet.run_for(10)
    assert fleet.controller.set_pool("always", False)
    assert not fleet.controller.set_pool("unknown", True)
    fleet.run_for(1)
    assert fleet.pool("always").state == "closing"
    assert fleet.pool("always").reason == "closed by an operator"
    assert fleet.pool("night").changes_at is not None
    fleet.restart()
    assert fleet.controller.set_pool("night", True)
    fleet.run_for(40)
    assert fleet.pool("always").override is False
    assert fleet.pool("night").reason == "opened by an operator"
    assert fleet.pool("night").changes_at is None
    assert fleet.ready() == ["n1"]
    fleet.restart()
    fleet.controller.set_pool("night", None)
    fleet.controller.set_pool("always", None)
    fleet.run_for(60)
    assert fleet.ready() == ["a1"]
    assert "pool is closed: pool=always" in caplog.messages


def test_status_describes_nodes_and_pools() -> None:
    nodes = [*NODES, gpu_node("x1", "mistyped"), Node("c1", labels={"pool": "always"}, cpus=8)]
    fleet = PoolHarness(nodes, [model(2, 0, "always")], [ALWAYS, NIGHT], begin="2026-01-30 12:00")
    fleet.run_for(10)
    always, night = fleet.controller.status().pools  # the implicit pool has no nodes
    assert (always.name, always.state, always.nodes, always.offered, always.replicas) == ("always", "active", 2, 2, 2)
    assert (always.gpus, always.gpus_used, always.cpus, always.cpus_used) == (1, 1, 8, 8)
    assert (night.name, night.state, night.mode, night.reason) == (
        "night",
        "inactive",
        "scheduled",
        "outside of its windows",
    )
    assert night.offered == 0
    by_name = {each.name: each for each in fleet.controller.status().nodes}
    assert by_name["a1"].offered
    assert by_name["a1"].replicas == 1
    assert (by_name["n1"].pool, by_name["n1"].offered, by_name["n1"].reason) == (
        "night",
        False,
        "pool night is closed",
    )
    assert (by_name["x1"].pool, by_name["x1"].reason) == ("", "is in the pool mistyped, which is not configured")


def test_node_that_the_selector_of_its_pool_does_not_match_says_so() -> None:
    pools = [PoolSpec(name="night", selector={"kind": "h100", "zone": "a"})]
    labels = {"pool": "night", "kind": "a100", "zone": "a"}
    fleet = PoolHarness([Node("n1", cpus=1, labels=labels)], [model(1, 1)], pools=pools)
    fleet.run_for(2)
    (node,) = fleet.controller.status().nodes
    assert (node.pool, node.offered) == ("", False)
    assert node.reason == "is labeled pool=night, but the selector of night is kind=h100, zone=a"


def test_controller_preempts_once_for_a_model_without_a_replica() -> None:
    fleet = PoolHarness([gpu_node("a1", gpus=3)], [model(1, 3, key="big")])
    fleet.run_for(10)
    for _ in range(2):
        fleet.cluster.load(next(iter(fleet.cluster.running)), waiting=9)
        fleet.run_for(15)
    assert fleet.ready("big") == ["a1"] * 3
    fleet.models.append(model(1, key="small"))
    fleet.run_for(20)
    assert len(fleet.cluster.stops) == 1
    assert fleet.ready("small") == []
    fleet.run_for(30)
    assert fleet.ready("small") == ["a1"]
    assert fleet.ready("big") == ["a1"] * 2
    fleet.run_for(100)
    assert len(fleet.cluster.stops) == 1
    assert fleet.controller.status().evictions["preempted"] == 1


def test_controller_does_not_move_to_a_preferred_node_that_flaps() -> None:
    fleet = PoolHarness(NODES[:2], [model(1, 0, "night", "always")], [ALWAYS, NIGHT], begin="2026-01-30 22:00")
    fleet.cluster.change("n1", condition="lost")
    fleet.run_for(10)
    assert fleet.ready() == ["a1"]
    fleet.cluster.change("n1", condition="ready")
    fleet.run_for(5)
    fleet.cluster.change("n1", condition="lost")
    fleet.run_for(5)
    fleet.cluster.change("n1", condition="ready")
    fleet.run_for(300)
    assert fleet.ready() == ["a1"]
    fleet.run_for(400)  # until its failure is forgotten
    assert fleet.ready() == ["n1"]


def test_node_that_was_drained_and_has_left_does_not_count_as_flapping() -> None:
    nodes = [gpu_node("a1", gpus=2), gpu_node("a2", gpus=2)]
    fleet = PoolHarness(nodes, [model(1)])
    fleet.cluster.change("a1", condition="draining")
    fleet.run_for(10)
    del fleet.cluster.machines["a1"]
    fleet.run_for(10)
    fleet.cluster.machines["a1"] = nodes[0]
    fleet.models = [model(2)]
    fleet.run_for(10)
    assert fleet.ready() == ["a1", "a2"]


def test_controller_without_the_lease_describes_what_there_is() -> None:
    fleet = PoolHarness(NODES, [model(1, 0, "always")], [ALWAYS, NIGHT], lease=False)
    fleet.run_for(3)
    assert not fleet.cluster.running
    assert [node.name for node in fleet.controller.status().nodes] == ["a1", "n1", "n2"]
    assert fleet.pool("night").state == "inactive"
