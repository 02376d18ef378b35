"""The bridge process on a real Ray cluster: nodes, replicas, and what happens to them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec
import pytest

from syringa.engine.worker.options import WorkerOptions
from syringa.fleet.bridge_protocol import KillReplica, LaunchReplica, ReleaseNode, ReplicaReport, RetireReplica
from tests.engine.worker.tiny_llama import save_tiny_llama
from tests.ray.harness import BridgePeer, LocalCluster, processes_with, until
from tests.ray.harness import bridge as start_bridge

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The options of a worker with a tiny model."""
    folder = tmp_path_factory.mktemp("model")
    save_tiny_llama(folder)
    return msgspec.json.encode(WorkerOptions(socket="", model=str(folder), threads=1, kv_cache_tokens=1024))


def launch(peer: BridgePeer, id: str, node: str, options: bytes) -> None:
    peer.send(LaunchReplica(id, "key", node, options, name="m", heartbeat_timeout=30, step_timeout=60))


def ready(peer: BridgePeer, id: str) -> ReplicaReport:
    peer.until(lambda _: (found := peer.replica(id)) is not None and found.phase in ("ready", "ended"))
    found = peer.replica(id)
    assert found is not None
    assert found.phase == "ready", found.reason
    return found


def ended(peer: BridgePeer, id: str) -> ReplicaReport:
    peer.until(lambda _: (found := peer.replica(id)) is not None and found.phase == "ended")
    found = peer.replica(id)
    assert found is not None
    return found


def condition(peer: BridgePeer, name: str) -> str | None:
    node = peer.node(name)
    return node.condition if node is not None else None


def workers(cluster: LocalCluster) -> list[int]:
    """Return the process ids of the model workers of a cluster."""
    found = []
    for pid in processes_with("_SYRINGA_NODE_FOLDER", cluster.temp):
        with contextlib.suppress(OSError):  # it may have ended meanwhile
            if b"syringa.engine.worker.server" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_restarted_bridge_takes_replicas_over_and_a_lost_node_ends_them(
    cluster: LocalCluster, peer: BridgePeer, options: bytes
) -> None:
    cluster.add("a", labels={"pool": "x"})
    peer.until(lambda _: (node := peer.node("a")) is not None and node.owner_load is not None)
    node = peer.node("a")
    assert node is not None
    assert (node.condition, node.labels, node.cpus, node.gpus) == ("ready", {"pool": "x"}, 1, 0)
    assert node.memory > 1 << 30

    launch(peer, "m-1", "a", options)
    before = ready(peer, "m-1")
    assert before.address.startswith("tcp:")
    assert before.info is not None

    peer.kill()
    peer.start()
    peer.until(lambda report: report.connected)
    after = ready(peer, "m-1")  # on a busy machine, it may not answer its new bridge in time, and hangs at first
    assert (after.address, after.model, after.node) == (before.address, "key", "a")

    (worker,) = workers(cluster)
    cluster.remove("a")
    lost = ended(peer, "m-1")
    assert (lost.failed, lost.crashed) == (True, False)
    peer.until(lambda _: condition(peer, "a") == "lost")
    until(lambda: worker not in workers(cluster))  # it ends with its actor


def test_a_drained_node_leaves_when_its_replicas_have_ended(
    cluster: LocalCluster, peer: BridgePeer, options: bytes
) -> None:
    cluster.add("b")
    peer.until(lambda _: condition(peer, "b") == "ready")
    launch(peer, "m-2", "b", options)
    ready(peer, "m-2")
    peer.send(ReleaseNode("b", 600.0))
    peer.until(lambda _: condition(peer, "b") == "draining")
    node = peer.node("b")
    assert node is not None
    assert node.drain_grace is not None
    assert 0 < node.drain_grace <= 600
    assert ready(peer, "m-2")  # it goes on until it is retired
    launch(peer, "m-3", "b", options)
    assert ended(peer, "m-3").failed  # nothing is placed there any more
    peer.send(RetireReplica("m-2", 1.0))
    assert not ended(peer, "m-2").failed
    peer.until(lambda _: condition(peer, "b") is None)


def test_crashed_stopped_and_killed_workers_are_reported(
    cluster: LocalCluster, peer: BridgePeer, options: bytes
) -> None:
    cluster.add("c")
    peer.until(lambda _: condition(peer, "c") == "ready")
    until(lambda: not workers(cluster))  # those of earlier tests
    for id in ("m-4", "m-5", "m-6"):
        launch(peer, id, "c", options)
        ready(peer, id)
        (worker,) = workers(cluster)
        match id:
            case "m-4":
                os.kill(worker, signal.SIGKILL)
                assert ended(peer, id).crashed
            case "m-5":
                os.kill(worker, signal.SIGSTOP)
                peer.send(KillReplica(id))
                assert not ended(peer, id).failed
            case "m-6":
                peer.send(RetireReplica(id, 0.0))
                assert not ended(peer, id).failed
        until(lambda: not workers(cluster))


def test_a_replica_that_cannot_load_says_why(cluster: LocalCluster, peer: BridgePeer) -> None:
    cluster.add("d")
    peer.until(lambda _: condition(peer, "d") == "ready")
    launch(peer, "m-7", "d", msgspec.json.encode(WorkerOptions(socket="", model="/nowhere/model.gguf")))
    found = ended(peer, "m-7")
    assert found.failed
    assert "/nowhere/model.gguf" in found.reason


def test_a_bridge_reports_a_head_that_is_gone_and_comes_back(
    tmp_path: Path, cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_bridge(cluster, tmp_path) as peer:
        peer.until(lambda report: report.connected)
        os.kill(cluster.gcs(), signal.SIGSTOP)
        try:
            peer.until(lambda report: not report.connected)
            assert peer.report.reason == "Ray's head does not respond"
        finally:
            os.kill(cluster.gcs(), signal.SIGCONT)
        peer.until(lambda report: report.connected)
