from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from syringa.http.streaming.cancellation import Interruption, Presence
from syringa.http.streaming.writer import ClientGone


async def test_the_error_comes_out_where_the_block_ends() -> None:
    interruption = Interruption()
    steps: list[str] = []

    async def work() -> None:
        with interruption:
            try:
                await asyncio.sleep(5)
            finally:
                await asyncio.sleep(0)  # cleaning up may take a while
                steps.append("cleaned up")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    interruption.now(ValueError("late"))
    interruption.now(KeyError("later still"))
    with pytest.raises(ValueError, match="late"):
        await task
    assert steps == ["cleaned up"]
    assert task.cancelling() == 0


async def test_work_goes_on_after_the_block() -> None:
    interruption = Interruption()

    async def work() -> str:
        try:
            with interruption:
                await asyncio.sleep(5)
        except ValueError:
            await asyncio.sleep(0.001)
            return "done"
        return "not interrupted"

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    interruption.now(ValueError())
    assert await task == "done"


async def test_who_was_never_inside_or_has_left_is_not_interrupted() -> None:
    interruption = Interruption()
    interruption.now(ValueError())
    with interruption:
        pass
    interruption.now(ValueError())
    await asyncio.sleep(0)


@pytest.mark.parametrize("interrupted", [False, True])
async def test_a_cancellation_by_others_stays_one(interrupted: bool) -> None:
    interruption = Interruption()

    async def work() -> None:
        with interruption:
            await asyncio.sleep(5)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    if interrupted:
        interruption.now(ValueError())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_work_itself_comes_first() -> None:
    interruption = Interruption()

    async def work() -> None:
        with interruption:
            try:
                await asyncio.sleep(5)
            except asyncio.CancelledError:
                raise KeyError from None

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    interruption.now(ValueError())
    with pytest.raises(KeyError):
        await task


def places(ours: bool) -> tuple[Any, Any, Any]:
    """A scope, its `receive`, and what makes the client leave."""
    if ours:
        exchange = SimpleNamespace(disconnected=False, left=None)

        def leave() -> None:
            exchange.disconnected = True
            if exchange.left is not None:
                exchange.left()

        return {"state": {"exchange": exchange}}, None, leave
    gone = asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    return {"state": {}}, receive, gone.set


@pytest.mark.parametrize("ours", [True, False])
async def test_a_client_that_leaves_ends_the_work(ours: bool) -> None:
    scope, receive, leave = places(ours)

    async def work() -> None:
        with Presence(scope, receive):
            await asyncio.sleep(5)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    leave()
    with pytest.raises(ClientGone):
        await task


@pytest.mark.parametrize("ours", [True, False])
async def test_one_that_has_left_already_is_noticed_at_the_first_wait(ours: bool) -> None:
    scope, receive, leave = places(ours)
    leave()
    with pytest.raises(ClientGone), Presence(scope, receive):
        await asyncio.sleep(5)


@pytest.mark.parametrize("ours", [True, False])
async def test_one_that_leaves_later_changes_nothing(ours: bool) -> None:
    scope, receive, leave = places(ours)
    with Presence(scope, receive):
        await asyncio.sleep(0.001)
    leave()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
