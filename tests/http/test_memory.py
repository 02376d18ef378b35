from __future__ import annotations

import asyncio
import threading

import pytest

from syringa.http import dependencies, memory
from tests.client import client
from tests.fake_engine import FakeEngine


async def test_memory_is_released_once_after_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[threading.Thread] = []
    done = asyncio.Event()
    loop = asyncio.get_running_loop()

    def trim() -> None:
        released.append(threading.current_thread())
        loop.call_soon_threadsafe(done.set)

    monkeypatch.setattr(memory, "trim_heap", trim)
    memory.release_memory_soon(3600)
    memory.release_memory_soon(0)
    async with asyncio.timeout(60):
        await done.wait()
    assert len(released) == 1
    assert released[0] is not threading.main_thread()


async def test_large_body_releases_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(dependencies, "release_memory_soon", lambda: calls.append(1))
    async with client(FakeEngine("x")) as http:
        for length, expected in ((10, 0), (dependencies.INLINE_BYTES, 1)):
            await http.post("/v1/completions", json={"prompt": "x" * length})
            assert len(calls) == expected
