from __future__ import annotations

import asyncio

from syringa.store import Store, StoredModel
from tests.store.helpers import START, Clock, read, write


async def test_models_put_replace_delete(store: Store, clock: Clock) -> None:
    seen = [await read(store).revisions.get("models")]
    first = await write(store).models.put("a/b", '{"path": "ä"}')
    assert first == StoredModel(id="a/b", definition='{"path": "ä"}', updated_at=START)
    assert await read(store).models.all() == [first]
    seen.append(await read(store).revisions.get("models"))
    clock.now += 5
    changed = await write(store).models.put("a/b", "{}")
    assert changed == StoredModel(id="a/b", definition="{}", updated_at=START + 5)
    assert await read(store).models.all() == [changed]
    seen.append(await read(store).revisions.get("models"))
    assert await read(store).models.snapshot() == (seen[-1], [changed])
    assert await write(store).models.delete("a/b")
    assert await read(store).models.all() == []
    seen.append(await read(store).revisions.get("models"))
    assert seen == sorted(set(seen))
    assert not await write(store).models.delete("a/b")
    assert await read(store).revisions.get("models") == seen[-1]
    assert await read(store).revisions.get("keys") == 0


async def test_models_sorted_by_age(store: Store, clock: Clock) -> None:
    for id in ("b", "a", "c"):
        await write(store).models.put(id, "{}")
        clock.now += 1
    assert [each.id for each in await read(store).models.all()] == ["b", "a", "c"]


async def test_secret_is_generated_once(store: Store, database: str) -> None:
    assert await store.get_or_create_secret("content_key", lambda: "first") == "first"
    assert await store.get_or_create_secret("content_key", lambda: "second") == "first"
    assert await store.get_or_create_secret("other", lambda: "third") == "third"
    async with Store(database) as again:
        assert await again.get_or_create_secret("content_key", lambda: "fourth") == "first"


async def test_concurrent_generation_agrees_on_one_secret(database: str) -> None:
    async with Store(database) as one, Store(database) as two:
        await one.open()
        secrets = await asyncio.gather(
            *(each.get_or_create_secret("s", lambda n=n: f"{n}") for n, each in enumerate([one, two] * 4))
        )
    assert len(set(secrets)) == 1
