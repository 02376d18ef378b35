from __future__ import annotations

import asyncio

from syringa.store import Store
from tests.store.helpers import Clock, read, write


async def test_lease_belongs_to_the_first_until_it_expires(store: Store, clock: Clock) -> None:
    assert await write(store).leases.take("cluster", "a", 10.0)
    assert not await write(store).leases.take("cluster", "b", 10.0)
    assert await write(store).leases.take("another", "b", 10.0)
    clock.now += 9.9
    assert not await write(store).leases.take("cluster", "b", 10.0)
    assert await read(store).leases.owner("cluster") == "a"
    clock.now += 0.1
    assert await read(store).leases.owner("cluster") is None
    assert await write(store).leases.take("cluster", "b", 10.0)
    assert not await write(store).leases.take("cluster", "a", 10.0)


async def test_lease_is_renewed_by_its_owner(store: Store, clock: Clock) -> None:
    for _ in range(5):
        assert await write(store).leases.take("cluster", "a", 10.0)
        clock.now += 9
    assert not await write(store).leases.take("cluster", "b", 10.0)


async def test_released_lease_is_free(store: Store) -> None:
    await write(store).leases.take("cluster", "a", 10.0)
    await write(store).leases.release("cluster", "b")
    assert not await write(store).leases.take("cluster", "b", 10.0)
    await write(store).leases.release("cluster", "a")
    assert await write(store).leases.take("cluster", "b", 10.0)


async def test_owners_of_leases_with_a_prefix_are_those_that_have_not_expired(store: Store, clock: Clock) -> None:
    await write(store).leases.take("cluster", "a", 60.0)
    await write(store).leases.take("cluster/a", "a", 60.0)
    await write(store).leases.take("cluster/b", "b", 10.0)
    await write(store).leases.take("cluster_/c", "c", 60.0)
    assert sorted(await write(store).leases.owners("cluster/")) == ["a", "b"]
    clock.now += 10.0
    assert await write(store).leases.owners("cluster/") == ["a"]
    assert await write(store).leases.owners("cluster_") == ["c"]


async def test_one_of_several_servers_gets_the_lease(database: str) -> None:
    async with Store(database) as one, Store(database) as two:
        await one.open()
        stores = {f"{number}": store for number, store in enumerate([one, two] * 4)}
        taken = await asyncio.gather(
            *(write(store).leases.take("cluster", owner, 60.0) for owner, store in stores.items())
        )
        assert sum(taken) == 1
