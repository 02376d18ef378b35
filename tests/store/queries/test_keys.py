from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import inspect

from syringa.errors import StoreUnavailable
from syringa.store import ApiKey, Organization, Store
from syringa.store.queries.keys import EXPIRED_KEY_SECONDS
from tests.store.helpers import ORGANIZATION as US
from tests.store.helpers import START, Clock, database_of, read, statements, write


def key(id: str, **changes: Any) -> ApiKey:
    given = {"organization": US, "digest": f"digest of {id}", "hint": "sk-syr-abcd", "created_at": START}
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


async def test_key_round_trip(store: Store) -> None:
    for each in (key("k1"), key("k2", **FULL), key("k3", models=())):
        assert await write(store).keys.create(each)
        assert await read(store).keys.get(each.id) == each
    assert await read(store).keys.get("k4") is None


async def test_first_key_creates_organization(store: Store, clock: Clock) -> None:
    await write(store).keys.create(key("k1"))
    clock.now += 5
    await write(store).keys.create(key("k2"))
    assert await read(store).organizations.all() == [Organization(id=US, created_at=START)]


@pytest.mark.parametrize("again", [key("k1", digest="other"), key("k2", digest="digest of k1")])
async def test_create_refuses_known_id_or_digest(store: Store, again: ApiKey) -> None:
    await write(store).keys.create(key("k1"))
    revision = await read(store).revisions.get("keys")
    assert not await write(store).keys.create(again)
    assert await read(store).keys.all() == [key("k1")]
    assert await read(store).revisions.get("keys") == revision


async def test_all_keys_sorted_and_filtered(store: Store) -> None:
    late = key("a", created_at=START + 1)
    for each in (late, key("z"), key("b", organization="other")):
        await write(store).keys.create(each)
    await write(store).keys.revoke("z")
    assert [each.id for each in await read(store).keys.all()] == ["z", "a", "b"]
    assert [each.id for each in await read(store).keys.all(US)] == ["z", "a"]
    assert await read(store).keys.all("unknown") == []


async def test_revoke_keeps_first_time(store: Store, clock: Clock) -> None:
    await write(store).keys.create(key("k1"))
    clock.now += 5
    expected = key("k1", revoked_at=START + 5)
    assert await write(store).keys.revoke("k1") == expected
    revision = await read(store).revisions.get("keys")
    clock.now += 5
    assert await write(store).keys.revoke("k1") == expected  # the first time counts
    assert await write(store).keys.revoke("k2") is None
    assert await read(store).revisions.get("keys") == revision


async def test_touch_never_decreases_last_use(store: Store) -> None:
    for id in ("k1", "k2"):
        await write(store).keys.create(key(id))
    revision = await read(store).revisions.get("keys")
    await write(store).keys.touch({})
    await write(store).keys.touch({"k1": START + 7.9, "gone": START})
    await write(store).keys.touch({"k1": START + 3.0, "k2": START + 3.0})
    assert [each.last_used_at for each in await read(store).keys.all()] == [START + 7, START + 3]
    assert await read(store).revisions.get("keys") == revision


async def test_concurrent_touch_does_not_deadlock(store: Store, database: str) -> None:
    ids = [f"k{n}" for n in range(50)]
    for id in ids:
        await write(store).keys.create(key(id))
    async with Store(database) as other:
        forwards, backwards = dict.fromkeys(ids, START + 1.0), dict.fromkeys(reversed(ids), START + 2.0)
        await asyncio.gather(
            *(write(each).keys.touch(used) for used in (forwards, backwards) for each in (store, other))
        )
    assert {each.last_used_at for each in await read(store).keys.all()} == {START + 2}


async def test_set_limits_of_organization(store: Store, clock: Clock) -> None:
    first = await write(store).organizations.set_limits(US, {"requests_per_minute": 5, "concurrent": 0})
    assert first == Organization(id=US, created_at=START, requests_per_minute=5, concurrent=0)
    clock.now += 5
    second = await write(store).organizations.set_limits(US, {"requests_per_minute": None, "tokens_per_minute": 7})
    assert second == Organization(id=US, created_at=START, tokens_per_minute=7, concurrent=0)
    assert await write(store).organizations.set_limits("new", {}) == Organization(id="new", created_at=START + 5)
    assert await read(store).organizations.get(US) == second
    assert await read(store).organizations.get("other") is None
    await write(store).keys.create(key("k1"))
    assert await read(store).organizations.get(US) == second  # a key does not change them


async def test_snapshot_has_valid_and_recently_expired_keys(store: Store, clock: Clock) -> None:
    empty = await read(store).keys.snapshot()
    assert (empty.revision, empty.keys, empty.organizations, empty.any_ever_created) == (0, (), {}, False)
    await write(store).keys.create(key("works"))
    await write(store).keys.create(key("expired", expires_at=START + 10))
    await write(store).keys.create(key("revoked"))
    await write(store).keys.revoke("revoked")
    clock.now = START + 10 + EXPIRED_KEY_SECONDS - 1
    seen = await read(store).keys.snapshot()
    assert {each.id for each in seen.keys} == {"works", "expired"}
    assert seen.organizations == {US: Organization(id=US, created_at=START)}
    assert seen.revision == await read(store).revisions.get("keys")
    clock.now += 1
    assert {each.id for each in (await read(store).keys.snapshot()).keys} == {"works"}
    await write(store).keys.revoke("works")
    last = await read(store).keys.snapshot()
    assert (last.keys, last.any_ever_created) == ((), True)


async def test_has_valid_key(store: Store, clock: Clock) -> None:
    assert not await read(store).keys.has_valid_key()
    await write(store).keys.create(key("k1", expires_at=START + 10))
    assert await read(store).keys.has_valid_key()
    clock.now += 10
    assert not await read(store).keys.has_valid_key()
    await write(store).keys.create(key("k2"))
    assert await read(store).keys.has_valid_key()
    await write(store).keys.revoke("k2")
    assert not await read(store).keys.has_valid_key()


async def test_revision_advances_with_each_change(store: Store, clock: Clock) -> None:
    seen = [await read(store).revisions.get("keys")]
    for change in (
        lambda: write(store).keys.create(key("k1")),
        lambda: write(store).organizations.set_limits(US, {"concurrent": 1}),
        lambda: write(store).keys.revoke("k1"),
    ):
        await change()
        seen.append(await read(store).revisions.get("keys"))
    assert seen[0] == 0
    assert seen[1:] == [START * 1000, START * 1000 + 1, START * 1000 + 2]
    clock.now -= 100
    await write(store).keys.create(key("k2"))
    assert await read(store).revisions.get("keys") == seen[-1] + 1  # also when the clock goes back
    assert await read(store).revisions.get("models") == 0


async def test_concurrent_changes_all_advance_revision(store: Store, database: str) -> None:
    async with Store(database, clock=lambda: START) as other:
        await asyncio.gather(
            *(write(each).organizations.set_limits(f"o{n}", {}) for n in range(10) for each in (store, other))
        )
    assert await read(store).revisions.get("keys") == START * 1000 + 19


async def test_failed_change_does_not_advance_revision(store: Store) -> None:
    def work(session: Any) -> None:
        session.keys.create(key("k1"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await store.write(work)
    assert await read(store).revisions.get("keys") == 0
    assert not (await read(store).keys.snapshot()).any_ever_created


async def test_poll_is_one_query(store: Store) -> None:
    await write(store).keys.create(key("k1"))
    with statements(store) as seen:
        await store.poll(lambda session: session.revisions.get("keys"))
    (statement,) = seen
    assert "FROM revisions" in statement


def replace_file(old: Path, new: Path) -> None:
    new.rename(old)
    for suffix in ("-wal", "-shm"):
        Path(f"{old}{suffix}").unlink(missing_ok=True)


async def test_revision_changes_when_database_file_is_replaced(tmp_path: Path) -> None:
    paths = [tmp_path / "a.db", tmp_path / "b.db"]
    for path in paths:
        async with Store(str(path)) as filled:
            await write(filled).keys.create(key("k1"))
            await asyncio.sleep(0.002)
    async with Store(str(paths[0])) as store:
        first = await read(store).revisions.get("keys")
        replace_file(*paths)
        with contextlib.suppress(StoreUnavailable):  # the first transaction notices the other file
            await read(store).revisions.get("keys")
        assert await read(store).revisions.get("keys") not in (0, first)


async def test_poll_does_not_wait_for_readers(store: Store) -> None:
    await store.open()
    end = threading.Event()
    reading = [asyncio.create_task(store.read(lambda session: end.wait(120))) for _ in range(8)]
    try:
        await asyncio.wait_for(store.poll(lambda session: session.revisions.get("keys")), 60)
        assert not any(each.done() for each in reading)
    finally:
        end.set()
        await asyncio.gather(*reading)


async def test_ids_that_databases_refuse_match_nothing(store: Store) -> None:
    assert await read(store).keys.get("\0\ud800") is None
    assert await write(store).keys.revoke("\0") is None
    assert await read(store).organizations.get("\0") is None


async def test_constraints_and_indexes(store: Store) -> None:
    await store.open()
    with database_of(store).engine.begin() as connection:
        there = inspect(connection)
        assert [each["column_names"] for each in there.get_unique_constraints("api_keys")] == [["digest"]]
        assert [each["referred_table"] for each in there.get_foreign_keys("api_keys")] == ["organizations"]
        columns = {tuple(each["column_names"]) for each in there.get_indexes("usage")}
        assert columns >= {("at", "id"), ("organization", "at", "id")}
