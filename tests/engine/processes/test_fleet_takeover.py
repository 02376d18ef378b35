"""The fleet manager when the bridge is gone, after a restart, and beside another server."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from syringa.cli.database_records import DatabaseRecords
from syringa.config import complete_spec
from syringa.engine.processes import coordinator as coordinator_module
from syringa.engine.processes import fleet_manager
from syringa.engine.processes.control import acquire_request
from syringa.engine.processes.coordinator import ClusterCoordinator
from syringa.engine.processes.fleet_manager import UNKNOWN_SECONDS
from syringa.fleet.bridge_protocol import KillReplica, ReplicaReport, RetireReplica
from syringa.fleet.decisions import SCALE_DOWN_GRACE
from syringa.ray import replica_table
from tests.engine.processes.fleet_harness import FakeCluster, FleetHarness, launches, model, retired

# The bridge


def test_replicas_go_on_while_the_bridge_is_gone_and_wishes_are_repeated(folder: str) -> None:
    harness = FleetHarness(folder)
    first, second = harness.serve(model(low=2, high=2))
    key = harness.cluster.replicas[first].model
    harness.disconnect()
    harness.run_for(60)
    assert harness.statuses(key) == {first: "ready", second: "ready"}
    assert harness.state(key).status == "loaded"
    harness.manager.drain(first, 30.0)
    assert harness.statuses(key) == {first: "draining", second: "ready"}
    harness.run_for(10)
    other = harness.acquire(model("b"))
    assert harness.state(other).status == "loading"
    assert harness.state(other).reason == "the cluster cannot be reached: the bridge to the cluster is being started"
    harness.connect()
    harness.run_for(2)
    (message,) = [each for each in harness.sent if isinstance(each, RetireReplica)]
    assert message.id == first
    assert message.grace == pytest.approx(18.0)
    assert [each.name for each in launches(harness)] == ["m", "m", "b"]  # there is room for one more
    assert harness.state(other).reason == ""


def test_replica_that_does_not_answer_a_new_bridge_hangs_where_it_was(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model(high=2))
    before = harness.cluster.replicas[id]
    harness.cluster.set(id, node="", phase="hanging", address="", reason="its node does not respond")
    other = msgspec.structs.replace(harness.cluster.replicas[id], id="m-other")
    harness.cluster.replicas["m-other"] = other  # of another server: where it is, is not known yet
    harness.run_for(5)
    (replica,) = harness.state(before.model).replicas
    assert (replica.id, replica.status, replica.node) == (id, "hanging", before.node)
    assert harness.state(before.model).crashes == 0
    harness.cluster.replicas[id] = before
    harness.cluster.replicas["m-other"] = msgspec.structs.replace(before, id="m-other", node="n3")
    harness.run_for(1)
    assert harness.statuses(before.model) == {id: "ready", "m-other": "ready"}


def test_unreachable_cluster_changes_nothing_and_is_named(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    key = harness.cluster.replicas[id].model
    harness.cluster.reachable = False
    harness.run_for(30)
    assert harness.statuses(key) == {id: "ready"}
    other = harness.acquire(model("b"))
    assert harness.state(other).reason == "the cluster cannot be reached: Ray's head does not answer"
    harness.cluster.reachable = True
    harness.run_for(2)
    assert [each.name for each in launches(harness)] == ["m", "b"]


# Several servers, one after another or at once


def test_new_server_takes_over_replicas_of_its_models_and_ends_others(folder: str) -> None:
    cluster = FakeCluster()
    spec = model(idle_seconds=600.0)
    old = FleetHarness(folder, cluster, (spec, model("gone")))
    (kept,) = old.serve(spec)
    (orphan,) = old.serve(model("gone"))
    old.disconnect()
    with tempfile.TemporaryDirectory() as other:
        new = FleetHarness(other, cluster, (spec,))
        new.run_for(1)
        key = cluster.replicas[kept].model
        assert new.statuses(key) == {kept: "ready"}  # before any request
        assert new.state(key).status == "loaded"
        assert new.manager.acquire(acquire_request(complete_spec(spec, new.config), new.config)).status == "loaded"
        new.run_for(UNKNOWN_SECONDS - 5)
        assert retired(new) == []
        new.run_for(10)
        assert [each for each in new.sent if isinstance(each, RetireReplica)] == [
            RetireReplica(orphan, SCALE_DOWN_GRACE)
        ]
        assert launches(new) == []


def test_replica_of_another_version_is_not_taken_over(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    old = msgspec.structs.replace(harness.cluster.replicas[id], id="m-old", version="0.0.1")
    harness.cluster.replicas["m-old"] = old
    harness.run_for(1)
    assert "m-old" not in harness.statuses(old.model)
    harness.run_for(UNKNOWN_SECONDS + 2)
    assert retired(harness) == ["m-old"]


def test_crash_that_was_reported_while_no_server_ran_is_remembered(folder: str) -> None:
    spec = model()
    harness = FleetHarness(folder, models=(spec,))
    key = harness.model_keys()[0]
    harness.cluster.replicas["m-1"] = ReplicaReport(
        "m-1", key, "n1", "ended", failed=True, crashed=True, suspects=[b"1" * 16]
    )
    harness.run_for(5)
    assert [each.levels for each in harness.suspects] == [{b"1" * 16: 1}]
    assert (harness.state(key).status, harness.state(key).crashes) == ("cold", 1)


def test_server_without_the_lease_routes_and_decides_nothing(folder: str) -> None:
    cluster, spec = FakeCluster(), model(high=2, idle_seconds=10.0)
    holder = "first"
    first = FleetHarness(folder, cluster, (spec,), lease=lambda: holder == "first")
    with tempfile.TemporaryDirectory() as other:
        second = FleetHarness(other, cluster, (spec,), lease=lambda: holder == "second")
        key = second.acquire(spec)
        assert launches(second) == []
        assert second.state(key).status == "loading"
        assert "another server" in second.state(key).reason
        (id,) = first.serve(spec)
        cluster.load(id, running=4, waiting=3, idle_seconds=0.0)
        cluster.replicas["x-1"] = ReplicaReport("x-1", "unknown", "n2", "ready")
        second.run_for(UNKNOWN_SECONDS + 60)
        assert second.statuses(key) == {id: "ready"}
        assert (second.state(key).status, second.sent) == ("loaded", [])
        first.disconnect()
        holder = "second"
        second.run_for(5)
        assert [each.name for each in launches(second)] == ["m"]  # requests wait


def test_model_that_another_server_has_unloaded_is_not_loaded_again_with_the_lease(folder: str) -> None:
    cluster, spec = FakeCluster(), model(idle_seconds=10.0)
    holder = "first"
    first = FleetHarness(folder, cluster, (spec,), lease=lambda: holder == "first", queue_timeout=5.0)
    with tempfile.TemporaryDirectory() as other:
        second = FleetHarness(other, cluster, (spec,), lease=lambda: holder == "second", queue_timeout=5.0)
        (id,) = first.serve(spec)
        second.run_for(1)
        key = cluster.replicas[id].model
        assert second.state(key).status == "loaded"
        cluster.load(id, idle_seconds=60.0)
        first.run_for(15)
        assert retired(first) == [id]
        cluster.end(id)
        first.run_for(1)
        second.run_for(1)
        assert (first.state(key).status, second.state(key).status) == ("cold", "cold")
        holder = "second"
        second.now += 0.1
        second.manager.controller.tick()  # before the manager looks at its models again
        second.run_for(5)
        assert launches(second) == []


def test_lease_in_a_database_decides_which_of_two_servers_starts_replicas(folder: str, tmp_path: Path) -> None:
    cluster, spec = FakeCluster(), model()
    records = [DatabaseRecords(f"sqlite:///{tmp_path / 'test.db'}", "fleet", server) for server in ("a", "b")]
    first, second = (ClusterCoordinator(each, lambda: 0.0) for each in records)
    with tempfile.TemporaryDirectory() as other:
        one = FleetHarness(folder, cluster, (spec,), lease=lambda: first.decides)
        two = FleetHarness(other, cluster, (spec,), lease=lambda: second.decides)
        first.renew()
        second.renew()
        two.acquire(spec)
        one.acquire(spec)
        two.run_for(2)
        assert (len(launches(one)), len(launches(two))) == (1, 0)
        first.stop()
        records[0].close()
        second.renew()
        cluster.end(launches(one)[0].id, failed=True, crashed=True)
        one.run_for(5)
        two.run_for(5)
        assert (len(launches(one)), len(launches(two))) == (1, 1)
    records[1].close()


@pytest.mark.parametrize(("keep", "last"), [(True, True), (False, False), (False, True)])
@pytest.mark.parametrize("decides", [True, False])
def test_stop_ends_the_replicas_if_no_other_server_uses_them(
    folder: str, keep: bool, last: bool, decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_manager, "KILL_SECONDS", 0.0)  # this cluster does not end anything meanwhile
    harness = FleetHarness(folder, cluster_keep_replicas=keep, lease=lambda: lease, leave=lambda: last)
    lease = True
    (id,) = harness.serve(model())
    lease = decides
    harness.manager.stop(0.0)
    harness.receive()
    assert retired(harness) == ([id] if last and not keep else [])
    assert (KillReplica(id) in harness.sent) == (last and not keep)


def test_server_that_has_failed_leaves_its_replicas(folder: str) -> None:
    harness = FleetHarness(folder)
    harness.serve(model())
    harness.manager.stop(0.0, leave_replicas=True)
    harness.receive()
    assert retired(harness) == []
    assert not any(isinstance(each, KillReplica) for each in harness.sent)


def test_replicas_of_a_model_that_is_announced_after_the_start_are_taken_over(folder: str) -> None:
    cluster, spec = FakeCluster(), model()
    (id,) = FleetHarness(folder, cluster).serve(spec)
    with tempfile.TemporaryDirectory() as other:
        harness = FleetHarness(other, cluster)
        harness.run_for(5)
        assert harness.manager.provider.unknown
        key = harness.acquire(spec, opportunistic=True)  # as `set_specs` of an API server
        assert harness.statuses(key) == {id: "ready"}
        harness.run_for(UNKNOWN_SECONDS + 5)
        assert retired(harness) == []
        assert launches(harness) == []


def test_replicas_stay_until_the_last_of_several_servers_is_stopped(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_manager, "KILL_SECONDS", 0.0)  # this cluster does not end anything meanwhile
    for name in ("LEASE_SECONDS", "LEAVE_SECONDS", "STOP_SECONDS"):  # the database of a slow machine answers in time
        monkeypatch.setattr(coordinator_module, name, 240.0)
    cluster, spec = FakeCluster(), model()

    def server(path: str, name: str, *, decides: bool) -> tuple[FleetHarness, ClusterCoordinator]:
        coordinator = ClusterCoordinator(DatabaseRecords(f"sqlite:///{tmp_path / 'test.db'}", "fleet", name))
        coordinator.start()
        end = time.monotonic() + 240.0
        while "is being taken" in coordinator.reason or coordinator.decides != decides:
            assert time.monotonic() < end, coordinator.reason
            time.sleep(0.01)
        lease = lambda: coordinator.decides  # noqa: E731
        return FleetHarness(path, cluster, (spec,), lease=lease, leave=coordinator.leave), coordinator

    def stop(harness: FleetHarness, coordinator: ClusterCoordinator) -> list[str]:
        harness.manager.stop(0.0)
        harness.receive()
        coordinator.stop()
        return retired(harness)

    with tempfile.TemporaryDirectory() as other:
        first, second = server(folder, "a", decides=True), server(other, "b", decides=False)
        (id,) = first[0].serve(spec)
        second[0].run_for(1)
        assert stop(*first) == []
        assert stop(*second) == [id]


def test_stop_ends_replicas_that_were_not_taken_over_too(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_manager, "KILL_SECONDS", 0.0)  # this cluster does not end anything meanwhile
    harness = FleetHarness(folder)
    harness.cluster.replicas["x-1"] = ReplicaReport("x-1", "unknown", "n2", "ready")
    harness.run_for(1)
    harness.manager.stop(0.0)
    harness.receive()
    assert harness.sent == [RetireReplica("x-1", 0.0), KillReplica("x-1")]


def test_stop_waits_longer_for_killed_replicas_than_the_bridge_takes() -> None:
    assert fleet_manager.KILL_SECONDS > replica_table.KILL_SECONDS + 1
