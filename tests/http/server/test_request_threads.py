from __future__ import annotations

import asyncio
from threading import Event

from syringa.http.server.request_threads import RequestThreads
from syringa.types import in_background


async def test_threads_of_requests_work_for_batches_last() -> None:
    begun, proceed, order = Event(), Event(), []

    def work(name: str) -> str:
        begun.set()
        assert proceed.wait(60)
        order.append(name)
        return name

    async def prepare(name: str, *, background: bool) -> str:
        in_background.set(background)
        return await asyncio.to_thread(work, name)

    threads = RequestThreads(1)
    loop = asyncio.get_running_loop()
    loop.set_default_executor(threads)
    lines = [asyncio.create_task(prepare(f"line {number}", background=True)) for number in range(5)]
    await asyncio.sleep(0)
    assert begun.wait(60)
    requests = [asyncio.create_task(prepare(f"request {number}", background=False)) for number in range(3)]
    await asyncio.sleep(0)
    proceed.set()
    expected = ["line 0", *(f"request {number}" for number in range(3)), *(f"line {number}" for number in range(1, 5))]
    assert sorted(await asyncio.gather(*lines, *requests)) == sorted(expected)
    assert order == expected
    await loop.shutdown_default_executor()


async def test_threads_of_requests_end_with_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(RequestThreads(2))
    assert await asyncio.to_thread(lambda: 1) == 1
    await asyncio.wait_for(loop.shutdown_default_executor(), 60)
