"""A server whose replicas run on nodes of a Ray cluster, which go while requests of all kinds run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Collection, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import httpx
import pytest

from syringa.cluster.own_address import own_address
from tests.e2e.replica_requests import Outcome, RequestClient
from tests.e2e.replica_server import check_equal, moves, ready_replicas, run_all, until
from tests.e2e.server import Server, serve, wait_for
from tests.e2e.service import WORKER
from tests.e2e.test_replicas import model  # noqa: F401  a fixture
from tests.ray.harness import GUARD_SECONDS, KNOWN_SECONDS, LocalCluster, free_port, local_cluster, processes_with

pytestmark = [pytest.mark.slow, pytest.mark.model]

COUNT = 100
SETTINGS = ("--served-model-name", "m", "--requests-per-minute", "0", "--threads", "1", "--heartbeat-timeout", "15")
POOL = """
[[pools]]
name = "night"
preemption = {grace_period = 2}
"""
ZONE = ZoneInfo("Asia/Kolkata")  # where the clocks never change
TURN_SECONDS = 0.1  # between the requests that begin around the end of the window
BUSY, COMPARED = 6, 60  # further requests that run all the time while replicas are stopped; how many are compared
HELD_FROM, LAST_FROM = COUNT * 4 // 10, COUNT * 9 // 10  # the first that wait for the window, and for the last fault


def window_until(closes_at: float) -> str:
    """Return the schedule of a pool whose window has begun two hours ago and ends at a Unix time, a full minute."""
    end = datetime.fromtimestamp(closes_at, ZONE)
    window = f'{{start = "{end - timedelta(hours=2):%H:%M}", end = "{end:%H:%M}"}}'
    return f'schedule = {{mode = "scheduled", timezone = "{ZONE.key}", windows = [{window}]}}\n'


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


def workers(cluster: LocalCluster, nodes: Collection[str]) -> list[int]:
    """Return the process ids of the model workers on nodes."""
    found = []
    for pid in processes_with("_SYRINGA_NODE_FOLDER", cluster.temp):
        with contextlib.suppress(OSError):
            if WORKER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found += [pid] if any(cluster.raylets[node] in ancestors(pid) for node in nodes) else []
    return found


def ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def replicas(server: Server) -> dict[str, Any]:
    """Return the replicas that are ready, by the names of their nodes."""
    found = server.get("/admin/replicas").json()["data"]
    return {each["node"]: each for each in found if each["status"] == "ready"}


def conditions(server: Server) -> dict[str, str]:
    return {each["name"]: each["state"] for each in server.get("/admin/nodes").json()["data"]}


async def pool_state(client: RequestClient, name: str) -> str:
    answer = (await client.http.get("/admin/pools")).raise_for_status().json()
    return {each["name"]: str(each["state"]) for each in answer["data"]}[name]


class FurtherRequests:
    """Requests that run beside the others, so that each replica has some, however fast it is."""

    def __init__(self) -> None:
        self._numbers = itertools.count(COUNT)
        self.outcomes: dict[int, Outcome] = {}

    @contextlib.asynccontextmanager
    async def running(self, http: httpx.AsyncClient) -> AsyncIterator[None]:
        """Run requests until the end of the block, and finish those that have begun."""
        client, over = RequestClient(http), asyncio.Event()

        async def run() -> None:
            while not over.is_set():
                number = next(self._numbers)
                self.outcomes[number] = await client.run(number)

        async with asyncio.TaskGroup() as group:
            for _ in range(BUSY):
                group.create_task(run())
            yield
            over.set()


def stopped(server: Server, reason: str) -> list[int]:
    """Return how many sequences ran on each of the replicas that were stopped for a reason."""
    pattern = rf"replica is stopped: replica=\S+ node=\S+ sequences=(\d+) grace=\S+ reason='{re.escape(reason)}'"
    return [int(each) for each in re.findall(pattern, server.log.read_text())]


def evictions(server: Server, reason: str) -> float:
    name = f'syringa_replica_evictions_total{{reason="{reason}"}}'
    return next(float(line.split()[-1]) for line in server.get("/metrics").text.splitlines() if line.startswith(name))


def test_requests_of_all_kinds_survive_nodes_that_come_and_go(
    model: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    """A node is removed without notice, a worker is stopped, the window of a pool ends, and a node is drained.

    Windows end at full minutes. The time that the first server takes says how long the second one may take, which only
    takes over what runs: its window ends after more than twice that time. Half of the requests begin one after the
    other from shortly before that moment on until the pool has closed. Others are added then, and while a node is
    drained, so that each replica runs some.
    """
    database = str(tmp_path / "syringa.db")
    gone: dict[str, str] = {}  # the names of nodes
    with serve(*model, *SETTINGS, "--database", database) as server:
        expected = asyncio.run(run_all(server.url, range(COUNT + COMPARED)))
    further = FurtherRequests()
    config = tmp_path / "syringa.toml"
    arguments = (*model, *SETTINGS, "--config", str(config), "--replicas", "3", "--database", database)
    with cluster_with_nodes(tmp_path, "a", "b", "c") as cluster:
        arguments += cluster_settings(cluster)
        config.write_text(POOL)
        began = time.monotonic()
        with serve(*arguments, "--cluster-keep-replicas", ready=False) as server:
            asyncio.run(until(lambda: len(ready_replicas(server)) == 3))
            assert "n" in replicas(server)  # of the first pool
        needed = 2 * (time.monotonic() - began) + 30
        closes_at = 60.0 * math.ceil((time.time() + needed) / 60)
        config.write_text(POOL + window_until(closes_at))
        with serve(*arguments, ready=False) as server:
            held, last = asyncio.Semaphore(0), asyncio.Event()

            async def turn(number: int) -> None:
                if number >= LAST_FROM:
                    await last.wait()
                elif number >= HELD_FROM:
                    await held.acquire()

            async def close_window(client: RequestClient) -> None:
                """Let requests begin until the pool has closed."""
                await asyncio.sleep(closes_at - KNOWN_SECONDS - time.time())
                begun = HELD_FROM
                async with further.running(client.http):
                    while await pool_state(client, "night") not in ("closing", "inactive"):
                        if begun < LAST_FROM:
                            held.release()
                            begun += 1
                        await asyncio.sleep(TURN_SECONDS)
                assert time.time() >= closes_at
                for _ in range(begun, LAST_FROM):
                    held.release()

            async def lose_replicas(client: RequestClient) -> None:
                await until(lambda: len(client.begun) >= COUNT // 4)
                gone["removed"] = min(await until(lambda: set(replicas(server)) - {"n"}))
                await asyncio.to_thread(cluster.remove, gone["removed"])

                await until(lambda: len(client.done) >= COUNT // 10)
                others = {"a", "b", "c"} - {gone["removed"]}
                os.kill(min(await until(lambda: workers(cluster, others))), signal.SIGSTOP)

            async def disturb(client: RequestClient) -> None:
                """Each fault comes while requests run."""
                await asyncio.gather(lose_replicas(client), close_window(client))
                gone["drained"] = min(await until(lambda: set(replicas(server)) - {"n", gone["removed"]}))
                last.set()  # after the last wait for a replica
                async with further.running(client.http):
                    await asyncio.sleep(KNOWN_SECONDS)
                    # Without time to finish, so that requests move on a fast machine too.
                    answer = await client.http.post(f"/admin/nodes/{gone['drained']}/drain", json={"grace": 0})
                    answer.raise_for_status()
                    await until(lambda: gone["drained"] not in conditions(server))
                while await pool_state(client, "night") != "inactive":  # noqa: ASYNC110  it can only be polled
                    await asyncio.sleep(0.1)
                await until(lambda: conditions(server).get(gone["removed"], "lost") == "lost")

            async def run() -> list[Outcome]:
                await until(lambda: len(ready_replicas(server)) == 3)
                assert "n" in replicas(server)
                assert time.time() < closes_at - 5, "the second server has taken longer than the first one"
                return await run_all(server.url, range(COUNT), disturb, turn=turn)

            disturbed = asyncio.run(run())
            check_equal(disturbed, expected[:COUNT])
            compared = sorted(further.outcomes)[:COMPARED]
            check_equal([further.outcomes[number] for number in compared], [expected[number] for number in compared])
            assert sum(stopped(server, "pool night is closed")) > 0
            assert sum(stopped(server, f"node {gone['drained']} is drained")) > 0
            reasons = moves(server).keys()
            assert "drain" in reasons
            assert reasons & {"silence", "crash"}  # which of them is noticed first
            wait_for(lambda: evictions(server, "pool_closed") >= 1)  # the supervisor reports it


def test_two_servers_share_pools_and_replicas_which_end_with_the_last_of_them(
    model: tuple[str, ...],  # noqa: F811
    tmp_path: Path,
) -> None:
    config = tmp_path / "syringa.toml"
    config.write_text(POOL)
    settings = ("--config", str(config), "--replicas", "2", "--database", str(tmp_path / "syringa.db"))

    def state(server: Server) -> str:
        found = server.get("/admin/pools").json()["data"]
        return next((str(each["state"]) for each in found if each["name"] == "night"), "")

    with cluster_with_nodes(tmp_path, "a") as cluster:

        def start() -> contextlib.AbstractContextManager[Server]:
            return serve(*model, *SETTINGS, *settings, *cluster_settings(cluster), ready=False)

        with start() as first:
            wait_for(lambda: len(ready_replicas(first)) == 2, GUARD_SECONDS)
            assert "n" in replicas(first)
            with start() as second:
                wait_for(lambda: len(ready_replicas(second)) == 2, GUARD_SECONDS)
                wait_for(lambda: state(first) == state(second) == "active", GUARD_SECONDS)
                close = f"{second.url}/admin/pools/night/close"  # the first one decides
                httpx.post(close, timeout=60).raise_for_status()
                wait_for(lambda: state(first) == state(second) == "inactive", GUARD_SECONDS)
                wait_for(lambda: len(ready_replicas(second)) == 2 and set(replicas(second)) == {"a"}, GUARD_SECONDS)
                before = workers(cluster, ["a"])
                assert first.stop() == 0
                assert workers(cluster, ["a"]) == before
                assert second.complete(model="m", prompt="The", max_tokens=4).status_code == 200
                wait_for(lambda: "lease: this server decides" in second.log.read_text(), GUARD_SECONDS)
            wait_for(lambda: not workers(cluster, ["a", "n"]), GUARD_SECONDS)
