"""Requests of all kinds on a server with replicas, and what can be observed of these."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from tests.e2e.replica_requests import Outcome, RequestClient
from tests.e2e.server import Server, wait_for

GUARD_SECONDS = 600.0

Disturb = Callable[[RequestClient], Any]


async def until(condition: Callable[[], Any]) -> Any:
    """Poll a condition until it holds. Return its value."""
    async with asyncio.timeout(GUARD_SECONDS):
        while not (found := condition()):  # noqa: ASYNC110  processes can only be polled
            await asyncio.sleep(0.05)
    return found


def ready_replicas(server: Server) -> list[str]:
    found = server.get("/admin/replicas").json()["data"]
    return [each["id"] for each in found if each["status"] == "ready"]


async def drain(client: RequestClient, replica: str, grace: float) -> None:
    answer = await client.http.post(f"/admin/replicas/{replica}/drain", json={"grace": grace})
    assert answer.status_code == 200, answer.text


async def run_all(
    url: str,
    numbers: range,
    disturb: Disturb | None = None,
    kinds: Sequence[Any] | None = None,
    turn: Callable[[int], Awaitable[object]] | None = None,
) -> list[Outcome]:
    """Run the requests with these numbers at the same time, and `disturb` beside them.

    `kinds`: of these kinds only. `turn`: waits until the request with a number may begin.
    """
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=GUARD_SECONDS, limits=limits) as http:
        client = RequestClient(http, kinds)

        async def run(number: int) -> Outcome:
            if turn is not None:
                await turn(number)
            return await client.run(number)

        async with asyncio.timeout(GUARD_SECONDS), asyncio.TaskGroup() as group:
            running = [group.create_task(run(number)) for number in numbers]
            if disturb is not None:
                group.create_task(disturb(client))
    return [each.result() for each in running]


def check_equal(disturbed: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    for number, (before, after) in enumerate(zip(expected, disturbed, strict=True)):
        assert after == before, f"request {number}"


def tokens(outcomes: Sequence[Outcome]) -> Counter[tuple[int, int]]:
    return Counter(tuple(outcome["usage"]) for outcome in outcomes)


def moves(server: Server) -> dict[str, float]:
    """Return the number of moves by reason."""
    found = [
        line for line in server.get("/metrics").text.splitlines() if line.startswith("syringa_request_moves_total{")
    ]
    assert all('fingerprint="same"' in line for line in found), found
    return {line.partition('reason="')[2].partition('"')[0]: float(line.split()[-1]) for line in found}


def check_idle(server: Server) -> None:
    """Check that soon no replica has a sequence or a block in use."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

    def is_idle() -> bool:
        lines = server.get("/metrics").text.splitlines()  # a metric is missing if the engine did not answer in time
        found = [line for name in names for line in lines if line.startswith(f"syringa_{name}{{")]
        return [float(line.split()[-1]) for line in found] == [0.0] * len(names)

    wait_for(is_idle)
