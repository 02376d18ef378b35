from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from sqlalchemy import inspect

from syringa.store import ApiKey, Organisation, Store
from syringa.store.queries.keys import REMEMBERED_SECONDS
from tests.store.things import ORGANISATION as US
from tests.store.things import START, Clock, inside, statements


def key(id: str, **changes: Any) -> ApiKey:
    given = {"organisation": US, "digest": f"digest of {id}", "hint": "sk-syr-abcd", "created_at": START}
    return ApiKey(id=id, **(given | changes))


FULL: dict[str, Any] = {
    "name": "the laptop's ä",
    "admin": True,
    "models": ("a", "b/c"),
    "requests_per_minute": 5,
    "tokens_per_minute": 10**12,
    "concurrent": 0,
    "expires_at": START + 10,
}


async def test_a_key_comes_back_as_it_was(store: Store) -> None:
    for each in (key("k1"), key("k2", **FULL), key("k3", models=())):
        assert await store.keys.create(each)
        assert await store.keys.get(each.id) == each
    assert await store.keys.get("k4") is None


async def test_the_organisation_is_made_with_its_first_key(store: Store, clock: Clock) -> None:
    await store.keys.create(key("k1"))
    clock.now += 5
    await store.keys.create(key("k2"))
    assert await store.organisations.all() == [Organisation(id=US, created_at=START)]


@pytest.mark.parametrize("again", [key("k1", digest="other"), key("k2", digest="digest of k1")])
async def test_an_id_or_a_digest_that_is_taken(store: Store, again: ApiKey) -> None:
    await store.keys.create(key("k1"))
    revision = await store.revision("keys")
    assert not await store.keys.create(again)
    assert await store.keys.all() == [key("k1")]
    assert await store.revision("keys") == revision


async def test_lists(store: Store) -> None:
    late = key("a", created_at=START + 1)
    for each in (late, key("z"), key("b", organisation="other")):
        await store.keys.create(each)
    await store.keys.revoke("z")
    assert [each.id for each in await store.keys.all()] == ["z", "a", "b"]
    assert [each.id for each in await store.keys.all(US)] == ["z", "a"]
    assert await store.keys.all("nobody") == []


async def test_revoking(store: Store, clock: Clock) -> None:
    await store.keys.create(key("k1"))
    clock.now += 5
    expected = key("k1", revoked_at=START + 5)
    assert await store.keys.revoke("k1") == expected
    revision = await store.revision("keys")
    clock.now += 5
    assert await store.keys.revoke("k1") == expected  # the first time counts
    assert await store.keys.revoke("k2") is None
    assert await store.revision("keys") == revision


async def test_last_use_only_grows(store: Store) -> None:
    for id in ("k1", "k2"):
        await store.keys.create(key(id))
    revision = await store.revision("keys")
    await store.keys.touch({})
    await store.keys.touch({"k1": START + 7.9, "gone": START})
    await store.keys.touch({"k1": START + 3.0, "k2": START + 3.0})
    assert [each.last_used_at for each in await store.keys.all()] == [START + 7, START + 3]
    assert await store.revision("keys") == revision


async def test_two_note_the_same_keys_at_once(store: Store, database: str) -> None:
    ids = [f"k{n}" for n in range(50)]
    for id in ids:
        await store.keys.create(key(id))
    async with Store(database) as other:
        forwards, backwards = dict.fromkeys(ids, START + 1.0), dict.fromkeys(reversed(ids), START + 2.0)
        await asyncio.gather(*(each.keys.touch(used) for used in (forwards, backwards) for each in (store, other)))
    assert {each.last_used_at for each in await store.keys.all()} == {START + 2}


async def test_limits_of_an_organisation(store: Store, clock: Clock) -> None:
    first = await store.organisations.set(US, requests_per_minute=5, concurrent=0)
    assert first == Organisation(id=US, created_at=START, requests_per_minute=5, concurrent=0)
    clock.now += 5
    second = await store.organisations.set(US, requests_per_minute=None, tokens_per_minute=7)
    assert second == Organisation(id=US, created_at=START, tokens_per_minute=7, concurrent=0)
    assert await store.organisations.set("new") == Organisation(id="new", created_at=START + 5)
    assert await store.organisations.get(US) == second
    assert await store.organisations.get("other") is None
    await store.keys.create(key("k1"))
    assert await store.organisations.get(US) == second  # a key does not change them


async def test_the_snapshot(store: Store, clock: Clock) -> None:
    empty = await store.keys.snapshot()
    assert (empty.revision, empty.keys, empty.organisations, empty.any_ever) == (0, (), {}, False)
    await store.keys.create(key("works"))
    await store.keys.create(key("expired", expires_at=START + 10))
    await store.keys.create(key("revoked"))
    await store.keys.revoke("revoked")
    clock.now = START + 10 + REMEMBERED_SECONDS - 1
    seen = await store.keys.snapshot()
    assert {each.id for each in seen.keys} == {"works", "expired"}
    assert seen.organisations == {US: Organisation(id=US, created_at=START)}
    assert seen.revision == await store.revision("keys")
    clock.now += 1
    assert {each.id for each in (await store.keys.snapshot()).keys} == {"works"}
    await store.keys.revoke("works")
    last = await store.keys.snapshot()
    assert (last.keys, last.any_ever) == ((), True)


async def test_whether_any_key_works(store: Store, clock: Clock) -> None:
    assert not await store.keys.usable()
    await store.keys.create(key("k1", expires_at=START + 10))
    assert await store.keys.usable()
    clock.now += 10
    assert not await store.keys.usable()
    await store.keys.create(key("k2"))
    assert await store.keys.usable()
    await store.keys.revoke("k2")
    assert not await store.keys.usable()


async def test_a_revision_grows_with_each_change(store: Store, clock: Clock) -> None:
    seen = [await store.revision("keys")]
    for change in (
        lambda: store.keys.create(key("k1")),
        lambda: store.organisations.set(US, concurrent=1),
        lambda: store.keys.revoke("k1"),
    ):
        await change()
        seen.append(await store.revision("keys"))
    assert seen[0] == 0
    assert seen[1:] == [START * 1000, START * 1000 + 1, START * 1000 + 2]
    clock.now -= 100
    await store.keys.create(key("k2"))
    assert await store.revision("keys") == seen[-1] + 1  # also when the clock goes back
    assert await store.revision("models") == 0


async def test_changes_at_once_are_all_counted(store: Store, database: str) -> None:
    async with Store(database, clock=lambda: START) as other:
        await asyncio.gather(*(each.organisations.set(f"o{n}") for n in range(10) for each in (store, other)))
    assert await store.revision("keys") == START * 1000 + 19


async def test_a_change_that_fails_counts_for_nothing(store: Store) -> None:
    def work(session: Any) -> None:
        session.keys.create(key("k1"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.write(work)
    assert await store.revision("keys") == 0
    assert not (await store.keys.snapshot()).any_ever


async def test_a_poll_is_one_small_query(store: Store) -> None:
    await store.keys.create(key("k1"))
    with statements(store) as seen:
        await store.revision("keys")
    assert len(seen) == (0 if store.location.kind == "sqlite" else 1)  # a file is looked at without any of this
    assert all("FROM revisions" in each for each in seen)


async def test_who_watches_waits_for_no_reader(store: Store) -> None:
    await store.open()
    end = threading.Event()
    reading = [asyncio.create_task(store.read(lambda session: end.wait(30))) for _ in range(8)]
    try:
        await asyncio.wait_for(store.revision("keys"), 10)
        assert not any(each.done() for each in reading)
    finally:
        end.set()
        await asyncio.gather(*reading)


async def test_names_that_databases_refuse(store: Store) -> None:
    assert await store.keys.get("\0\ud800") is None
    assert await store.keys.revoke("\0") is None
    assert await store.organisations.get("\0") is None


async def test_what_holds_the_tables_together(store: Store) -> None:
    await store.open()
    with inside(store).engine.begin() as connection:
        there = inspect(connection)
        assert [each["column_names"] for each in there.get_unique_constraints("api_keys")] == [["digest"]]
        assert [each["referred_table"] for each in there.get_foreign_keys("api_keys")] == ["organisations"]
        columns = {tuple(each["column_names"]) for each in there.get_indexes("usage")}
        assert columns >= {("at", "id"), ("organisation", "at", "id")}
