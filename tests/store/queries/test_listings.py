from __future__ import annotations

from typing import Any

import pytest

from syringa.errors import NotFound
from syringa.store import ResponseFilter, Store, StoredItem
from syringa.store.queries.listings import MAX_ITEM_LENGTH
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import START, Clock, conversation, items, read, response, statements, write


async def fill(store: Store, count: int = 5, **changes: Any) -> None:
    for number in range(count):
        await write(store).responses.create(response(f"r{number}", created_at=START + number, **changes))


async def ids(store: Store, filter: ResponseFilter | None = None, **query: Any) -> tuple[str, bool]:
    found, more = await read(store).listings.responses(US, filter or ResponseFilter(), **query)
    return " ".join(each.id for each in found), more


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, ("r4 r3 r2 r1 r0", False)),
        ({"order": "asc"}, ("r0 r1 r2 r3 r4", False)),
        ({"limit": 2}, ("r4 r3", True)),
        ({"limit": 5}, ("r4 r3 r2 r1 r0", False)),
        ({"after": "r3", "limit": 2}, ("r2 r1", True)),
        ({"after": "r2", "limit": 2}, ("r1 r0", False)),
        ({"after": "r2", "order": "asc"}, ("r3 r4", False)),
        ({"before": "r1", "limit": 2}, ("r3 r2", True)),
        ({"before": "r3"}, ("r4", False)),
        ({"before": "r3", "order": "asc", "limit": 2}, ("r1 r2", True)),
        ({"after": "r4", "before": "r1"}, ("r3 r2", False)),
        ({"after": "r0"}, ("", False)),
    ],
)
async def test_page_of_responses(store: Store, query: dict[str, Any], expected: tuple[str, bool]) -> None:
    await fill(store)
    assert await ids(store, **query) == expected


async def test_responses_of_one_second_are_all_listed_once(store: Store) -> None:
    for number in range(7):
        await write(store).responses.create(response(f"r{number}"))
    seen: list[str] = []
    after = None
    while True:
        page, more = await read(store).listings.responses(US, after=after, limit=3)
        seen += [each.id for each in page]
        after = page[-1].id
        if not more:
            break
    assert seen == [f"r{number}" for number in reversed(range(7))]


@pytest.mark.parametrize("cursor", ["after", "before"])
async def test_unknown_cursor_is_refused(store: Store, cursor: str) -> None:
    await fill(store, 1)
    await write(store).responses.create(response("theirs", organization="other"))
    for id in ("none", "theirs", "a\0b"):
        with pytest.raises(NotFound) as raised:
            await ids(store, **{cursor: id})
        assert raised.value.param == cursor


async def test_responses_of_other_organizations_and_expired_ones_are_not_listed(store: Store, clock: Clock) -> None:
    await write(store).responses.create(response("ours", expires_at=START + 10))
    await write(store).responses.create(response("theirs", organization="other"))
    assert await ids(store) == ("ours", False)
    clock.now = START + 10
    assert await ids(store) == ("", False)


async def test_responses_are_filtered(store: Store) -> None:
    create = write(store).responses.create
    await create(response("plain"))
    await create(response("other", model="n", created_at=START + 1))
    await create(response("running", status="in_progress", background=True, created_at=START + 2))
    await create(response("next", previous_id="plain", created_at=START + 3))
    await create(response("talk", conversation_id="c1", created_at=START + 4))
    await create(response("failed", status="failed", created_at=START + 5))
    for filter, expected in [
        (ResponseFilter(model="n"), "other"),
        (ResponseFilter(statuses=("in_progress", "failed")), "failed running"),
        (ResponseFilter(statuses=()), ""),
        (ResponseFilter(previous_id="plain"), "next"),
        (ResponseFilter(conversation_id="c1"), "talk"),
        (ResponseFilter(background=True), "running"),
        (ResponseFilter(background=False, model="m", statuses=("completed",)), "talk next plain"),
    ]:
        assert await ids(store, filter) == (expected, False), filter


async def test_listed_response_has_its_last_items_unless_they_are_long(store: Store) -> None:
    output = tuple(items("o1", "o2"))
    await write(store).responses.create(response("r1", output=output), items("i1", "i2", "i3"))
    long = StoredItem("x", '{"id": "x", "text": "' + "x" * MAX_ITEM_LENGTH + '"}')
    await write(store).responses.create(response("r2", created_at=START + 1), [*items("j1"), long])
    await write(store).responses.create(response("r3", organization="other"), items("k1"))
    (second, first), _ = await read(store).listings.responses(US)
    assert first.input == items("i3")[0].json
    assert first.output == items("o2")[0].json
    assert first.body == response("r1").body
    assert (second.id, second.input, second.output) == ("r2", None, None)


async def test_conversations_are_listed_with_the_number_of_their_items(store: Store, clock: Clock) -> None:
    create = write(store).conversations.create
    await create(conversation("c1", metadata='{"a": "b"}'), items("i1", "i2"))
    await create(conversation("c2", created_at=START + 1))
    await create(conversation("c3", created_at=START + 2, expires_at=START + 9), items("i1"))
    await create(conversation("theirs", organization="other"), items("i1"))
    found, more = await read(store).listings.conversations(US)
    assert ([(each.id, each.items) for each in found], more) == ([("c3", 1), ("c2", 0), ("c1", 2)], False)
    assert found[2].metadata == '{"a": "b"}'
    found, more = await read(store).listings.conversations(US, limit=1, after="c3")
    assert ([each.id for each in found], more) == (["c2"], True)
    clock.now = START + 9
    found, _ = await read(store).listings.conversations(US, order="asc")
    assert [each.id for each in found] == ["c1", "c2"]
    with pytest.raises(NotFound):
        await read(store).listings.conversations(US, after="c3")


async def test_page_takes_a_fixed_number_of_queries(store: Store) -> None:
    await fill(store, 30)
    with statements(store) as seen:
        await ids(store, limit=30)
    assert len(seen) == 2
