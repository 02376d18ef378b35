from __future__ import annotations

import asyncio

import pytest

from syringa.errors import InvalidRequest, NotFound
from syringa.store import Store
from tests.store.things import ORGANISATION as US
from tests.store.things import START, Clock, conversation, item, items


async def test_a_conversation_and_its_metadata(store: Store) -> None:
    kept = conversation("c1", metadata='{"topic":"lilacs"}', expires_at=START + 9)
    assert await store.create_conversation(kept)
    assert not await store.create_conversation(conversation("c1"), items("a"))
    assert await store.get_conversation(US, "c1") == kept
    changed = await store.update_conversation(US, "c1", metadata="{}")
    assert changed == conversation("c1", expires_at=START + 9) == await store.get_conversation(US, "c1")
    assert await store.update_conversation(US, "c2", metadata="{}") is None
    assert await store.delete_conversation(US, "c1")
    assert not await store.delete_conversation(US, "c1")
    assert await store.get_conversation(US, "c1") is None


async def test_items_are_added_listed_and_removed(store: Store) -> None:
    await store.create_conversation(conversation("c1"), items("a", "b"))
    assert await store.add_conversation_items(US, "c1", items("c", "d"))
    assert await store.delete_conversation_item(US, "c1", "d")
    assert not await store.delete_conversation_item(US, "c1", "d")
    assert await store.add_conversation_items(US, "c1", items("e"))
    assert await store.conversation_history(US, "c1") == tuple(items("a", "b", "c", "e"))
    assert await store.get_conversation_item(US, "c1", "b") == item("b")
    assert await store.get_conversation_item(US, "c1", "d") is None
    assert await store.find_item(US, "e") == item("e")

    page = await store.conversation_items(US, "c1", limit=2)
    assert page is not None
    assert ([each.id for each in page.items], page.has_more) == (["e", "c"], True)
    page = await store.conversation_items(US, "c1", limit=2, after="c")
    assert page is not None
    assert ([each.id for each in page.items], page.has_more) == (["b", "a"], False)
    page = await store.conversation_items(US, "c1", limit=2, before="c", order="asc")
    assert page is not None
    assert ([each.id for each in page.items], page.has_more) == (["a", "b"], False)
    with pytest.raises(NotFound):
        await store.conversation_items(US, "c1", after="d")


async def test_an_id_stands_for_one_item(store: Store) -> None:
    await store.create_conversation(conversation("c1"), items("a"))
    with pytest.raises(InvalidRequest, match="already has an item 'a'"):
        await store.add_conversation_items(US, "c1", items("b", "a"))
    assert await store.conversation_history(US, "c1") == tuple(items("a"))
    await store.create_conversation(conversation("c2"), items("a"))  # another conversation is another list


async def test_a_conversation_that_is_not_there(store: Store, clock: Clock) -> None:
    await store.create_conversation(conversation("c1", expires_at=START + 5), items("a"))
    clock.now = START + 5
    for id in ("c0", "c1"):
        assert not await store.add_conversation_items(US, id, items("b"))
        assert await store.conversation_items(US, id) is None
        assert await store.conversation_history(US, id) is None
        assert await store.get_conversation_item(US, id, "a") is None
        assert not await store.delete_conversation_item(US, id, "a")
        assert await store.update_conversation(US, id, metadata="{}") is None
    assert await store.find_item(US, "a") is None


async def test_adding_at_the_same_time_from_two_processes(store: Store, database: str, clock: Clock) -> None:
    await store.create_conversation(conversation("c1"))
    async with Store(database, clock=clock) as other:
        await asyncio.gather(
            *(
                each.add_conversation_items(US, "c1", items(f"{name}{n}-0", f"{name}{n}-1"))
                for n in range(15)
                for name, each in (("x", store), ("y", other))
            )
        )
    history = await store.conversation_history(US, "c1")
    assert history is not None
    assert len(history) == 60
    ids = [each.id for each in history]
    assert all(ids[n].split("-")[0] == ids[n + 1].split("-")[0] for n in range(0, 60, 2))
