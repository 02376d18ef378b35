"""Threads for grammars alone: a bounded queue, and a bounded wait."""

from __future__ import annotations

import asyncio
import threading

import pytest

from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.prompt.grammar import compile_pool
from syringa.prompt.grammar.compile_pool import CompilePool, run_in_compile_pool


async def test_results_and_errors_come_back() -> None:
    def refuse() -> None:
        raise InvalidRequest("no", param="x")

    assert await run_in_compile_pool(lambda: threading.current_thread().name) in ("compiling-0", "compiling-1")
    with pytest.raises(InvalidRequest) as caught:
        await run_in_compile_pool(refuse, "field")
    assert caught.value.param == "x"
    with pytest.raises(RecursionError):
        await run_in_compile_pool(_endless)


def _endless() -> None:
    _endless()


async def test_a_slow_one_is_answered_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "_workshop", CompilePool(threads=2, seconds=1))
    release = threading.Event()
    slow = asyncio.create_task(run_in_compile_pool(lambda: release.wait(60), "tools"))
    await asyncio.sleep(0)
    assert await run_in_compile_pool(lambda: 1) == 1
    assert await asyncio.to_thread(lambda: 2) == 2
    with pytest.raises(InvalidRequest, match="takes too long to compile") as caught:
        await slow
    assert caught.value.param == "tools"
    release.set()


async def test_what_has_no_room_or_no_turn_is_told_to_come_again() -> None:
    workshop = CompilePool(threads=1, waiting=2, seconds=0.3)
    release = threading.Event()
    began = threading.Event()

    def slow() -> bool:
        began.set()
        return release.wait(60)

    first = asyncio.create_task(workshop.run(slow))
    await asyncio.sleep(0)
    assert began.wait(60)
    ran: list[int] = []
    waiting = [asyncio.create_task(workshop.run(lambda: ran.append(1))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineOverloaded, match="Too many grammars"):
        await workshop.run(lambda: 1)
    for each in waiting:
        with pytest.raises(EngineOverloaded):
            await each
    with pytest.raises(InvalidRequest):
        await first
    release.set()
    await asyncio.sleep(0.1)
    assert await workshop.run(lambda: 3) == 3
    assert not ran, "nobody waits for those any more"
