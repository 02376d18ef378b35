from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from syringa.service.limits.memory_budget import MemoryBudget


class Holder:
    """A task that reserves memory until it is released."""

    def __init__(self, budget: MemoryBudget, organization: str, size: int) -> None:
        self.entered, self._released = asyncio.Event(), asyncio.Event()
        self.task = asyncio.create_task(self._hold(budget, organization, size))

    async def _hold(self, budget: MemoryBudget, organization: str, size: int) -> None:
        async with budget.reserve(organization, size):
            self.entered.set()
            await self._released.wait()

    async def release(self) -> None:
        self._released.set()
        await self.task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_memory_budget_bounds_what_is_held() -> None:
    budget = MemoryBudget(10)
    first, second = Holder(budget, "acme", 6), Holder(budget, "acme", 6)
    await settle()
    assert (first.entered.is_set(), second.entered.is_set()) == (True, False)
    await first.release()
    await settle()
    assert second.entered.is_set()
    await second.release()


async def test_memory_budget_never_makes_an_organization_below_its_share_wait() -> None:
    budget = MemoryBudget(10)
    greedy = [Holder(budget, "greedy", 5) for _ in range(4)]
    await settle()
    assert [each.entered.is_set() for each in greedy] == [True, True, False, False]
    other = [Holder(budget, "other", 3), Holder(budget, "other", 3)]
    await settle()
    assert [each.entered.is_set() for each in other] == [True, False]  # its share is 5
    await greedy[0].release()
    await settle()
    assert [each.entered.is_set() for each in (*greedy[2:], *other)] == [False, False, True, False]
    await greedy[1].release()
    await settle()  # now it holds nothing, and gets its share
    assert [each.entered.is_set() for each in (*greedy[2:], *other)] == [True, False, True, False]
    await other[0].release()
    await settle()
    assert [each.entered.is_set() for each in (greedy[3], other[1])] == [False, True]
    for each in (greedy[2], greedy[3], other[1]):
        await each.release()
    assert not budget._held


async def test_memory_budget_admits_what_exceeds_it_alone() -> None:
    budget = MemoryBudget(10)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(budget.reserve("acme", 1000))
        waiting = Holder(budget, "acme", 1)
        await settle()
        assert not waiting.entered.is_set()
    await settle()
    assert waiting.entered.is_set()
    await waiting.release()


@pytest.mark.parametrize("granted", [False, True])
async def test_memory_budget_survives_the_cancellation_of_a_waiter(granted: bool) -> None:
    budget = MemoryBudget(10)
    first, second, third = (Holder(budget, "acme", 10) for _ in range(3))
    await settle()
    if granted:  # in the same turn of the event loop in which it is cancelled
        first._released.set()
        await asyncio.sleep(0)
    second.task.cancel()
    await asyncio.gather(second.task, return_exceptions=True)
    await first.release()
    await settle()
    assert third.entered.is_set()
    await third.release()
    assert not budget._held
