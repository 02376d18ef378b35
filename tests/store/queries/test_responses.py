from __future__ import annotations

import json

import pytest

from syringa.errors import InvalidRequest, NotFound
from syringa.store import Store
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import (
    START,
    Clock,
    conversation,
    database_of,
    find_item,
    item,
    items,
    read,
    response,
    statements,
    write,
)


async def test_response_round_trip(store: Store) -> None:
    stored = response(
        "r1",
        expires_at=START + 10,
        background=True,
        previous_id="r0",
        conversation_id="c0",
        output=(item("o1", "naïve \0 🌸"), item("o2")),
    )
    assert await write(store).responses.create(stored, items("i1", "i2"))
    assert await read(store).responses.get(US, "r1") == stored
    assert await read(store).responses.get(US, "r2") is None


async def test_create_refuses_known_id(store: Store) -> None:
    assert await write(store).responses.create(response("r1", model="first"), items("i1"))
    assert not await write(store).responses.create(response("r1", model="second"), items("i2"))
    stored = await read(store).responses.get(US, "r1")
    page = await read(store).responses.input_items(US, "r1")
    assert stored is not None
    assert stored.model == "first"
    assert page is not None
    assert page.items == tuple(items("i1"))


async def test_first_finish_counts(store: Store) -> None:
    await write(store).responses.create(response("r1", status="queued"), items("i1"))
    assert await write(store).responses.update(US, "r1", status="in_progress", body='{"status": "in_progress"}')
    running = await read(store).responses.get(US, "r1")
    assert running is not None
    assert (running.status, running.process) == ("in_progress", "process")
    for _ in range(2):
        done = await write(store).responses.finish(US, "r1", status="cancelled", body='{"status": "cancelled"}')
        assert done == "cancelled"
    late = await write(store).responses.finish(US, "r1", status="completed", body="{}", output=items("o1"))
    assert late == "cancelled"
    assert not await write(store).responses.update(US, "r1", status="in_progress", body="{}")
    ended = await read(store).responses.get(US, "r1")
    assert ended is not None
    assert (ended.status, ended.body, ended.output, ended.process) == ("cancelled", '{"status": "cancelled"}', (), None)


async def test_finish_of_deleted_response(store: Store) -> None:
    await write(store).responses.create(response("r1", status="queued"))
    assert await write(store).responses.delete(US, "r1")
    assert not await write(store).responses.delete(US, "r1")
    assert await write(store).responses.finish(US, "r1", status="completed", body="{}", output=items("o1")) is None
    assert await find_item(store, US, "o1") is None


async def test_active_response_needs_process(store: Store) -> None:
    with pytest.raises(ValueError, match="process"):
        await write(store).responses.create(response("r1", status="queued", process=None))


@pytest.mark.parametrize("ids", [("i1", "i1"), ("",), ("x" * 300,), ("a\0b",), ("\ud800",)])
async def test_create_refuses_invalid_item_ids(store: Store, ids: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        await write(store).responses.create(response("r1"), [item(id) for id in ids])
    assert await read(store).responses.get(US, "r1") is None


@pytest.mark.parametrize("id", ["", "a\0b", "\ud800", "x" * 5000, "r1' OR 1=1 --", "%"])
async def test_unusual_ids_match_nothing(store: Store, id: str) -> None:
    await write(store).responses.create(response("r1"), items("i1"))
    assert await read(store).responses.get(US, id) is None
    assert await read(store).responses.get(id, "r1") is None
    assert await find_item(store, US, id) is None
    assert await read(store).responses.input_items(US, id) is None
    assert await read(store).conversations.get(US, id) is None
    assert await read(store).events.after(US, id) == []
    with pytest.raises(NotFound):
        await read(store).responses.input_items(US, "r1", after=id)


async def test_input_items_pages(store: Store) -> None:
    ids = [f"i{n}" for n in range(7)]
    await write(store).responses.create(response("r1", output=tuple(items("o1"))), items(*ids))

    async def page(**how: object) -> tuple[list[str], bool]:
        found = await read(store).responses.input_items(US, "r1", **how)  # type: ignore[arg-type]
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


async def test_find_items_prefers_generated_copy(store: Store) -> None:
    await write(store).responses.create(response("r1", output=(item("o1", "written"),)), items("i1"))
    again = [item("i1"), item("o1", "sent back"), item("i2")]
    await write(store).responses.create(response("r2", created_at=START + 1), again)
    assert await find_item(store, US, "o1") == item("o1", "written")
    found = await read(store).chains.find_items(US, ["i1", "i2", "o1", "nothing", *(f"x{n}" for n in range(2000))])
    assert sorted(found) == ["i1", "i2", "o1"]
    await write(store).responses.delete(US, "r1")
    assert await find_item(store, US, "o1") == item("o1", "sent back")
    assert await find_item(store, US, "i1") == item("i1")


async def test_finished_response_is_added_to_conversation(store: Store) -> None:
    await write(store).conversations.create(conversation("c1"), items("a"))
    await write(store).responses.create(response("r1", status="in_progress", conversation_id="c1"), items("a", "i1"))
    assert await read(store).conversations.all_items(US, "c1") == tuple(items("a"))
    for _ in range(2):
        await write(store).responses.finish(US, "r1", status="completed", body="{}", output=items("o1"))
    assert await read(store).conversations.all_items(US, "c1") == tuple(items("a", "i1", "o1"))

    await write(store).responses.create(response("r2", conversation_id="c1", output=tuple(items("o2"))), items("i2"))
    await write(store).responses.create(response("r3", status="in_progress", conversation_id="c1"), items("i3"))
    await write(store).responses.finish(US, "r3", status="failed", body="{}")
    assert await read(store).conversations.all_items(US, "c1") == tuple(items("a", "i1", "o1", "i2", "o2"))

    await write(store).responses.create(response("r4", status="in_progress", conversation_id="c1"), items("i4"))
    await write(store).conversations.delete(US, "c1")
    assert (
        await write(store).responses.finish(US, "r4", status="completed", body="{}", output=items("o4")) == "completed"
    )
    stored = await read(store).responses.get(US, "r4")
    assert stored is not None
    assert stored.output == tuple(items("o4"))


async def test_finish_is_atomic(store: Store) -> None:
    """An output with an input's id fails in the middle of the transaction, which is rolled back."""
    await write(store).responses.create(response("r1", status="in_progress"), items("i1"))
    with pytest.raises(Exception, match="database rejected the data"):
        await write(store).responses.finish(US, "r1", status="completed", body="{}", output=items("o1", "i1"))
    stored = await read(store).responses.get(US, "r1")
    assert stored is not None
    assert stored.status == "in_progress"
    assert stored.output == ()
    assert (
        await write(store).responses.finish(US, "r1", status="completed", body="{}", output=items("o1")) == "completed"
    )


async def test_delete_cascades(store: Store) -> None:
    from sqlalchemy import text

    from syringa.store import StoredEvent

    await write(store).responses.create(response("r1", output=tuple(items("o1"))), items("i1"))
    await write(store).events.append(US, "r1", [StoredEvent(0, "{}")])
    await write(store).conversations.create(conversation("c1"), items("a"))
    assert await write(store).responses.delete(US, "r1")
    assert await write(store).conversations.delete(US, "c1")
    with database_of(store).engine.begin() as connection:
        for table in ("responses", "response_items", "response_events", "conversations", "conversation_items"):
            assert connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() == 0


async def test_expired_response_is_hidden_before_deletion(store: Store, clock: Clock) -> None:
    await write(store).responses.create(response("r1", expires_at=START + 5, output=tuple(items("o1"))), items("i1"))
    await write(store).responses.create(response("r2", previous_id="r1"))
    clock.now = START + 4.9
    assert await read(store).responses.get(US, "r1")
    clock.now = START + 5
    assert await read(store).responses.get(US, "r1") is None
    assert await find_item(store, US, "o1") is None
    assert await read(store).responses.input_items(US, "r1") is None
    assert not await write(store).responses.delete(US, "r1")
    assert json.loads((await read(store).responses.get(US, "r2")).body)["id"] == "r2"  # type: ignore[union-attr]
