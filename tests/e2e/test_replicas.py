"""Three replicas, of which one is killed, one stopped and one drained while requests of all kinds run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.cluster.folder import ClusterFolder
from tests.e2e.replica_requests import KINDS, Outcome, RequestClient
from tests.e2e.server import Server, serve
from tests.e2e.service import WORKER, usage_records

pytestmark = pytest.mark.model

GUARD_SECONDS = 900.0
CONCURRENCY = 24
SETTINGS = ("--replicas", "3", "--threads", "3", "--served-model-name", "m", "--requests-per-minute", "0")


async def until(condition: Callable[[], Any]) -> Any:
    """Poll a condition until it holds. Return its value."""
    async with asyncio.timeout(GUARD_SECONDS):
        while not (found := condition()):  # noqa: ASYNC110  processes can only be polled
            await asyncio.sleep(0.05)
    return found


def ready_replicas(server: Server) -> list[str]:
    found = httpx.get(server.url + "/admin/replicas", timeout=60).raise_for_status().json()["data"]
    return [each["id"] for each in found if each["status"] == "ready"]


async def all_ready(server: Server) -> list[int]:
    """Wait until three replicas are ready and no other process is left. Return the process ids."""
    await until(lambda: len(ready_replicas(server)) == 3 and len(server.children(WORKER)) == 3)
    return sorted(server.children(WORKER))


async def run_all(url: str, numbers: range, concurrency: int, disturb: Callable[[RequestClient], Any]) -> list[Outcome]:
    """Run the requests with these numbers, so many at a time, and `disturb` beside them."""
    slots = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=GUARD_SECONDS) as http:
        client = RequestClient(http)

        async def one(number: int) -> Outcome:
            async with slots:
                return await client.run(number)

        async with asyncio.timeout(GUARD_SECONDS):
            disturbing = asyncio.create_task(disturb(client))
            outcomes = await asyncio.gather(*(one(number) for number in numbers))
            await disturbing
    return outcomes


async def nothing(client: RequestClient) -> None:
    """Do not disturb the requests."""


def tokens(outcomes: list[Outcome]) -> Counter[tuple[int, int]]:
    return Counter(tuple(outcome["usage"]) for outcome in outcomes)


def moves(server: Server) -> dict[str, float]:
    """Return the number of moves by reason."""
    lines = httpx.get(server.url + "/metrics", timeout=60).text.splitlines()
    found = [line for line in lines if line.startswith("syringa_request_moves_total{")]
    assert all('fingerprint="same"' in line for line in found)
    return {line.partition('reason="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}


def check_idle(server: Server) -> None:
    """Check that no replica has a sequence or a block in use."""
    text = httpx.get(server.url + "/metrics", timeout=60).text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        (line,) = [each for each in text.splitlines() if each.startswith(f"syringa_{name}{{")]
        assert float(line.split()[-1]) == 0, line


def run_undisturbed(database: str, count: int) -> list[Outcome]:
    """Run the requests on a server with one replica, which none of them can leave."""
    with serve("--served-model-name", "m", "--requests-per-minute", "0", "--database", database) as server:
        outcomes = asyncio.run(run_all(server.url, range(count), CONCURRENCY, nothing))
        assert moves(server) == {}
        return outcomes


@pytest.mark.slow
def test_requests_of_all_kinds_survive_a_killed_a_stopped_and_a_drained_replica(tmp_path: Path) -> None:
    database, count = str(tmp_path / "syringa.db"), 10 * len(KINDS)
    expected = run_undisturbed(database, count)
    with serve(*SETTINGS, "--database", database, "--heartbeat-timeout", "4") as server:

        async def kill(client: RequestClient) -> None:
            await until(lambda: client.begun >= 12)
            os.kill(server.children(WORKER)[0], signal.SIGKILL)

        async def stop(client: RequestClient) -> None:
            await until(lambda: client.begun >= 12)
            os.kill(server.children(WORKER)[0], signal.SIGSTOP)

        async def drain(client: RequestClient) -> None:
            await until(lambda: client.begun >= 12)
            drained = ready_replicas(server)[0]
            answer = await client.http.post(f"/admin/replicas/{drained}/drain", json={"grace": 0.5})
            assert answer.status_code == 200, answer.text
            await until(lambda: drained not in ready_replicas(server))

        async def run() -> list[Outcome]:
            outcomes = []
            for part, disturb in enumerate((kill, stop, drain)):
                await all_ready(server)
                numbers = range(part * count // 3, (part + 1) * count // 3)
                outcomes += await run_all(server.url, numbers, CONCURRENCY, disturb)
            await all_ready(server)
            return outcomes

        disturbed = asyncio.run(run())
        for number, (before, after) in enumerate(zip(expected, disturbed, strict=True)):
            assert after == before, f"request {number}"
        assert set(moves(server)) == {"crash", "silence", "drain"}
        check_idle(server)
    rows = usage_records(database)
    assert {row.outcome for row in rows} == {"ok"}
    assert Counter((row.input_tokens, row.output_tokens) for row in rows) == tokens(expected) + tokens(disturbed)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "tls"])
def test_streams_survive_a_killed_replica(tmp_path: Path, transport: str) -> None:
    """A small version of the test above, with two replicas."""
    database, count = str(tmp_path / "syringa.db"), 8
    expected = run_undisturbed(database, count)
    settings: tuple[str, ...] = ("--replicas", "2", "--threads", "2", "--served-model-name", "m")
    if transport == "tls":
        folder = tmp_path / "cluster"
        ClusterFolder(folder).create("node", ["127.0.0.1"])
        settings += ("--worker-host", "127.0.0.1", "--cluster-dir", str(folder))
    with serve(*settings, "--database", database) as server:

        async def disturb(client: RequestClient) -> None:
            await until(lambda: client.begun >= 6)
            os.kill(server.children(WORKER)[0], signal.SIGKILL)

        async def run() -> list[Outcome]:
            await until(lambda: len(ready_replicas(server)) == 2)
            return await run_all(server.url, range(count), count, disturb)

        assert asyncio.run(run()) == expected
        assert "crash" in moves(server)
