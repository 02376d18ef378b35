from __future__ import annotations

import json

import pytest

from syringa.errors import InvalidRequest, NotFound
from syringa.store import Store
from tests.store.things import ORGANISATION as US
from tests.store.things import START, Clock, conversation, inside, item, items, response, statements


async def test_a_finished_response_comes_back_as_it_was(store: Store) -> None:
    kept = response(
        "r1",
        expires_at=START + 10,
        background=True,
        previous_id="r0",
        conversation_id="c0",
        output=(item("o1", "naïve \0 🌸"), item("o2")),
    )
    assert await store.create_response(kept, items("i1", "i2"))
    assert await store.get_response(US, "r1") == kept
    assert await store.get_response(US, "r2") is None


async def test_creating_twice_changes_nothing(store: Store) -> None:
    assert await store.create_response(response("r1", model="first"), items("i1"))
    assert not await store.create_response(response("r1", model="second"), items("i2"))
    kept = await store.get_response(US, "r1")
    page = await store.input_items(US, "r1")
    assert kept is not None
    assert kept.model == "first"
    assert page is not None
    assert page.items == tuple(items("i1"))


async def test_the_first_end_counts(store: Store) -> None:
    await store.create_response(response("r1", status="queued"), items("i1"))
    assert await store.update_response(US, "r1", status="in_progress", body='{"status": "in_progress"}')
    running = await store.get_response(US, "r1")
    assert running is not None
    assert (running.status, running.owner) == ("in_progress", "process")
    for _ in range(2):
        done = await store.finish_response(US, "r1", status="cancelled", body='{"status": "cancelled"}')
        assert done == "cancelled"
    late = await store.finish_response(US, "r1", status="completed", body="{}", output=items("o1"))
    assert late == "cancelled"
    assert not await store.update_response(US, "r1", status="in_progress", body="{}")
    ended = await store.get_response(US, "r1")
    assert ended is not None
    assert (ended.status, ended.body, ended.output, ended.owner) == ("cancelled", '{"status": "cancelled"}', (), None)


async def test_finishing_what_was_deleted(store: Store) -> None:
    await store.create_response(response("r1", status="queued"))
    assert await store.delete_response(US, "r1")
    assert not await store.delete_response(US, "r1")
    assert await store.finish_response(US, "r1", status="completed", body="{}", output=items("o1")) is None
    assert await store.find_item(US, "o1") is None


async def test_a_response_without_an_owner_does_not_run(store: Store) -> None:
    with pytest.raises(ValueError, match="owner"):
        await store.create_response(response("r1", status="queued", owner=None))


@pytest.mark.parametrize("ids", [("i1", "i1"), ("",), ("x" * 300,), ("a\0b",), ("\ud800",)])
async def test_ids_that_cannot_be(store: Store, ids: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        await store.create_response(response("r1"), [item(id) for id in ids])
    assert await store.get_response(US, "r1") is None


@pytest.mark.parametrize("id", ["", "a\0b", "\ud800", "x" * 5000, "r1' OR 1=1 --", "%"])
async def test_looking_for_odd_ids_finds_nothing(store: Store, id: str) -> None:
    await store.create_response(response("r1"), items("i1"))
    assert await store.get_response(US, id) is None
    assert await store.get_response(id, "r1") is None
    assert await store.find_item(US, id) is None
    assert await store.input_items(US, id) is None
    assert await store.get_conversation(US, id) is None
    assert await store.events_after(US, id) == []
    with pytest.raises(NotFound):
        await store.input_items(US, "r1", after=id)


async def test_pages_of_input(store: Store) -> None:
    ids = [f"i{n}" for n in range(7)]
    await store.create_response(response("r1", output=tuple(items("o1"))), items(*ids))

    async def page(**how: object) -> tuple[list[str], bool]:
        found = await store.input_items(US, "r1", **how)  # type: ignore[arg-type]
        assert found is not None
        return [each.id for each in found.items], found.has_more

    assert await page() == (ids[::-1], False)
    assert await page(order="asc", limit=3) == (["i0", "i1", "i2"], True)
    assert await page(order="asc", limit=3, after="i2") == (["i3", "i4", "i5"], True)
    assert await page(order="asc", limit=3, after="i5") == (["i6"], False)
    assert await page(order="asc", limit=3, after="i6") == ([], False)
    assert await page(order="desc", limit=3) == (["i6", "i5", "i4"], True)
    assert await page(order="desc", limit=4, after="i4") == (["i3", "i2", "i1", "i0"], False)
    assert await page(order="asc", limit=2, before="i5") == (["i3", "i4"], True)
    assert await page(order="asc", limit=2, before="i1") == (["i0"], False)
    assert await page(order="desc", limit=2, before="i3") == (["i5", "i4"], True)
    assert await page(order="asc", after="i1", before="i4") == (["i2", "i3"], False)
    with pytest.raises(NotFound) as refused:
        await page(after="o1")
    assert refused.value.param == "after"
    with statements(store) as seen:
        await page(order="asc", limit=2, after="i3")
    assert len(seen) == 3


async def test_an_item_sent_again_belongs_to_both(store: Store) -> None:
    await store.create_response(response("r1", output=(item("o1", "written"),)), items("i1"))
    again = [item("i1"), item("o1", "sent back"), item("i2")]
    await store.create_response(response("r2", created_at=START + 1), again)
    assert await store.find_item(US, "o1") == item("o1", "written")
    found = await store.find_items(US, ["i1", "i2", "o1", "nothing", *(f"x{n}" for n in range(2000))])
    assert sorted(found) == ["i1", "i2", "o1"]
    await store.delete_response(US, "r1")
    assert await store.find_item(US, "o1") == item("o1", "sent back")
    assert await store.find_item(US, "i1") == item("i1")


async def test_what_is_finished_becomes_part_of_its_conversation(store: Store) -> None:
    await store.create_conversation(conversation("c1"), items("a"))
    await store.create_response(response("r1", status="in_progress", conversation_id="c1"), items("a", "i1"))
    assert await store.conversation_history(US, "c1") == tuple(items("a"))
    for _ in range(2):
        await store.finish_response(US, "r1", status="completed", body="{}", output=items("o1"))
    assert await store.conversation_history(US, "c1") == tuple(items("a", "i1", "o1"))

    await store.create_response(response("r2", conversation_id="c1", output=tuple(items("o2"))), items("i2"))
    await store.create_response(response("r3", status="in_progress", conversation_id="c1"), items("i3"))
    await store.finish_response(US, "r3", status="failed", body="{}")
    assert await store.conversation_history(US, "c1") == tuple(items("a", "i1", "o1", "i2", "o2"))

    await store.create_response(response("r4", status="in_progress", conversation_id="c1"), items("i4"))
    await store.delete_conversation(US, "c1")
    assert await store.finish_response(US, "r4", status="completed", body="{}", output=items("o4")) == "completed"
    kept = await store.get_response(US, "r4")
    assert kept is not None
    assert kept.output == tuple(items("o4"))


async def test_a_response_and_its_items_are_written_together(store: Store) -> None:
    """An output with an input's id is refused in the middle of the transaction; nothing of it is left."""
    await store.create_response(response("r1", status="in_progress"), items("i1"))
    with pytest.raises(Exception, match="refused what was to be kept"):
        await store.finish_response(US, "r1", status="completed", body="{}", output=items("o1", "i1"))
    kept = await store.get_response(US, "r1")
    assert kept is not None
    assert kept.status == "in_progress"
    assert kept.output == ()
    assert await store.finish_response(US, "r1", status="completed", body="{}", output=items("o1")) == "completed"


async def test_deleting_leaves_nothing(store: Store) -> None:
    from sqlalchemy import text

    from syringa.store import Event

    await store.create_response(response("r1", output=tuple(items("o1"))), items("i1"))
    await store.append_events(US, "r1", [Event(0, "{}")])
    await store.create_conversation(conversation("c1"), items("a"))
    assert await store.delete_response(US, "r1")
    assert await store.delete_conversation(US, "c1")
    with inside(store).engine.begin() as connection:
        for table in ("responses", "response_items", "response_events", "conversations", "conversation_items"):
            assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() == 0


async def test_what_has_expired_is_gone_before_it_is_removed(store: Store, clock: Clock) -> None:
    await store.create_response(response("r1", expires_at=START + 5, output=tuple(items("o1"))), items("i1"))
    await store.create_response(response("r2", previous_id="r1"))
    clock.now = START + 4.9
    assert await store.get_response(US, "r1")
    clock.now = START + 5
    assert await store.get_response(US, "r1") is None
    assert await store.find_item(US, "o1") is None
    assert await store.input_items(US, "r1") is None
    assert not await store.delete_response(US, "r1")
    assert json.loads((await store.get_response(US, "r2")).body)["id"] == "r2"  # type: ignore[union-attr]
