"""A server whose replicas run on nodes of a Ray cluster, which go while requests of all kinds run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syringa.cluster.own_address import own_address
from tests.e2e.replica_requests import Outcome, RequestClient
from tests.e2e.replica_server import check_equal, moves, ready_replicas, run_all, until
from tests.e2e.server import Server, serve
from tests.e2e.service import WORKER
from tests.e2e.test_replicas import model  # noqa: F401  a fixture
from tests.ray.harness import LocalCluster, free_port, local_cluster, processes_with

pytestmark = [pytest.mark.slow, pytest.mark.model]

COUNT = 100
SETTINGS = ("--served-model-name", "m", "--requests-per-minute", "0", "--threads", "1", "--heartbeat-timeout", "8")
POOLS = """
[[pools]]
name = "night"
preemption = {grace_period = 2}
"""


def cluster_settings(cluster: LocalCluster) -> tuple[str, ...]:
    return (
        "--cluster",
        *("--cluster-dir", str(cluster.folder.path)),
        *("--cluster-address", f"{own_address()}:{free_port()}"),
        *("--ray-port", str(cluster.port)),
    )


@contextlib.contextmanager
def cluster_with_nodes(folder: Path, *names: str) -> Iterator[LocalCluster]:
    """Yield a cluster with these nodes, and another one in the pool night."""
    with local_cluster(folder) as cluster:
        for name in names:
            cluster.add(name, cpus=2)  # room for two replicas
        cluster.add("n", cpus=2, labels={"pool": "night"})
        yield cluster


def workers(cluster: LocalCluster) -> list[int]:
    """Return the process ids of all model workers."""
    found = []
    for pid in processes_with("_SYRINGA_NODE_FOLDER", cluster.temp):
        with contextlib.suppress(OSError):
            if WORKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def replicas(server: Server) -> dict[str, Any]:
    """Return the replicas that are ready, by the names of their nodes."""
    found = server.get("/admin/replicas").json()["data"]
    return {each["node"]: each for each in found if each["status"] == "ready"}


def conditions(server: Server) -> dict[str, str]:
    return {each["name"]: each["state"] for each in server.get("/admin/nodes").json()["data"]}


def pool_state(server: Server, name: str) -> str:
    return {each["name"]: str(each["state"]) for each in server.get("/admin/pools").json()["data"]}[name]


def test_requests_of_all_kinds_survive_nodes_that_come_and_go(
    model: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    """A node is removed without notice, a worker is stopped, a pool closes, and a node is drained, in this order."""
    database = str(tmp_path / "syringa.db")
    gone: dict[str, str] = {}  # the names of nodes
    with serve(*model, *SETTINGS, "--database", database) as server:
        expected = asyncio.run(run_all(server.url, range(COUNT)))
    config = tmp_path / "syringa.toml"
    config.write_text(POOLS)
    arguments = (*model, *SETTINGS, "--config", str(config), "--replicas", "3", "--database", database)
    with (
        cluster_with_nodes(tmp_path, "a", "b", "c") as cluster,
        serve(*arguments, *cluster_settings(cluster), ready=False) as server,
    ):

        async def disturb(client: RequestClient) -> None:
            """Each fault comes when so many requests have ended, and while others run."""
            await until(lambda: len(client.begun) >= COUNT // 4)
            gone["removed"] = min(await until(lambda: set(replicas(server)) - {"n"}))
            await asyncio.to_thread(cluster.remove, gone["removed"])

            await until(lambda: len(client.done) >= COUNT // 10)
            os.kill(min(await until(lambda: workers(cluster))), signal.SIGSTOP)

            await until(lambda: len(client.done) >= COUNT // 4)
            (await client.http.post("/admin/pools/night/close")).raise_for_status()

            await until(lambda: len(client.done) >= COUNT // 2)
            gone["drained"] = min(await until(lambda: set(replicas(server)) - {"n", gone["removed"]}))
            answer = await client.http.post(f"/admin/nodes/{gone['drained']}/drain", json={"grace": 2})
            answer.raise_for_status()
            assert len(client.done) < COUNT

        async def run() -> list[Outcome]:
            await until(lambda: len(ready_replicas(server)) == 3)
            assert "n" in replicas(server)  # the first pool
            outcomes = await run_all(server.url, range(COUNT), disturb)
            await until(lambda: gone["drained"] not in conditions(server))
            await until(lambda: pool_state(server, "night") == "inactive")
            await until(lambda: conditions(server).get(gone["removed"], "lost") == "lost")
            return outcomes

        disturbed = asyncio.run(run())
        check_equal(disturbed, expected)
        reasons = moves(server).keys()
        assert "drain" in reasons
        assert reasons & {"silence", "crash"}  # which of them is noticed first
