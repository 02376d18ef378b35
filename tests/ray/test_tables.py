"""What the bridge makes of nodes and replicas, without Ray and under a clock of its own."""

from __future__ import annotations

import msgspec
import pytest

from syringa.fleet.bridge_protocol import ENDED_SECONDS, KillReplica, ReleaseNode, RetireReplica
from syringa.fleet.provider import Node
from syringa.ray import node_table, replica_table
from syringa.ray.bridge import RayFleet
from syringa.ray.driver import ActorGone, CallFailed
from syringa.ray.processes import HEAD_LABEL
from tests.ray.fake_driver import MEMORY, FakeDriver
from tests.ray.table_harness import NOW, Fleet


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_nodes_have_labels_resources_and_the_load_that_their_agents_see(fleet: Fleet) -> None:
    fleet.tick()
    node = fleet.node("a")
    assert node == Node(
        "a",
        condition="ready",
        labels={"pool": "x"},
        cpus=2,
        memory=MEMORY,
        joined_at=NOW + 0.5,
        owner_load=fleet.driver.load,
    )
    assert len(fleet.driver.agents) == 2  # one per node


def test_the_head_is_not_a_node_for_replicas() -> None:
    driver = FakeDriver()
    driver.add("head", labels={HEAD_LABEL: "true"})
    assert Fleet(driver).report().nodes == []


def test_nodes_of_the_same_name_are_distinguished(fleet: Fleet) -> None:
    fleet.driver.add("a", id="0123456789")
    fleet.tick()
    assert {each.name for each in fleet.report().nodes} == {"a", "b", "a-012345"}


def test_a_node_that_dies_is_lost_and_its_replicas_have_failed(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    fleet.driver.end("id-a")
    fleet.tick()
    assert (fleet.condition("a"), fleet.condition("b")) == ("lost", "ready")
    assert (fleet.replica().phase, fleet.replica().failed, fleet.replica().crashed) == ("ended", True, False)
    fleet.tick(node_table.LOST_SECONDS + 1, step=10)
    assert fleet.condition("a") is None


def test_a_node_that_joins_again_takes_the_name_of_the_lost_one(fleet: Fleet) -> None:
    fleet.driver.end("id-a")
    fleet.tick()
    fleet.driver.add("a", id="another")
    fleet.tick()
    assert [(each.name, each.condition) for each in fleet.report().nodes] == [("b", "ready"), ("a", "ready")]


def test_a_node_that_does_not_respond_is_lost_until_it_does(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    for actor in (*fleet.driver.agents, fleet.driver.replica("m-1")):
        actor.responds = actor.node != "id-a"
    fleet.tick(node_table.SILENT_SECONDS + 2)
    assert (fleet.condition("a"), fleet.condition("b")) == ("lost", "ready")
    assert (fleet.replica().phase, fleet.replica().reason) == ("hanging", "its node does not respond")
    for actor in (*fleet.driver.agents, fleet.driver.replica("m-1")):
        actor.responds = True
    fleet.tick()
    assert (fleet.condition("a"), fleet.replica().phase) == ("ready", "ready")


def test_an_agent_that_dies_is_started_again_later(fleet: Fleet) -> None:
    fleet.driver.agents[0].answer = ActorGone("killed")
    fleet.tick()
    assert len(fleet.driver.agents) == 2
    fleet.tick(node_table.AGENT_RETRY_SECONDS + 1)
    assert len(fleet.driver.agents) == 3
    assert fleet.condition("a") == "ready"


def test_a_draining_node_shows_what_time_is_left_and_leaves_when_it_is_empty(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    fleet.driver.deadlines["id-a"] = fleet.wall_clock.now + 30
    fleet.tick(1)
    node = fleet.node("a")
    assert node is not None
    assert (node.condition, node.drain_grace) == ("draining", 29)
    agents = [each for each in fleet.driver.agents if each.node == "id-a"]
    assert [each.killed for each in agents] == [False]
    fleet.fleet.handle(RetireReplica("m-1", 5))
    fleet.driver.set_report(msgspec.structs.replace(fleet.replica(), phase="ended"))
    fleet.tick()
    assert [each.killed for each in agents] == [True]  # so that nothing keeps Ray from ending the node
    fleet.driver.end("id-a", drained=True)
    fleet.tick()
    assert fleet.condition("a") is None
    assert len(fleet.driver.agents) == 2  # none was started again


def test_a_draining_node_without_deadline_leaves_the_grace_period_open(fleet: Fleet) -> None:
    fleet.driver.deadlines["id-a"] = 0.0
    fleet.tick()
    node = fleet.node("a")
    assert node is not None
    assert (node.condition, node.drain_grace) == ("draining", None)


def test_releasing_a_node_drains_it(fleet: Fleet) -> None:
    fleet.fleet.handle(ReleaseNode("b", 12.0))
    fleet.fleet.handle(ReleaseNode("gone", 12.0))
    assert fleet.driver.drained == [("id-b", 12.0)]


def test_a_replica_is_queued_until_its_host_answers(fleet: Fleet) -> None:
    fleet.launch()
    fleet.driver.replica("m-1").responds = False
    fleet.tick()
    assert (fleet.replica().phase, fleet.replica().node) == ("queued", "a")
    fleet.driver.replica("m-1").responds = True
    fleet.tick()
    assert fleet.replica().phase == "loading"


def test_the_same_replica_is_launched_once(fleet: Fleet) -> None:
    fleet.launch()
    actor = fleet.driver.replica("m-1")
    fleet.launch()
    assert fleet.driver.replica("m-1") is actor


def test_a_replica_on_a_node_that_is_gone_fails(fleet: Fleet) -> None:
    fleet.launch(node="nowhere")
    assert (fleet.replica().phase, fleet.replica().failed) == ("ended", True)
    assert fleet.replica().reason == "the node nowhere is not there"


def test_a_replica_that_cannot_be_placed_fails_with_the_reason(fleet: Fleet) -> None:
    fleet.launch()
    fleet.driver.replica("m-1").answer = ActorGone("the node has no GPU")
    fleet.tick()
    assert (fleet.replica().phase, fleet.replica().failed, fleet.replica().reason) == (
        "ended",
        True,
        "the node has no GPU",
    )


def test_an_ended_replica_is_reported_for_a_while_and_its_host_is_ended(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    ended = msgspec.structs.replace(fleet.replica(), phase="ended", crashed=True, failed=True, suspects=[b"x" * 16])
    fleet.driver.set_report(ended)
    fleet.tick(replica_table.REAP_SECONDS + 1)
    assert fleet.driver.replica("m-1").killed
    assert fleet.replica() == ended
    fleet.tick(ENDED_SECONDS + 2)
    assert fleet.report().replicas == []


def test_a_retired_replica_is_drained_once_and_sooner_if_asked(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    for grace in (30.0, 30.0, 5.0, 10.0):
        fleet.fleet.handle(RetireReplica("m-1", grace))
    drains = [each for each in fleet.driver.replica("m-1").calls if each[0] == "drain"]
    assert drains == [("drain", 30.0), ("drain", 5.0)]
    fleet.driver.end("id-a")
    fleet.tick()
    assert (fleet.replica().phase, fleet.replica().failed) == ("ended", False)  # it was to end


def test_retiring_a_queued_replica_ends_it(fleet: Fleet) -> None:
    fleet.launch()
    actor = fleet.driver.replica("m-1")
    actor.responds = False
    fleet.fleet.handle(RetireReplica("m-1", 30))
    assert actor.killed
    assert (fleet.replica().phase, fleet.replica().failed) == ("ended", False)


def test_a_killed_replica_ends_its_worker_first(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    actor = fleet.driver.replica("m-1")
    fleet.fleet.handle(KillReplica("m-1"))
    assert actor.calls[-1] == ("stop",)
    fleet.tick()
    assert fleet.replica().phase == "ready"
    fleet.tick(replica_table.KILL_SECONDS)
    assert actor.killed
    assert (fleet.replica().phase, fleet.replica().failed) == ("ended", False)


def test_a_failed_call_is_repeated(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    actor = fleet.driver.replica("m-1")
    answer, actor.answer = actor.answer, CallFailed("busy")
    fleet.tick()
    assert fleet.replica().phase == "ready"
    actor.answer = answer
    before = len(actor.calls)
    fleet.tick()
    assert len(actor.calls) > before


def test_a_restarted_bridge_takes_over_replicas_and_reports_nothing_before(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    before = fleet.replica()
    fleet.driver.replica("m-1").responds = False
    restarted = RayFleet(fleet.driver, fleet.clock, fleet.wall_clock)
    restarted.tick()
    assert restarted.report() is None
    fleet.driver.replica("m-1").responds = True
    fleet.clock.now += 1
    restarted.tick()
    report = restarted.report()
    assert report is not None
    assert report.replicas == [before]


def test_a_replica_that_does_not_answer_its_new_bridge_hangs(fleet: Fleet) -> None:
    fleet.launch()
    fleet.make_ready()
    fleet.driver.replica("m-1").responds = False
    restarted = RayFleet(fleet.driver, fleet.clock, fleet.wall_clock)
    restarted.tick()
    fleet.clock.now += replica_table.ADOPT_SECONDS
    restarted.tick()
    report = restarted.report()
    assert report is not None
    assert [(each.id, each.model, each.phase) for each in report.replicas] == [("m-1", "key", "hanging")]
