from __future__ import annotations

import pytest

from syringa.store import BrokenChain, Chain, ChainLink, Store
from tests.store.things import ORGANISATION as US
from tests.store.things import START, Clock, items, response, statements


async def three(store: Store, **changes: object) -> None:
    previous = None
    for n in (1, 2, 3):
        kept = response(f"r{n}", previous_id=previous, output=tuple(items(f"o{n}")), **(changes if n == 2 else {}))
        await store.create_response(kept, items(f"i{n}", f"j{n}"))
        previous = f"r{n}"


async def test_input_and_output_of_each_oldest_first(store: Store) -> None:
    await three(store, conversation_id="c")
    chain = await store.chain(US, "r3")
    assert isinstance(chain, Chain)
    assert [item.id for item in chain.items] == ["i1", "j1", "o1", "i2", "j2", "o2", "i3", "j3", "o3"]
    assert chain.links[1] == ChainLink("r2", "completed", "m", "c")
    assert [link.id for link in chain.links] == ["r1", "r2", "r3"]
    assert await store.chain(US, "r1") == Chain(tuple(items("i1", "j1", "o1")), chain.links[:1])


async def test_a_response_without_items_is_a_link(store: Store) -> None:
    await store.create_response(response("r1", status="in_progress"))
    assert await store.chain(US, "r1") == Chain((), (ChainLink("r1", "in_progress", "m", None),))


async def test_two_may_continue_the_same(store: Store) -> None:
    await three(store)
    await store.create_response(response("side", previous_id="r1"), items("other"))
    chain = await store.chain(US, "side")
    assert isinstance(chain, Chain)
    assert [item.id for item in chain.items] == ["i1", "j1", "o1", "other"]


async def test_a_missing_link_is_named(store: Store, clock: Clock) -> None:
    assert await store.chain(US, "nothing") == BrokenChain("nothing", None)
    await three(store, expires_at=START + 5)
    clock.now = START + 5
    assert await store.chain(US, "r3") == BrokenChain("r2", "r3")
    clock.now = START
    assert isinstance(await store.chain(US, "r3"), Chain)
    await store.delete_response(US, "r1")
    assert await store.chain(US, "r3") == BrokenChain("r1", "r2")
    await store.delete_response(US, "r2")
    assert await store.chain(US, "r3") == BrokenChain("r2", "r3")


async def test_a_thousand_responses_in_one_statement(store: Store) -> None:
    def build(session: object) -> None:
        for n in range(1000):
            kept = response(f"r{n}", previous_id=f"r{n - 1}" if n else None, output=tuple(items(f"o{n}")))
            session.responses.create(kept, items(f"i{n}"))  # type: ignore[attr-defined]

    await store.write(build)
    with statements(store) as seen:
        chain = await store.chain(US, "r999")
    assert len(seen) == 1
    assert isinstance(chain, Chain)
    assert [item.id for item in chain.items] == [f"{kind}{n}" for n in range(1000) for kind in "io"]
    await store.delete_response(US, "r500")
    assert await store.chain(US, "r999") == BrokenChain("r500", "r501")


@pytest.mark.parametrize("size", [1, 2])
async def test_a_circle_ends(store: Store, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syringa.store.queries.chains._LONGEST", 50)
    for n in range(size):
        await store.create_response(response(f"r{n}", previous_id=f"r{(n + 1) % size}"))
    assert isinstance(await store.chain(US, "r0"), BrokenChain)
