"""The fleet manager when nodes and pools are taken out of use."""

from __future__ import annotations

import dataclasses

from syringa.engine.processes.bridge_provider import RELEASE_SECONDS
from syringa.fleet.bridge_protocol import ReleaseNode, RetireReplica
from syringa.fleet.pools import PoolPreemption, PoolSpec
from syringa.fleet.provider import Node
from tests.engine.processes.fleet_harness import FakeCluster, FleetHarness, launches, model, retired


def test_drained_node_loses_its_replicas_and_gets_no_new_ones(folder: str) -> None:
    harness = FleetHarness(folder)
    first, second = harness.serve(model(low=2, high=2))
    node = harness.cluster.replicas[first].node
    harness.manager.drain_node(node, 7.0)
    harness.manager.drain_node("unknown", 7.0)
    harness.run_for(2)
    assert ReleaseNode(node, 7.0) in harness.sent
    assert [each for each in harness.sent if isinstance(each, RetireReplica)] == [RetireReplica(first, 7.0)]
    assert launches(harness)[-1].node not in (node, harness.cluster.replicas[second].node)
    states = {each.name: each.state for each in harness.manager.fleet_status().nodes}
    assert states[node] == "draining"


def test_node_is_drained_with_the_grace_period_of_its_pool_unless_another_is_given(folder: str) -> None:
    cluster = FakeCluster("n1")
    cluster.nodes["n1"] = Node("n1", cpus=1, labels={"pool": "night"})
    pool = PoolSpec(name="night", preemption=PoolPreemption(grace_period=12.0))
    harness = FleetHarness(folder, cluster, pools=(pool,))
    (id,) = harness.serve(model())
    harness.manager.drain_node("n1", None)
    harness.receive()
    assert harness.sent[-1] == ReleaseNode("n1", 12.0)
    # Ray reports the node as draining, with its deadline, before the controller decides.
    cluster.nodes["n1"] = dataclasses.replace(cluster.nodes["n1"], condition="draining", drain_grace=3.0)
    harness.run_for(2)
    assert [each for each in harness.sent if isinstance(each, RetireReplica)] == [RetireReplica(id, 12.0)]


def test_release_of_a_node_is_repeated_until_the_cluster_drains_it(folder: str) -> None:
    harness = FleetHarness(folder)
    harness.run_for(1)
    harness.manager.drain_node("n1", 7.0)
    harness.run_for(2 * RELEASE_SECONDS + 1)
    assert harness.sent == [ReleaseNode("n1", 7.0)] * 3
    node = harness.cluster.nodes["n1"]
    harness.cluster.nodes["n1"] = dataclasses.replace(node, condition="draining")
    harness.run_for(2 * RELEASE_SECONDS)
    assert len(harness.sent) == 3


def test_node_that_the_cluster_drains_is_left_in_the_same_way(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    node = harness.cluster.replicas[id].node
    harness.cluster.nodes[node] = dataclasses.replace(
        harness.cluster.nodes[node], condition="draining", drain_grace=5.0
    )
    harness.run_for(2)
    assert [each for each in harness.sent if isinstance(each, RetireReplica)] == [RetireReplica(id, 5.0)]


def test_closed_pool_is_left(folder: str) -> None:
    cluster = FakeCluster("n1")
    cluster.nodes["n1"] = Node("n1", cpus=1, labels={"pool": "night"})
    harness = FleetHarness(folder, cluster, pools=(PoolSpec(name="night"),))
    (id,) = harness.serve(model())
    harness.manager.set_pool("night", False)
    harness.run_for(2)
    assert retired(harness) == [id]
    assert [(each.name, each.override) for each in harness.manager.fleet_status().pools] == [("night", False)]
