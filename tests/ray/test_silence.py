"""What the bridge makes of nodes and replicas that do not answer, of its own restart, and of other servers."""

from __future__ import annotations

import dataclasses
import queue
from typing import cast

import msgspec
import pytest

from syringa.fleet.bridge_protocol import (
    BridgeOptions,
    FleetReport,
    LaunchReplica,
    ReleaseNode,
    RetireReplica,
    ToBridge,
)
from syringa.fleet.provider import OwnerLoad
from syringa.ray import node_table, replica_table
from syringa.ray.bridge import Bridge, RayFleet, SupervisorLink, state_of
from syringa.ray.driver import ActorGone, CallFailed
from syringa.types import EngineStats
from tests.ray.table_harness import Fleet


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_node_and_a_replica_whose_calls_all_fail_do_not_respond(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    for actor in (*fleet.driver.agents, fleet.driver.replica("m-1")):
        if actor.node == "id-a":
            actor.answer = CallFailed("the connection was reset")
    fleet.tick()
    node = fleet.node("a")
    assert node is not None
    assert (node.condition, node.owner_load) == ("ready", None)  # what was measured before is not what is now
    fleet.tick(node_table.SILENT_SECONDS + 2)
    assert (fleet.condition("a"), fleet.condition("b"), fleet.replica().phase) == ("lost", "ready", "hanging")


def test_an_agent_that_dies_takes_its_measurement_with_it(fleet: Fleet) -> None:
    fleet.tick()
    fleet.driver.agents[0].answer = ActorGone("killed")
    fleet.tick(1.5)
    node = fleet.node("a")
    assert node is not None
    assert (node.condition, node.owner_load) == ("ready", None)


def test_a_bridge_that_was_stopped_itself_loses_nothing(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    for actor in (*fleet.driver.agents, fleet.driver.replica("m-1")):
        actor.responds = False
    fleet.tick(1)
    fleet.clock.now += 100
    fleet.fleet.tick()
    assert (fleet.condition("a"), fleet.replica().phase) == ("ready", "ready")
    fleet.tick(node_table.SILENT_SECONDS + 2)
    assert (fleet.condition("a"), fleet.replica().phase) == ("lost", "hanging")


def test_a_host_that_stays_silent_on_a_node_that_responds_is_killed_and_has_failed(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    actor = fleet.driver.replica("m-1")
    actor.responds = False
    fleet.tick(replica_table.SILENT_KILL_SECONDS - 1)
    assert (fleet.replica().phase, actor.killed) == ("hanging", False)
    fleet.tick(3)
    assert actor.killed
    assert (fleet.replica().phase, fleet.replica().failed) == ("ended", True)
    assert fleet.replica().reason == "its host process does not respond"


def test_a_host_that_is_silent_with_its_node_is_not_killed(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    for actor in (*fleet.driver.agents, fleet.driver.replica("m-1")):
        actor.responds = False
    fleet.tick(replica_table.SILENT_KILL_SECONDS + 10)
    assert (fleet.replica().phase, fleet.driver.replica("m-1").killed) == ("hanging", False)


def test_a_replica_that_finds_no_room_on_its_node_fails(fleet: Fleet) -> None:
    fleet.launch()
    actor = fleet.driver.replica("m-1")
    actor.responds = False
    fleet.tick(replica_table.QUEUED_SECONDS - 1)
    assert fleet.replica().phase == "queued"
    fleet.tick(3)
    assert actor.killed
    assert (fleet.replica().phase, fleet.replica().failed) == ("ended", True)
    assert fleet.replica().reason == "it found no room on a within 60 s"


def test_the_host_of_a_lost_replica_is_killed_in_case_it_lives(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    fleet.driver.end("id-a")
    fleet.tick()
    assert fleet.driver.replica("m-1").killed


def test_a_replica_that_another_server_starts_is_found(fleet: Fleet) -> None:
    other = Fleet(fleet.driver)
    fleet.launch()
    fleet.make_ready()
    other.tick(replica_table.LIST_SECONDS + 1)
    assert other.replica() == fleet.replica()


@pytest.mark.parametrize("restarted", [True, False])
def test_a_replica_is_not_lost_where_another_bridge_has_another_name_for_its_node(
    fleet: Fleet, restarted: bool
) -> None:
    """A node that joined again before the old one was noticed to be gone has a suffix, but not for a new bridge."""
    if restarted:
        fleet.driver.add("a", id="0123456789")
        fleet.tick()
        name, known_as = "a-012345", "a"
    else:
        name, known_as = "a", "a-012345"
        other = Fleet(fleet.driver)
        fleet.driver.add("a", id="0123456789")
        other.tick()
    fleet.driver.end("id-a")
    fleet.tick()
    fleet.launch(node=name)
    fleet.make_ready()
    if restarted:
        other = Fleet(fleet.driver)
    other.tick(replica_table.LIST_SECONDS + 1)
    assert (fleet.replica().node, other.replica().node) == (name, known_as)
    assert other.replica().phase == "ready"
    assert other.condition(known_as) == "ready"
    assert not fleet.driver.replica("m-1").killed
    other.launch("m-2", name)
    other.tick()
    assert fleet.driver.replica("m-2").node == "0123456789"


@pytest.mark.parametrize("starter_first", [True, False])
def test_the_crash_of_a_replica_is_seen_by_the_bridges_of_both_servers(fleet: Fleet, starter_first: bool) -> None:
    other = Fleet(fleet.driver)
    fleet.launch()
    fleet.make_ready()
    other.tick(replica_table.LIST_SECONDS + 1)
    ended = msgspec.structs.replace(fleet.replica(), phase="ended", crashed=True, failed=True, suspects=[b"x" * 16])
    fleet.driver.set_report(ended)
    for each in (fleet, other) if starter_first else (other, fleet):
        each.tick()
        assert not fleet.driver.replica("m-1").killed
    assert (fleet.replica(), other.replica()) == (ended, ended)
    fleet.tick(replica_table.REAP_SECONDS)
    assert fleet.driver.replica("m-1").killed


def test_the_host_of_an_own_replica_that_was_drained_is_killed_at_once(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    fleet.fleet.handle(RetireReplica("m-1", 5.0))
    fleet.driver.set_report(msgspec.structs.replace(fleet.replica(), phase="ended"))
    fleet.tick()
    assert fleet.driver.replica("m-1").killed


def test_a_replica_that_another_server_has_drained_has_not_failed(fleet: Fleet) -> None:
    """Its host may be gone before the bridge of this server has read how it ended."""
    other = Fleet(fleet.driver)
    fleet.launch()
    fleet.make_ready()
    other.tick(replica_table.LIST_SECONDS + 1)
    fleet.driver.set_report(msgspec.structs.replace(fleet.replica(), phase="draining", grace=5.0))
    other.tick()
    assert other.replica().phase == "draining"
    fleet.driver.replica("m-1").answer = ActorGone("it was killed")
    other.tick()
    assert (other.replica().phase, other.replica().failed) == ("ended", False)


def test_the_host_of_a_replica_of_another_server_is_killed_if_that_does_not(fleet: Fleet) -> None:
    other = Fleet(fleet.driver)
    fleet.launch()
    fleet.make_ready()
    other.tick(replica_table.LIST_SECONDS + 1)
    fleet.driver.set_report(msgspec.structs.replace(fleet.replica(), phase="ended"))
    other.tick(replica_table.REAP_SECONDS + 1)
    assert fleet.driver.replica("m-1").killed


class Link:
    """Wishes for a bridge, and its reports."""

    def __init__(self, *messages: ToBridge) -> None:
        self.messages: queue.SimpleQueue[ToBridge] = queue.SimpleQueue()
        for each in messages:
            self.messages.put(each)
        self.reports: list[FleetReport] = []

    def update(self, report: FleetReport) -> None:
        self.reports.append(report)

    def keep(self) -> None:
        pass


def test_wishes_that_are_repeated_to_a_new_bridge_wait_until_it_knows_nodes_and_replicas(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    actor = fleet.driver.replica("m-1")
    actor.responds = False
    link = Link(RetireReplica("m-1", 25.0), LaunchReplica("m-2", "key", "b", b"{}"), ReleaseNode("a", 12.0))
    bridge = Bridge(BridgeOptions(socket="", cluster_dir=""), cast(SupervisorLink, link))
    restarted = RayFleet(fleet.driver, fleet.clock, fleet.wall_clock)
    bridge.step(restarted)
    assert link.reports == []
    actor.responds = True
    fleet.clock.now += 0.5
    bridge.step(restarted)
    assert ("drain", 25.0) in actor.calls
    assert not actor.killed
    assert fleet.driver.drained == [("id-a", 12.0)]
    assert {each.id: each.phase for each in link.reports[-1].replicas} == {"m-1": "ready", "m-2": "queued"}


def test_a_new_bridge_without_replicas_knows_nodes_before_it_handles_wishes(fleet: Fleet) -> None:
    link = Link(LaunchReplica("m-1", "key", "a", b"{}"))
    bridge = Bridge(BridgeOptions(socket="", cluster_dir=""), cast(SupervisorLink, link))
    bridge.step(RayFleet(fleet.driver, fleet.clock, fleet.wall_clock))
    assert [(each.id, each.phase) for each in link.reports[-1].replicas] == [("m-1", "queued")]


def test_a_replica_that_was_found_is_drained_also_if_it_has_not_answered(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    actor = fleet.driver.replica("m-1")
    actor.responds = False
    restarted = RayFleet(fleet.driver, fleet.clock, fleet.wall_clock)
    restarted.handle(RetireReplica("m-1", 25.0))
    assert (actor.calls[-1], actor.killed) == (("drain", 25.0), False)


def test_loads_and_statistics_do_not_cause_reports_of_their_own(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    before = fleet.report()
    nodes = [dataclasses.replace(each, owner_load=OwnerLoad(cpu_pct=9.0), drain_grace=3.0) for each in before.nodes]
    stats = [msgspec.structs.replace(each, stats=EngineStats(running=1)) for each in before.replicas]
    assert state_of(FleetReport(nodes, stats)) == state_of(before)
    lost = [dataclasses.replace(each, condition="lost") for each in before.nodes]
    assert state_of(FleetReport(lost, before.replicas)) != state_of(before)
    hanging = [msgspec.structs.replace(each, phase="hanging") for each in before.replicas]
    assert state_of(FleetReport(before.nodes, hanging)) != state_of(before)
