from __future__ import annotations

import dataclasses

import msgspec

from syringa.fleet.bridge_protocol import FleetReport, FleetUpdate, ReplicaLoad, ReplicaReport, changes
from syringa.fleet.provider import Node, OwnerLoad
from syringa.types import EngineStats

NODES = [Node("a", gpus=2), Node("b", gpus=2)]
REPLICAS = [
    ReplicaReport("m-1", "m", "a", "ready", stats=EngineStats(running=3, steps=10)),
    ReplicaReport("m-2", "m", "b", "ready", stats=EngineStats(idle_seconds=5.0)),
]
BEFORE = FleetReport(NODES, REPLICAS)


def with_stats(*stats: EngineStats) -> FleetReport:
    pairs = zip(REPLICAS, stats, strict=True)
    return FleetReport(NODES, [msgspec.structs.replace(each, stats=found) for each, found in pairs])


def test_changes_of_equal_reports_are_empty() -> None:
    again: FleetReport = msgspec.msgpack.decode(msgspec.msgpack.encode(BEFORE), type=FleetReport)
    assert changes(BEFORE, again) == FleetUpdate()


def test_changes_have_nodes_and_replicas_that_are_new_changed_or_gone() -> None:
    loaded = dataclasses.replace(NODES[0], owner_load=OwnerLoad(cpu_pct=50.0))
    hanging = msgspec.structs.replace(REPLICAS[0], phase="hanging")
    added = ReplicaReport("m-3", "m", "c", "queued")
    update = changes(BEFORE, FleetReport([loaded, Node("c")], [hanging, added]))
    assert update == FleetUpdate([loaded, Node("c")], ["b"], [hanging, added], ["m-2"])


def test_changes_have_the_load_of_replicas_whose_statistics_have_changed() -> None:
    after = with_stats(EngineStats(running=2, waiting=5, preparing=1, steps=11), EngineStats(running=1))
    assert changes(BEFORE, after) == FleetUpdate(loads=[ReplicaLoad("m-1", 2, 4), ReplicaLoad("m-2", 1)])


def test_changes_leave_out_counters_and_replicas_that_go_on_being_idle() -> None:
    after = with_stats(EngineStats(running=3, steps=20), EngineStats(idle_seconds=5.5))
    assert changes(BEFORE, after) == FleetUpdate()


def test_changes_have_the_load_of_a_replica_that_was_in_use_between_two_reports() -> None:
    after = with_stats(EngineStats(running=3, steps=10), EngineStats(idle_seconds=0.1))
    assert changes(BEFORE, after) == FleetUpdate(loads=[ReplicaLoad("m-2", idle_seconds=0.1)])
