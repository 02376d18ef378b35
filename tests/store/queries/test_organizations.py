"""One organisation never reads, lists, references, deletes or continues another's."""

from __future__ import annotations

from syringa.store import BrokenChain, Chain, Event, Store
from tests.store.things import conversation, item, items, response

US, THEM = "", "them"  # the local user is an organisation like any other


async def fill(store: Store, organisation: str, text: str) -> None:
    """Both use the same ids, which is the worst case: a query that forgets whose they are finds the wrong one."""
    output = (item("o1", text),)
    await store.create_response(response("r1", organisation=organisation, output=output), [item("i1", text)])
    await store.create_response(response("r2", organisation=organisation, previous_id="r1"), [item("i2", text)])
    await store.append_events(organisation, "r1", [Event(0, text)])
    await store.create_conversation(conversation("c1", organisation=organisation, metadata=text), [item("a", text)])


async def check(store: Store, organisation: str, text: str) -> None:
    kept = await store.get_response(organisation, "r1")
    assert kept is not None
    assert kept.output == (item("o1", text),)
    page = await store.input_items(organisation, "r1")
    assert page is not None
    assert page.items == (item("i1", text),)
    chain = await store.chain(organisation, "r2")
    assert isinstance(chain, Chain)
    assert chain.items == (item("i1", text), item("o1", text), item("i2", text))
    assert await store.find_item(organisation, "i1") == item("i1", text)
    assert await store.find_item(organisation, "a") == item("a", text)
    assert await store.events_after(organisation, "r1") == [Event(0, text)]
    talk = await store.get_conversation(organisation, "c1")
    assert talk is not None
    assert talk.metadata == text
    assert await store.conversation_history(organisation, "c1") == (item("a", text),)
    assert await store.get_conversation_item(organisation, "c1", "a") == item("a", text)


async def test_the_same_ids_in_two_organisations(store: Store) -> None:
    await fill(store, US, "ours")
    await fill(store, THEM, "theirs")
    await check(store, US, "ours")
    await check(store, THEM, "theirs")
    await store.update_conversation(THEM, "c1", metadata="changed")
    await store.delete_conversation_item(THEM, "c1", "a")
    await store.delete_conversation(THEM, "c1")
    await store.delete_response(THEM, "r1")
    await check(store, US, "ours")


async def test_what_belongs_to_another_is_not_there(store: Store) -> None:
    await fill(store, US, "ours")
    assert await store.get_response(THEM, "r1") is None
    assert await store.input_items(THEM, "r1") is None
    assert await store.chain(THEM, "r2") == BrokenChain("r2", None)
    assert await store.find_items(THEM, ["i1", "o1", "a"]) == {}
    assert await store.events_after(THEM, "r1") == []
    assert not await store.append_events(THEM, "r1", [Event(1, "theirs")])
    assert not await store.update_response(THEM, "r1", status="failed", body="{}")
    assert await store.finish_response(THEM, "r1", status="failed", body="{}") is None
    assert not await store.delete_response(THEM, "r1")
    assert await store.get_conversation(THEM, "c1") is None
    assert await store.update_conversation(THEM, "c1", metadata="theirs") is None
    assert not await store.add_conversation_items(THEM, "c1", items("b"))
    assert await store.conversation_items(THEM, "c1") is None
    assert await store.get_conversation_item(THEM, "c1", "a") is None
    assert not await store.delete_conversation_item(THEM, "c1", "a")
    assert not await store.delete_conversation(THEM, "c1")
    await check(store, US, "ours")


async def test_another_s_response_or_conversation_cannot_be_continued(store: Store) -> None:
    await fill(store, US, "ours")
    await store.create_response(response("theirs", organisation=THEM, previous_id="r2", conversation_id="c1"))
    assert await store.chain(THEM, "theirs") == BrokenChain("r2", "theirs")
    await check(store, US, "ours")
