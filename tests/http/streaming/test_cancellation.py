from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from syringa.http.streaming.cancellation import CancelScope, DisconnectGuard
from syringa.http.streaming.writer import ClientDisconnected


async def test_cancel_scope_raises_the_error_after_clean_up() -> None:
    scope = CancelScope()
    steps: list[str] = []

    async def work() -> None:
        with scope:
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)  # clean-up may have to wait
                steps.append("cleaned up")

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    scope.cancel(ValueError("late"))
    scope.cancel(KeyError("later still"))
    with pytest.raises(ValueError, match="late"):
        await task
    assert steps == ["cleaned up"]
    assert task.cancelling() == 0


async def test_task_continues_after_a_cancelled_scope() -> None:
    scope = CancelScope()

    async def work() -> str:
        try:
            with scope:
                await asyncio.sleep(60)
        except ValueError:
            await asyncio.sleep(0.001)
            return "done"
        return "not cancelled"

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    scope.cancel(ValueError())
    assert await task == "done"


async def test_cancel_scope_ignores_cancel_before_and_after_the_block() -> None:
    scope = CancelScope()
    scope.cancel(ValueError())
    with scope:
        pass
    scope.cancel(ValueError())
    await asyncio.sleep(0)


async def test_cancel_scope_cancels_after_a_deadline() -> None:
    async def work() -> None:
        with CancelScope() as scope:
            scope.cancel_after(0.001, ValueError("late"))
            await asyncio.sleep(60)

    with pytest.raises(ValueError, match="late"):
        await work()


async def test_cancel_scope_discards_its_deadline_at_the_end_of_the_block() -> None:
    with CancelScope() as scope:
        scope.cancel_after(0.01, ValueError("late"))
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_cancellation_of_the_task_remains_a_cancelled_error(cancelled: bool) -> None:
    scope = CancelScope()

    async def work() -> None:
        with scope:
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    if cancelled:
        scope.cancel(ValueError())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_error_of_the_block_takes_precedence() -> None:
    scope = CancelScope()

    async def work() -> None:
        with scope:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                raise KeyError from None

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    scope.cancel(ValueError())
    with pytest.raises(KeyError):
        await task


def guarded_client(with_cycle: bool) -> tuple[Any, Any, Any]:
    """Return a guard's `receive` and request cycle, and a function that disconnects the client."""
    if with_cycle:
        cycle = SimpleNamespace(disconnected=False, on_disconnect=None)

        def disconnect() -> None:
            cycle.disconnected = True
            if cycle.on_disconnect is not None:
                cycle.on_disconnect()

        return None, cycle, disconnect
    disconnected = asyncio.Event()

    async def receive() -> Any:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    return receive, None, disconnected.set


@pytest.mark.parametrize("with_cycle", [True, False])
async def test_disconnect_guard_cancels_the_block(with_cycle: bool) -> None:
    receive, cycle, disconnect = guarded_client(with_cycle)

    async def work() -> None:
        with DisconnectGuard(receive, cycle):
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    disconnect()
    with pytest.raises(ClientDisconnected):
        await task


@pytest.mark.parametrize("with_cycle", [True, False])
async def test_disconnect_guard_cancels_at_the_first_wait_after_an_early_disconnect(with_cycle: bool) -> None:
    receive, cycle, disconnect = guarded_client(with_cycle)
    disconnect()
    with pytest.raises(ClientDisconnected), DisconnectGuard(receive, cycle):
        await asyncio.sleep(60)


@pytest.mark.parametrize("with_cycle", [True, False])
async def test_disconnect_guard_ignores_a_disconnect_after_the_block(with_cycle: bool) -> None:
    receive, cycle, disconnect = guarded_client(with_cycle)
    with DisconnectGuard(receive, cycle):
        await asyncio.sleep(0.001)
    disconnect()
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1
