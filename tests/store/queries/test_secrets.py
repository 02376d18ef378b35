from __future__ import annotations

import asyncio

from syringa.store import Store


async def test_a_secret_is_drawn_once(store: Store, database: str) -> None:
    assert await store.secret("seal", lambda: "first") == "first"
    assert await store.secret("seal", lambda: "second") == "first"
    assert await store.secret("other", lambda: "third") == "third"
    async with Store(database) as again:
        assert await again.secret("seal", lambda: "fourth") == "first"


async def test_two_that_draw_at_once_agree(database: str) -> None:
    async with Store(database) as one, Store(database) as two:
        await one.open()
        drawn = await asyncio.gather(*(each.secret("s", lambda n=n: f"{n}") for n, each in enumerate([one, two] * 4)))
    assert len(set(drawn)) == 1
