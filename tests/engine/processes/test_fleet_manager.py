"""The fleet manager and the provider below it, with a cluster and a clock of the test."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from syringa.cluster import served_models
from syringa.engine.processes import fleet_manager
from syringa.engine.processes.bridge_provider import LAUNCH_SECONDS, RETIRE_MARGIN_SECONDS
from syringa.engine.processes.control import WorkerState
from syringa.engine.worker.options import WorkerOptions
from syringa.fleet.bridge_protocol import KillReplica, RetireReplica
from syringa.fleet.pools import PoolCache, PoolSpec
from syringa.fleet.provider import Node
from tests.engine.processes.fleet_harness import FakeCluster, FleetHarness, launches, model, retired

# Starting


def test_request_for_a_cold_model_starts_its_replicas_on_the_nodes(folder: str) -> None:
    harness = FleetHarness(folder, heartbeat_timeout=7.0, step_timeout=8.0)
    key = harness.acquire(model(low=2, high=2))
    first, second = launches(harness)
    assert {first.node, second.node} < {"n1", "n2", "n3"}
    assert first.id != second.id
    assert first.id.startswith("m-")
    assert len(first.id) == len("m-") + 10
    options = msgspec.json.decode(first.options, type=WorkerOptions)
    assert (options.model, options.threads, options.listen, options.tls) == ("/models/m", 1, "", None)
    assert (first.model, first.cpus, first.gpus, first.name) == (key, 1, 0, "m")
    assert (first.heartbeat_timeout, first.step_timeout) == (7.0, 8.0)
    assert harness.state(key).status == "loading"
    harness.cluster.set(first.id, phase="fetching", reason="1 of 2 GB")
    harness.run_for(0.5)
    assert harness.statuses(key) == {first.id: "fetching", second.id: "queued"}
    assert harness.state(key).reason == "1 of 2 GB"
    harness.cluster.load(first.id)
    harness.run_for(0.5)
    state = harness.state(key)
    assert (state.status, state.reason) == ("loaded", "")
    ready = next(each for each in state.replicas if each.id == first.id)
    assert (ready.status, ready.address, ready.node, ready.fingerprint) == (
        "ready", f"tcp:{first.node}:4000", first.node, "f",
    )  # fmt: skip
    assert [each for each in harness.reports if isinstance(each, WorkerState)][-1] == state


def test_states_are_published_only_when_they_change(folder: str) -> None:
    harness = FleetHarness(folder)
    harness.serve(model())
    count = len(harness.reports)
    harness.run_for(10)
    assert len(harness.reports) == count


def test_opportunistic_request_does_not_start_a_model_unless_it_is_kept_loaded(folder: str) -> None:
    harness = FleetHarness(folder)
    harness.acquire(model("a"), opportunistic=True)
    assert launches(harness) == []
    harness.acquire(model("b", preload=True), opportunistic=True)
    assert [each.name for each in launches(harness)] == ["b"]


def test_launch_names_the_pool_and_its_cache(folder: str) -> None:
    cluster = FakeCluster("n1")
    cluster.nodes["n1"] = Node("n1", cpus=1, gpus=2, labels={"pool": "night"})
    pools = (PoolSpec(name="night", cache=PoolCache(capacity=2.0)),)
    harness = FleetHarness(folder, cluster, pools=pools)
    harness.acquire(model())
    (launch,) = launches(harness)
    assert (launch.pool, launch.cache_bytes, launch.gpus) == ("night", 2 << 30, 1)


def test_replica_on_a_gpu_asks_for_no_cpus_which_the_controller_does_not_count(folder: str) -> None:
    cluster = FakeCluster("n1")
    cluster.nodes["n1"] = Node("n1", cpus=1, gpus=1)
    harness = FleetHarness(folder, cluster)
    harness.acquire(msgspec.structs.replace(model(), threads=8))
    (launch,) = launches(harness)
    assert (launch.gpus, launch.cpus) == (1, 0)


def test_id_of_a_replica_is_never_that_of_another_one(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter(["aa", "aa", "bb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(drawn))
    harness = FleetHarness(folder)
    harness.serve(model(low=2, high=2))
    assert [each.id for each in launches(harness)] == ["m-aa", "m-bb"]


def test_file_of_served_models_is_written_again_when_the_disk_has_room(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    harness = FleetHarness(folder)
    with monkeypatch.context() as patch:
        patch.setattr(served_models, "publish", fail)
        harness.acquire(model())
        harness.run_for(2)
    assert [each.message.rpartition("error=")[2] for each in caplog.records if "cannot fetch" in each.message] == [
        "No space left on device"
    ]
    harness.run_for(1)
    assert "/models/m" in Path(harness.manager.models_file).read_text()


def test_model_that_backs_off_says_so(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    key = harness.cluster.replicas[id].model
    for _ in range(8):  # the pause is doubled each time
        harness.cluster.end(id, failed=True, crashed=True)
        harness.run_for(1)
        while harness.state(key).replicas == []:
            harness.run_for(1)
            if harness.state(key).reason == fleet_manager.BACKING_OFF:
                return
        id = harness.state(key).replicas[0].id
        harness.cluster.set(id, phase="loading")
        harness.run_for(1)
    raise AssertionError("it never waits for longer than a minute")


def test_model_for_cpus_takes_no_gpu(folder: str) -> None:
    cluster = FakeCluster("n1")
    cluster.nodes["n1"] = Node("n1", cpus=4, gpus=1)
    harness = FleetHarness(folder, cluster)
    harness.acquire(model(dtype="int8"))
    (launch,) = launches(harness)
    assert launch.gpus == 0


# Failures


def test_crashed_replica_is_replaced_and_its_requests_are_suspected_first(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    key = harness.cluster.replicas[id].model
    del harness.reports[:]
    harness.cluster.end(id, failed=True, crashed=True, suspects=[b"1" * 16], reason="its worker ended: signal SIGSEGV")
    harness.run_for(0.5)
    assert harness.reports[0] == harness.suspects[0]
    assert harness.suspects[0].levels == {b"1" * 16: 1}
    state = harness.reports[1]
    assert isinstance(state, WorkerState)
    assert (state.status, state.crashes, state.replicas) == ("loading", 1, [])
    assert harness.manager.reports()[0] == harness.suspects[0]  # for a new API server
    harness.run_for(3)
    assert len(launches(harness)) == 2
    harness.cluster.load(launches(harness)[1].id)
    harness.run_for(60)  # the end is reported on, and counted once
    assert (harness.state(key).status, harness.state(key).crashes) == ("loaded", 1)
    harness.manager.clear_suspect(key, b"1" * 16)
    assert harness.suspects[-1].levels == {}


def test_hanging_replica_is_reported_and_counted(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    key = harness.cluster.replicas[id].model
    harness.cluster.set(id, phase="hanging", hangs=1, reason="the model worker does not respond")
    harness.run_for(1)
    state = harness.state(key)
    assert (state.status, state.hangs, state.reason) == ("hanging", 1, "the model worker does not respond")
    assert state.replicas[0].address  # used if it responds


def test_replica_on_a_lost_node_is_replaced_on_another_one(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    key, node = harness.cluster.replicas[id].model, harness.cluster.replicas[id].node
    del harness.cluster.nodes[node]
    harness.run_for(0.5)
    assert harness.statuses(key) == {}
    harness.run_for(3)
    assert launches(harness)[-1].node != node
    harness.cluster.load(launches(harness)[-1].id)
    harness.run_for(1)
    assert (harness.state(key).status, harness.state(key).crashes) == ("loaded", 0)


def test_model_whose_nodes_are_lost_while_it_loads_is_not_failed(folder: str) -> None:
    harness = FleetHarness(folder)
    key = harness.acquire(model())
    for _ in range(2):
        launch = launches(harness)[-1]
        del harness.cluster.nodes[launch.node]
        harness.cluster.end(launch.id, failed=True, reason="its node is lost")
        harness.run_for(5)
        assert harness.state(key).status == "loading"
    assert len(launches(harness)) == 3
    harness.cluster.load(launches(harness)[-1].id)
    harness.run_for(1)
    assert harness.state(key).status == "loaded"


def test_replica_that_disappears_from_the_reports_is_replaced(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    key = harness.cluster.replicas[id].model
    del harness.cluster.replicas[id]
    harness.run_for(1)
    assert harness.statuses(key) == {id: "ready"}  # one report may have missed it
    harness.run_for(5)
    assert id not in harness.statuses(key)
    assert len(launches(harness)) == 2


def test_launch_that_the_cluster_ignores_is_given_up(folder: str) -> None:
    cluster = FakeCluster()
    cluster.handle = lambda message: None  # type: ignore[method-assign]
    harness = FleetHarness(folder, cluster)
    harness.acquire(model())
    harness.run_for(LAUNCH_SECONDS + 5)
    first, second = launches(harness)
    assert KillReplica(first.id) in harness.sent
    assert second.id != first.id


@pytest.mark.parametrize(("retryable", "nodes", "attempts"), [(False, 1, 1), (False, 2, 2), (True, 1, 2)])
def test_model_that_cannot_be_loaded_is_failed_and_tried_again_on_request(
    folder: str, retryable: bool, nodes: int, attempts: int
) -> None:
    harness = FleetHarness(folder, FakeCluster(*[f"n{number}" for number in range(nodes)]))
    spec = model()
    key = harness.acquire(spec)
    while harness.state(key).status != "failed":
        assert len(launches(harness)) <= attempts
        for launch in launches(harness):
            if harness.cluster.replicas[launch.id].phase == "queued":
                harness.cluster.end(launch.id, failed=True, retryable=retryable, reason="its file is cut short")
        harness.run_for(1)
    assert harness.state(key).reason == "its file is cut short"
    assert len(launches(harness)) == attempts
    assert len({each.node for each in launches(harness)}) == nodes
    harness.run_for(10)
    assert len(launches(harness)) == attempts
    harness.acquire(spec)
    harness.run_for(5)
    assert len(launches(harness)) == attempts + 1
    harness.cluster.load(launches(harness)[-1].id)
    harness.run_for(1)
    assert harness.state(key).status == "loaded"


def test_preloaded_model_that_cannot_be_loaded_is_tried_again_without_a_request(folder: str) -> None:
    harness = FleetHarness(folder, FakeCluster("n1"))
    key = harness.acquire(model(preload=True))
    harness.cluster.end(launches(harness)[0].id, failed=True, retryable=False, reason="its file is cut short")
    harness.run_for(0.5)
    assert harness.state(key).status == "failed"
    harness.run_for(5)
    assert len(launches(harness)) == 2


# Capacity


def test_model_without_capacity_waits_with_a_reason_and_starts_when_a_node_joins(folder: str) -> None:
    cluster = FakeCluster("n1")
    harness = FleetHarness(folder, cluster, load_timeout=600.0)
    harness.serve(model("a"))
    key = harness.acquire(model("b"))
    state = harness.state(key)
    assert (state.status, state.replicas) == ("loading", [])
    assert "no node" in state.reason
    cluster.nodes["n2"] = Node("n2", cpus=1)
    harness.run_for(2)
    assert launches(harness)[-1].node == "n2"


def test_model_is_given_up_when_the_waiting_requests_have_timed_out(folder: str) -> None:
    cluster = FakeCluster("n1")
    harness = FleetHarness(folder, cluster, queue_timeout=20.0)
    harness.serve(model("a"))
    key = harness.acquire(model("b"))
    harness.run_for(10)
    assert harness.state(key).status == "loading"
    harness.run_for(10)
    assert harness.state(key).status == "cold"
    cluster.nodes["n2"] = Node("n2", cpus=1)
    harness.run_for(5)
    assert len(launches(harness)) == 1


# Scaling and unloading


def test_replicas_are_added_while_requests_wait_and_removed_when_idle(folder: str) -> None:
    harness = FleetHarness(folder)
    (first,) = harness.serve(model(high=2))
    harness.cluster.load(first, running=4, waiting=3)
    harness.run_for(5)
    second = launches(harness)[1].id
    harness.cluster.load(first, running=1)
    harness.cluster.load(second, idle_seconds=120.0)
    harness.run_for(3)
    assert retired(harness) == [second]


def test_idle_model_is_unloaded_and_comes_back_on_request(folder: str) -> None:
    harness = FleetHarness(folder)
    spec = model(low=2, high=2, idle_seconds=60.0)
    first, second = harness.serve(spec)
    key = harness.cluster.replicas[first].model
    harness.cluster.load(first, idle_seconds=100.0)
    harness.cluster.load(second, running=1)
    harness.run_for(70)
    assert retired(harness) == []  # the model is in use
    harness.cluster.load(second, idle_seconds=61.0)
    harness.run_for(1)
    assert sorted(retired(harness)) == sorted([first, second])
    assert set(harness.statuses(key).values()) == {"draining"}
    assert harness.state(key).status == "cold"
    for id in (first, second):
        harness.cluster.end(id)
    harness.run_for(5)
    assert harness.statuses(key) == {}
    assert len(launches(harness)) == 2
    harness.serve(spec)
    assert harness.state(key).status == "loaded"


@pytest.mark.parametrize("how", ["lost", "drained"])
def test_model_that_is_kept_warm_is_replaced_without_a_request(folder: str, how: str) -> None:
    harness = FleetHarness(folder, queue_timeout=20.0)
    (first,) = harness.serve(model(idle_seconds=600.0))
    key = harness.cluster.replicas[first].model
    harness.run_for(100)  # since the last request
    if how == "lost":
        harness.cluster.end(first, failed=True, crashed=True)
    else:
        harness.manager.drain(first, 0.0)
        harness.cluster.end(first)
    harness.run_for(5)
    (again,) = [each.id for each in launches(harness) if each.id != first]
    harness.run_for(30)  # while it is being loaded
    harness.cluster.load(again, idle_seconds=0.0)
    harness.run_for(1)
    assert harness.state(key).status == "loaded"
    assert retired(harness) in ([], [first])


def test_lost_model_is_given_up_when_it_would_have_been_unloaded(folder: str) -> None:
    harness = FleetHarness(folder, queue_timeout=20.0)
    (first,) = harness.serve(model(idle_seconds=60.0))
    key = harness.cluster.replicas[first].model
    for name in list(harness.cluster.nodes):
        del harness.cluster.nodes[name]
    harness.run_for(50)
    assert harness.state(key).status == "loading"  # it waits for a node
    harness.run_for(20)
    assert harness.state(key).status == "cold"


def test_model_is_unloaded_after_the_idle_time_that_is_asked_for(folder: str) -> None:
    harness = FleetHarness(folder)
    (only,) = harness.serve(model(idle_seconds=600.0))
    key = harness.cluster.replicas[only].model
    harness.manager.keep("unknown", 1.0)
    harness.manager.keep(key, 5.0)
    assert harness.state(key).idle_timeout == 5.0
    harness.cluster.load(only, idle_seconds=10.0)
    harness.run_for(6)
    assert retired(harness) == [only]


def test_preloaded_model_is_unloaded_after_idle_seconds_and_comes_back_on_request(folder: str) -> None:
    harness = FleetHarness(folder, queue_timeout=5.0)
    spec = model(preload=True, idle_seconds=60.0)
    key = harness.acquire(spec, opportunistic=True)
    harness.run_for(20)  # no request waits for it that could time out
    assert harness.state(key).status == "loading"
    (first,) = harness.cluster.replicas
    harness.cluster.load(first, idle_seconds=1.0)
    harness.run_for(50)
    assert retired(harness) == []
    harness.run_for(10)
    assert retired(harness) == [first]
    harness.cluster.end(first)
    harness.run_for(60)
    assert (harness.state(key).status, len(launches(harness))) == ("cold", 1)
    harness.serve(spec)
    assert harness.state(key).status == "loaded"


def test_preloaded_model_without_idle_seconds_stays_loaded(folder: str) -> None:
    harness = FleetHarness(folder)
    (only,) = harness.serve(model(preload=True))
    harness.cluster.load(only, idle_seconds=1e6)
    harness.run_for(5)
    assert retired(harness) == []


def test_released_model_is_unloaded_once_it_is_idle_and_forgotten(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model(preload=True))
    key = harness.cluster.replicas[id].model
    harness.cluster.load(id, running=1)
    harness.manager.release(key)
    harness.run_for(5)
    assert retired(harness) == []
    harness.cluster.load(id)
    harness.run_for(1)
    assert retired(harness) == [id]
    harness.cluster.end(id)
    harness.run_for(1)
    assert key not in harness.model_keys()


# Draining


def test_drained_replica_is_announced_at_once_and_replaced(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    key = harness.cluster.replicas[id].model
    assert harness.manager.drain(id, 12.0)
    (replica,) = harness.state(key).replicas
    assert (replica.status, replica.grace, replica.address) == ("draining", 12.0, f"tcp:{replica.node}:4000")
    assert harness.reports[-1] == harness.state(key)
    assert not harness.manager.drain(id, 12.0)
    assert not harness.manager.drain("unknown", 12.0)
    harness.run_for(2)
    assert RetireReplica(id, 12.0) in harness.sent
    assert len(launches(harness)) == 2
    harness.cluster.end(id)
    harness.run_for(1)
    assert id not in harness.statuses(key)
    assert harness.state(key).crashes == 0


def test_draining_replica_that_does_not_end_is_killed(folder: str) -> None:
    harness = FleetHarness(folder)
    (id,) = harness.serve(model())
    harness.manager.drain(id, 10.0)
    harness.run_for(10.0 + RETIRE_MARGIN_SECONDS - 1)
    assert KillReplica(id) not in harness.sent
    harness.run_for(2)
    assert KillReplica(id) in harness.sent
