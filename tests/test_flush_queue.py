from __future__ import annotations

import asyncio
from typing import Any

from syringa.flush_queue import FlushQueue, flush_queue


async def test_flushes_run_at_the_end_of_the_loop_iteration() -> None:
    done: list[str] = []
    queue = flush_queue()
    assert queue is flush_queue()
    queue.schedule(lambda: done.append("a"))
    queue.schedule(lambda: done.append("b"))
    assert not done
    await asyncio.sleep(0)
    assert done == ["a", "b"]


async def test_flushes_run_where_the_block_ends() -> None:
    done: list[str] = []
    queue = flush_queue()
    queue.schedule(lambda: done.append("before"))
    with queue:
        assert queue.batching
        queue.schedule(lambda: done.append("inside"))
        assert not done
    assert done == ["before", "inside"]
    assert not queue.batching
    await asyncio.sleep(0)
    assert len(done) == 2
    queue.schedule(lambda: done.append("after"))
    await asyncio.sleep(0)
    assert done[2:] == ["after"]


async def test_flush_scheduled_by_a_flush_runs_in_the_next_iteration() -> None:
    done: list[str] = []
    queue = flush_queue()
    with queue:
        queue.schedule(lambda: queue.schedule(lambda: done.append("late")))
    assert not done
    await asyncio.sleep(0)
    assert done == ["late"]


async def test_failing_flush_is_reported_and_the_others_run() -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
    done: list[str] = []

    def fail() -> None:
        raise ValueError("a bug")

    with flush_queue():
        flush_queue().schedule(fail)
        flush_queue().schedule(lambda: done.append("rest"))
    assert done == ["rest"]
    assert isinstance(reported[0]["exception"], ValueError)


def test_every_event_loop_has_its_own_queue() -> None:
    async def current() -> FlushQueue:
        flush_queue().schedule(lambda: None)
        return flush_queue()

    assert asyncio.run(current()) is not asyncio.run(current())
