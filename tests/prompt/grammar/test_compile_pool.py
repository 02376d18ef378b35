"""The thread pool for grammars has a bounded queue and a timeout."""

from __future__ import annotations

import asyncio
import threading

import pytest

from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.prompt.grammar import compile_pool
from syringa.prompt.grammar.compile_pool import CompilePool, run_in_compile_pool
from tests.client import eventually


async def test_compile_pool_returns_results_and_raises_errors() -> None:
    def fail() -> None:
        raise InvalidRequest("no", param="x")

    assert await run_in_compile_pool(lambda: threading.current_thread().name) in ("compile-0", "compile-1")
    with pytest.raises(InvalidRequest) as caught:
        await run_in_compile_pool(fail, "field")
    assert caught.value.param == "x"
    with pytest.raises(RecursionError):
        await run_in_compile_pool(_recurse)


def _recurse() -> None:
    _recurse()


async def test_slow_job_times_out_while_other_jobs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_pool", CompilePool(threads=2, timeout_seconds=4))
    release = threading.Event()
    slow = asyncio.create_task(run_in_compile_pool(lambda: release.wait(60), "tools"))
    await asyncio.sleep(0)
    assert await run_in_compile_pool(lambda: 1) == 1
    assert await asyncio.to_thread(lambda: 2) == 2
    with pytest.raises(InvalidRequest, match="takes too long to compile") as caught:
        await slow
    assert caught.value.param == "tools"
    release.set()


async def test_pool_rejects_jobs_when_full_or_not_started_in_time() -> None:
    pool = CompilePool(threads=1, max_queued=2, timeout_seconds=1)
    release = threading.Event()
    started = threading.Event()

    def slow() -> bool:
        started.set()
        return release.wait(60)

    first = asyncio.create_task(pool.run(slow))
    await asyncio.sleep(0)
    assert started.wait(60)
    ran: list[int] = []
    waiting = [asyncio.create_task(pool.run(lambda: ran.append(1))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineOverloaded, match="Too many grammars"):
        await pool.run(lambda: 1)
    for each in waiting:
        with pytest.raises(EngineOverloaded):
            await each
    with pytest.raises(InvalidRequest):
        await first
    release.set()
    pool._timeout_seconds = 60
    assert await eventually(pool._jobs.empty)
    assert await pool.run(lambda: 3) == 3
    assert not ran, "canceled jobs must not run"
