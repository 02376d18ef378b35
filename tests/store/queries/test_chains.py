from __future__ import annotations

import pytest

from syringa.store import BrokenChain, Chain, ChainLink, ListSize, Store, StoredItem
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import START, Clock, conversation, items, read, response, statements, write


async def create_three(store: Store, **changes: object) -> None:
    previous = None
    for n in (1, 2, 3):
        stored = response(f"r{n}", previous_id=previous, output=tuple(items(f"o{n}")), **(changes if n == 2 else {}))
        await write(store).responses.create(stored, items(f"i{n}", f"j{n}"))
        previous = f"r{n}"


async def test_chain_has_input_and_output_oldest_first(store: Store) -> None:
    await create_three(store, conversation_id="c")
    chain = await read(store).chains.chain(US, "r3")
    assert isinstance(chain, Chain)
    assert [item.id for item in chain.items] == ["i1", "j1", "o1", "i2", "j2", "o2", "i3", "j3", "o3"]
    assert chain.links[1] == ChainLink("r2", "completed", "m", "c")
    assert [link.id for link in chain.links] == ["r1", "r2", "r3"]
    assert await read(store).chains.chain(US, "r1") == Chain(tuple(items("i1", "j1", "o1")), chain.links[:1])


async def test_chain_includes_response_without_items(store: Store) -> None:
    await write(store).responses.create(response("r1", status="in_progress"))
    assert await read(store).chains.chain(US, "r1") == Chain((), (ChainLink("r1", "in_progress", "m", None),))


async def test_chain_may_branch(store: Store) -> None:
    await create_three(store)
    await write(store).responses.create(response("side", previous_id="r1"), items("other"))
    chain = await read(store).chains.chain(US, "side")
    assert isinstance(chain, Chain)
    assert [item.id for item in chain.items] == ["i1", "j1", "o1", "other"]


async def test_broken_chain_names_missing_response(store: Store, clock: Clock) -> None:
    assert await read(store).chains.chain(US, "nothing") == BrokenChain("nothing", None)
    await create_three(store, expires_at=START + 5)
    clock.now = START + 5
    assert await read(store).chains.chain(US, "r3") == BrokenChain("r2", "r3")
    clock.now = START
    assert isinstance(await read(store).chains.chain(US, "r3"), Chain)
    await write(store).responses.delete(US, "r1")
    assert await read(store).chains.chain(US, "r3") == BrokenChain("r1", "r2")
    await write(store).responses.delete(US, "r2")
    assert await read(store).chains.chain(US, "r3") == BrokenChain("r2", "r3")


async def test_chain_of_thousand_responses_is_one_statement(store: Store) -> None:
    def build(session: object) -> None:
        for n in range(1000):
            stored = response(f"r{n}", previous_id=f"r{n - 1}" if n else None, output=tuple(items(f"o{n}")))
            session.responses.create(stored, items(f"i{n}"))  # type: ignore[attr-defined]

    await store.write(build)
    with statements(store) as seen:
        chain = await read(store).chains.chain(US, "r999")
    assert len(seen) == 1
    assert isinstance(chain, Chain)
    assert [item.id for item in chain.items] == [f"{kind}{n}" for n in range(1000) for kind in "io"]
    await write(store).responses.delete(US, "r500")
    assert await read(store).chains.chain(US, "r999") == BrokenChain("r500", "r501")


@pytest.mark.parametrize("size", [1, 2])
async def test_chain_with_cycle_terminates(store: Store, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.store.queries.chains._MAX_LENGTH", 50)
    for n in range(size):
        await write(store).responses.create(response(f"r{n}", previous_id=f"r{(n + 1) % size}"))
    assert isinstance(await read(store).chains.chain(US, "r0"), BrokenChain)


async def test_chain_size_counts_items_and_bytes_of_utf8(store: Store) -> None:
    await write(store).responses.create(response("r1"), [StoredItem("i1", '"é"'), StoredItem("i2", "12")])
    await write(store).responses.create(response("r2", previous_id="r1", output=(StoredItem("o", "345"),)))
    await write(store).responses.create(response("r3", previous_id="r2"))
    assert await read(store).chains.chain_size(US, "r3") == ListSize(3, 4 + 2 + 3)
    assert await read(store).chains.chain_size(US, "r1") == ListSize(2, 4 + 2)
    assert await read(store).chains.chain_size(US, "nothing") == ListSize()
    assert await read(store).chains.chain_size("other", "r3") == ListSize()


async def test_chain_size_includes_the_conversation_before_it(store: Store) -> None:
    await write(store).conversations.create(conversation("c"), [StoredItem("a", "12345")])
    await write(store).responses.create(response("r1", conversation_id="c", status="failed"), [StoredItem("i", "12")])
    await write(store).responses.create(response("r2", previous_id="r1"))
    assert await read(store).chains.chain_size(US, "r2") == ListSize(2, 7)


async def test_items_size_counts_every_copy(store: Store) -> None:
    await write(store).conversations.create(conversation("c"), [StoredItem("a", "12345")])
    await write(store).responses.create(response("r1"), [StoredItem("a", "12"), StoredItem("b", "1")])
    assert await read(store).chains.items_size(US, ["a", "a", "unknown"]) == ListSize(2, 7)
    assert await read(store).chains.items_size("other", ["a"]) == ListSize()
