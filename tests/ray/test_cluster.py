"""A server whose replicas run on three nodes of a Ray cluster, which come and go while requests of all kinds run."""

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

COUNT = 12
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
def three_nodes(folder: Path) -> Iterator[LocalCluster]:
    """Yield a cluster with the nodes a and b, and c in the pool night."""
    with local_cluster(folder) as cluster:
        cluster.add("a")
        cluster.add("b")
        cluster.add("c", labels={"pool": "night"})
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


@pytest.mark.parametrize("count", [COUNT])
def test_requests_of_all_kinds_survive_nodes_that_come_and_go(
    model: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
    count: int,
) -> None:
    """A node is removed, a worker stopped, a pool closed and a node drained: all requests give what they give alone."""
    database = str(tmp_path / "syringa.db")
    with serve(*model, *SETTINGS, "--database", database) as server:
        expected = asyncio.run(run_all(server.url, range(count)))
    config = tmp_path / "syringa.toml"
    config.write_text(POOLS)
    arguments = (*model, *SETTINGS, "--config", str(config), "--replicas", "3", "--database", database)
    with (
        three_nodes(tmp_path) as cluster,
        serve(*arguments, *cluster_settings(cluster), ready=False) as server,
    ):

        async def disturb(client: RequestClient) -> None:
            await until(lambda: len(client.begun) >= count // 4)
            cluster.remove("a")
            cluster.add("d")
            await until(lambda: conditions(server).get("a") == "lost" and "d" in replicas(server))
            assert len(client.done) < count

            stopped = workers(cluster)[0]
            os.kill(stopped, signal.SIGSTOP)
            await until(lambda: stopped not in workers(cluster) and len(ready_replicas(server)) >= 2)
            assert len(client.done) < count

            (await client.http.post("/admin/pools/night/close")).raise_for_status()
            await until(lambda: pool_state(server, "night") == "inactive")
            assert "c" not in replicas(server)
            assert len(client.done) < count

            cluster.add("e")
            await until(lambda: conditions(server).get("e") == "ready")
            (await client.http.post("/admin/nodes/b/drain", json={"grace": 2})).raise_for_status()
            await until(lambda: "b" not in conditions(server))

        async def run() -> list[Outcome]:
            await until(lambda: len(replicas(server)) == 3)
            return await run_all(server.url, range(count), disturb)

        disturbed = asyncio.run(run())
        check_equal(disturbed, expected)
        assert moves(server)
