from __future__ import annotations

from syringa.store import Store
from tests.store.helpers import read, write


async def test_override_of_a_pool_is_replaced_and_removed(store: Store) -> None:
    await write(store).pools.override("c", "night", True)
    await write(store).pools.override("c", "day", False)
    await write(store).pools.override("other", "night", False)
    assert await read(store).pools.overrides("c") == {"night": True, "day": False}
    await write(store).pools.override("c", "night", False)
    await write(store).pools.override("c", "day", None)
    await write(store).pools.override("c", "unknown", None)
    assert await read(store).pools.overrides("c") == {"night": False}
    assert await read(store).pools.overrides("other") == {"night": False}
