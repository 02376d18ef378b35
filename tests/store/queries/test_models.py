from __future__ import annotations

from syringa.store import ModelRow, Store
from tests.store.things import START, Clock


async def test_models_are_put_changed_and_deleted(store: Store, clock: Clock) -> None:
    seen = [await store.revision("models")]
    first = await store.models.put("a/b", '{"path": "ä"}')
    assert first == ModelRow(id="a/b", definition='{"path": "ä"}', updated_at=START)
    assert await store.models.all() == [first]
    seen.append(await store.revision("models"))
    clock.now += 5
    changed = await store.models.put("a/b", "{}")
    assert changed == ModelRow(id="a/b", definition="{}", updated_at=START + 5)
    assert await store.models.all() == [changed]
    seen.append(await store.revision("models"))
    assert await store.models.snapshot() == (seen[-1], [changed])
    assert await store.models.delete("a/b")
    assert await store.models.all() == []
    seen.append(await store.revision("models"))
    assert seen == sorted(set(seen))
    assert not await store.models.delete("a/b")
    assert await store.revision("models") == seen[-1]
    assert await store.revision("keys") == 0


async def test_the_oldest_comes_first(store: Store, clock: Clock) -> None:
    for id in ("b", "a", "c"):
        await store.models.put(id, "{}")
        clock.now += 1
    assert [each.id for each in await store.models.all()] == ["b", "a", "c"]
