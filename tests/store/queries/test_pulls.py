from __future__ import annotations

import asyncio
from typing import Any

from syringa.store import Store, StoredPull
from tests.store.helpers import START, Clock, read, write


def pull(id: str, **changes: Any) -> StoredPull:
    given = {"model": "m", "serve_as": "m", "process": "p", "created_at": START, "updated_at": float(START)}
    return StoredPull(id=id, **(given | changes))


async def test_running_pull_of_the_same_model_is_found(store: Store) -> None:
    create = write(store).pulls.create
    assert (await create(pull("a"))).id == "a"
    assert (await create(pull("b"))).id == "a"
    assert (await create(pull("c", serve_as="other"))).id == "c"
    assert (await create(pull("d"), ["a"])).id == "d"  # its process has exited
    await write(store).pulls.cancel("d")
    assert (await create(pull("e"), ["a"])).id == "e"
    await write(store).pulls.update("e", status="completed")
    assert (await create(pull("f"), ["a"])).id == "f"


async def test_concurrent_requests_begin_one_pull(store: Store) -> None:
    await store.open()
    found = await asyncio.gather(*(write(store).pulls.create(pull(f"p{number}")) for number in range(6)))
    assert len({each.id for each in found}) == 1
    assert len(await read(store).pulls.all()) == 1


async def test_progress_is_stored_until_it_is_to_be_cancelled(store: Store, clock: Clock) -> None:
    await write(store).pulls.create(pull("a"))
    clock.now += 5
    assert await write(store).pulls.update("a", files="[1]", stage="downloading", total_bytes=7)
    found = await read(store).pulls.get("a")
    assert found == pull("a", files="[1]", stage="downloading", total_bytes=7, updated_at=clock.now)
    assert (await write(store).pulls.cancel("a")).cancel
    assert not await write(store).pulls.update("a", files="[2]")
    await write(store).pulls.update("a", status="cancelled")
    await write(store).pulls.update("a", status="completed")
    assert (await read(store).pulls.get("a")).status == "cancelled"  # the first end counts
    assert await write(store).pulls.delete("a")
    assert not await write(store).pulls.update("a", files="[3]")
    assert await write(store).pulls.cancel("a") is None
    assert not await write(store).pulls.delete("a")


async def test_pulls_are_listed_and_expire(store: Store) -> None:
    await write(store).pulls.create(pull("old", updated_at=START - 10.0, created_at=START - 20))
    await write(store).pulls.create(pull("new", model="n"))
    assert [each.id for each in await read(store).pulls.all()] == ["new", "old"]
    assert await write(store).pulls.expire(START - 9.0) == 1
    assert [each.id for each in await read(store).pulls.all()] == ["new"]
