from __future__ import annotations

import asyncio

import pytest

from syringa.errors import InvalidRequest, NotFound
from syringa.store import Store
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import START, Clock, conversation, find_item, item, items, read, write


async def test_conversation_create_update_delete(store: Store) -> None:
    stored = conversation("c1", metadata='{"topic":"lilacs"}', expires_at=START + 9)
    assert await write(store).conversations.create(stored)
    assert not await write(store).conversations.create(conversation("c1"), items("a"))
    assert await read(store).conversations.get(US, "c1") == stored
    changed = await write(store).conversations.update(US, "c1", metadata="{}")
    assert changed == conversation("c1", expires_at=START + 9) == await read(store).conversations.get(US, "c1")
    assert await write(store).conversations.update(US, "c2", metadata="{}") is None
    assert await write(store).conversations.delete(US, "c1")
    assert not await write(store).conversations.delete(US, "c1")
    assert await read(store).conversations.get(US, "c1") is None


async def test_conversation_items_add_list_delete(store: Store) -> None:
    await write(store).conversations.create(conversation("c1"), items("a", "b"))
    assert await write(store).conversations.add_items(US, "c1", items("c", "d"))
    assert await write(store).conversations.delete_item(US, "c1", "d")
    assert not await write(store).conversations.delete_item(US, "c1", "d")
    assert await write(store).conversations.add_items(US, "c1", items("e"))
    assert await read(store).conversations.all_items(US, "c1") == tuple(items("a", "b", "c", "e"))
    assert await read(store).conversations.get_item(US, "c1", "b") == item("b")
    assert await read(store).conversations.get_item(US, "c1", "d") is None
    assert await find_item(store, US, "e") == item("e")

    page = await read(store).conversations.list_items(US, "c1", limit=2)
    assert page is not None
    assert ([each.id for each in page.items], page.has_more) == (["e", "c"], True)
    page = await read(store).conversations.list_items(US, "c1", limit=2, after="c")
    assert page is not None
    assert ([each.id for each in page.items], page.has_more) == (["b", "a"], False)
    page = await read(store).conversations.list_items(US, "c1", limit=2, before="c", order="asc")
    assert page is not None
    assert ([each.id for each in page.items], page.has_more) == (["a", "b"], False)
    with pytest.raises(NotFound):
        await read(store).conversations.list_items(US, "c1", after="d")


async def test_add_items_refuses_known_id(store: Store) -> None:
    await write(store).conversations.create(conversation("c1"), items("a"))
    with pytest.raises(InvalidRequest, match="already has an item 'a'"):
        await write(store).conversations.add_items(US, "c1", items("b", "a"))
    assert await read(store).conversations.all_items(US, "c1") == tuple(items("a"))
    await write(store).conversations.create(conversation("c2"), items("a"))  # another conversation is another list


async def test_missing_conversation(store: Store, clock: Clock) -> None:
    await write(store).conversations.create(conversation("c1", expires_at=START + 5), items("a"))
    clock.now = START + 5
    for id in ("c0", "c1"):
        assert not await write(store).conversations.add_items(US, id, items("b"))
        assert await read(store).conversations.list_items(US, id) is None
        assert await read(store).conversations.all_items(US, id) is None
        assert await read(store).conversations.get_item(US, id, "a") is None
        assert not await write(store).conversations.delete_item(US, id, "a")
        assert await write(store).conversations.update(US, id, metadata="{}") is None
    assert await find_item(store, US, "a") is None


async def test_concurrent_add_items_keeps_batches_together(store: Store, database: str, clock: Clock) -> None:
    await write(store).conversations.create(conversation("c1"))
    async with Store(database, clock=clock) as other:
        await asyncio.gather(
            *(
                write(each).conversations.add_items(US, "c1", items(f"{name}{n}-0", f"{name}{n}-1"))
                for n in range(15)
                for name, each in (("x", store), ("y", other))
            )
        )
    history = await read(store).conversations.all_items(US, "c1")
    assert history is not None
    assert len(history) == 60
    ids = [each.id for each in history]
    assert all(ids[n].split("-")[0] == ids[n + 1].split("-")[0] for n in range(0, 60, 2))
