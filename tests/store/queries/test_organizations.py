"""Isolation of organizations: none can read, list, reference, delete or continue data of another."""

from __future__ import annotations

from syringa.store import BrokenChain, Chain, Store, StoredEvent
from tests.store.helpers import conversation, find_item, item, items, read, response, write

US, THEM = "", "them"  # the organization of a server without keys, like any other


async def fill(store: Store, organization: str, text: str) -> None:
    """Use the same ids for each organization: a query without an organization would find the wrong row."""
    output = (item("o1", text),)
    await write(store).responses.create(response("r1", organization=organization, output=output), [item("i1", text)])
    await write(store).responses.create(response("r2", organization=organization, previous_id="r1"), [item("i2", text)])
    await write(store).events.append(organization, "r1", [StoredEvent(0, text)])
    await write(store).conversations.create(
        conversation("c1", organization=organization, metadata=text), [item("a", text)]
    )


async def check(store: Store, organization: str, text: str) -> None:
    stored = await read(store).responses.get(organization, "r1")
    assert stored is not None
    assert stored.output == (item("o1", text),)
    page = await read(store).responses.input_items(organization, "r1")
    assert page is not None
    assert page.items == (item("i1", text),)
    chain = await read(store).chains.chain(organization, "r2")
    assert isinstance(chain, Chain)
    assert chain.items == (item("i1", text), item("o1", text), item("i2", text))
    assert await find_item(store, organization, "i1") == item("i1", text)
    assert await find_item(store, organization, "a") == item("a", text)
    assert await read(store).events.after(organization, "r1") == [StoredEvent(0, text)]
    talk = await read(store).conversations.get(organization, "c1")
    assert talk is not None
    assert talk.metadata == text
    assert await read(store).conversations.all_items(organization, "c1") == (item("a", text),)
    assert await read(store).conversations.get_item(organization, "c1", "a") == item("a", text)


async def test_same_ids_in_two_organizations_are_independent(store: Store) -> None:
    await fill(store, US, "ours")
    await fill(store, THEM, "theirs")
    await check(store, US, "ours")
    await check(store, THEM, "theirs")
    await write(store).conversations.update(THEM, "c1", metadata="changed")
    await write(store).conversations.delete_item(THEM, "c1", "a")
    await write(store).conversations.delete(THEM, "c1")
    await write(store).responses.delete(THEM, "r1")
    await check(store, US, "ours")


async def test_data_of_other_organization_is_invisible(store: Store) -> None:
    await fill(store, US, "ours")
    assert await read(store).responses.get(THEM, "r1") is None
    assert await read(store).responses.input_items(THEM, "r1") is None
    assert await read(store).chains.chain(THEM, "r2") == BrokenChain("r2", None)
    assert await read(store).chains.find_items(THEM, ["i1", "o1", "a"]) == {}
    assert await read(store).events.after(THEM, "r1") == []
    assert not await write(store).events.append(THEM, "r1", [StoredEvent(1, "theirs")])
    assert not await write(store).responses.update(THEM, "r1", status="failed", body="{}")
    assert await write(store).responses.finish(THEM, "r1", status="failed", body="{}") is None
    assert not await write(store).responses.delete(THEM, "r1")
    assert await read(store).conversations.get(THEM, "c1") is None
    assert await write(store).conversations.update(THEM, "c1", metadata="theirs") is None
    assert not await write(store).conversations.add_items(THEM, "c1", items("b"))
    assert await read(store).conversations.list_items(THEM, "c1") is None
    assert await read(store).conversations.get_item(THEM, "c1", "a") is None
    assert not await write(store).conversations.delete_item(THEM, "c1", "a")
    assert not await write(store).conversations.delete(THEM, "c1")
    await check(store, US, "ours")


async def test_other_organizations_response_cannot_be_continued(store: Store) -> None:
    await fill(store, US, "ours")
    await write(store).responses.create(response("theirs", organization=THEM, previous_id="r2", conversation_id="c1"))
    assert await read(store).chains.chain(THEM, "theirs") == BrokenChain("r2", "theirs")
    await check(store, US, "ours")
