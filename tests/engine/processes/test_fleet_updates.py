"""The fleet manager when the bridge reports only what has changed."""

from __future__ import annotations

import dataclasses

import msgspec

from syringa.engine.processes.bridge_provider import MISSING_SECONDS
from syringa.engine.processes.control import acquire_request, worker_key
from syringa.fleet.bridge_protocol import ReplicaReport
from tests.engine.processes.fleet_harness import FleetHarness, model


def test_nodes_are_the_same_list_until_one_of_them_changes(folder: str) -> None:
    harness = FleetHarness(folder)
    harness.run_for(1)
    provider = harness.manager.provider
    before = provider.nodes()
    harness.run_for(1)
    assert provider.nodes() is before
    harness.cluster.nodes["n1"] = dataclasses.replace(harness.cluster.nodes["n1"], gpus=4)
    harness.run_for(0.5)
    assert provider.nodes() is not before
    assert [node.gpus for node in provider.nodes()] == [4, 0, 0]
    del harness.cluster.nodes["n2"]
    harness.run_for(0.5)
    assert [node.name for node in provider.nodes()] == ["n1", "n3"]


def test_idle_time_of_a_replica_goes_on_between_reports_of_its_load(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    harness.cluster.load(id, idle_seconds=2.0)
    harness.report()

    def idle_seconds() -> float:
        (replica,) = harness.manager.provider.replicas()
        return replica.idle_seconds

    assert idle_seconds() == 2.0
    harness.now += 10.0
    assert idle_seconds() == 12.0
    harness.cluster.load(id, running=3, waiting=1)
    harness.report()
    (replica,) = harness.manager.provider.replicas()
    assert (replica.running, replica.waiting, replica.idle_seconds) == (3, 1, 0.0)


def test_replicas_of_a_node_that_is_lost_end_and_are_taken_over_when_it_is_back(folder: str) -> None:
    """Nothing is reported of the replicas themselves."""
    harness = FleetHarness(folder)
    ids = harness.serve(model(low=3, high=3))
    key = harness.cluster.replicas[ids[0]].model
    lost = harness.cluster.replicas[ids[0]].node
    before = harness.cluster.nodes[lost]
    harness.cluster.nodes[lost] = dataclasses.replace(before, condition="lost")
    harness.report()
    assert ids[0] not in harness.statuses(key)
    assert harness.statuses(key)[ids[1]] == "ready"
    harness.cluster.nodes[lost] = before
    harness.report()
    assert harness.statuses(key)[ids[0]] == "ready"


def test_replica_that_was_reported_before_its_model_was_known_is_taken_over(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    key = worker_key(acquire_request(model("b"), harness.config).options)
    harness.cluster.replicas["b-1"] = msgspec.structs.replace(
        harness.cluster.replicas[id], id="b-1", model=key, node="n3"
    )
    harness.run_for(1)
    assert "b-1" in harness.manager.provider.unknown
    assert harness.acquire(model("b")) == key
    assert harness.statuses(key) == {"b-1": "ready"}
    assert not harness.manager.provider.unknown


def test_replica_that_is_no_longer_reported_has_ended(folder: str) -> None:
    harness = FleetHarness(folder)
    ids = harness.serve(model(low=2, high=2))
    key = harness.cluster.replicas[ids[0]].model
    report: ReplicaReport = harness.cluster.replicas.pop(ids[0])
    harness.run_for(MISSING_SECONDS - 0.5)
    assert ids[0] in harness.statuses(key)
    harness.cluster.replicas[ids[0]] = report  # it was forgotten for a moment
    harness.run_for(MISSING_SECONDS + 1)
    assert ids[0] in harness.statuses(key)
    del harness.cluster.replicas[ids[0]]
    harness.run_for(MISSING_SECONDS + 1)
    assert ids[0] not in harness.statuses(key)
