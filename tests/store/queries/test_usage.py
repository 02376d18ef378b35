from __future__ import annotations

from typing import Any

import pytest

from syringa.store import Store, UsageFilter, UsageRecord, UsageSum
from syringa.store.queries import usage as module
from tests.store.helpers import database_of, read, statements, write

DAY = 86400
MIDNIGHT = 20_000 * DAY  # 2024-10-04


def record(at: float = MIDNIGHT, **changes: Any) -> UsageRecord:
    given = {"organization": "acme", "key": "k1", "model": "m", "endpoint": "/v1/completions", "request_id": "r"}
    return UsageRecord(at=at, **(given | {"outcome": "ok", "status": 200} | changes))


FULL: dict[str, Any] = {
    "user": "ada",
    "requests": 3,
    "input_tokens": 10,
    "cached_tokens": 4,
    "output_tokens": 2**40,
    "reasoning_tokens": 1,
    "queue_seconds": 0.25,
    "load_seconds": 1.5,
    "first_token_seconds": 2.125,
    "total_seconds": 4.0,
    "cost": 0.1,
}


async def test_records_newest_first(store: Store) -> None:
    rows = [record(MIDNIGHT + n, **FULL) for n in range(3)] + [record(MIDNIGHT - 1)]
    await write(store).usage.add(rows)
    await write(store).usage.add([])
    assert await read(store).usage.records() == [rows[2], rows[1], rows[0], rows[3]]


async def test_record_written_twice_counts_once(store: Store) -> None:
    first, second = record(), record()
    await write(store).usage.add([first])
    await write(store).usage.add([first, second])
    [total] = await read(store).usage.sums()
    assert total.requests == 2


async def test_records_pages(store: Store) -> None:
    rows = [record(MIDNIGHT + n // 3, request_id=str(n)) for n in range(10)]  # several of the same moment
    await write(store).usage.add(rows)
    seen: list[UsageRecord] = []
    after = None
    while page := await read(store).usage.records(after=after, limit=4):
        assert len(page) <= 4
        seen += page
        after = page[-1].id
    assert sorted(each.id for each in seen) == sorted(each.id for each in rows)
    assert [each.at for each in seen] == sorted((each.at for each in rows), reverse=True)
    assert await read(store).usage.records(after="unknown") == []


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (UsageFilter(), "abcd"),
        (UsageFilter(since=MIDNIGHT), "bcd"),
        (UsageFilter(until=MIDNIGHT), "a"),
        (UsageFilter(since=MIDNIGHT, until=MIDNIGHT + 2), "bc"),
        (UsageFilter(organization="other"), "d"),
        (UsageFilter(organization=""), ""),
        (UsageFilter(key="k2"), "c"),
        (UsageFilter(model="n", organization="acme"), "b"),
    ],
)
async def test_usage_filter(store: Store, which: UsageFilter, expected: str) -> None:
    await write(store).usage.add(
        [
            record(MIDNIGHT - 1, request_id="a"),
            record(MIDNIGHT, request_id="b", model="n"),
            record(MIDNIGHT + 1, request_id="c", key="k2"),
            record(MIDNIGHT + 2, request_id="d", organization="other", model="n"),
        ]
    )
    found = await read(store).usage.records(which)
    assert "".join(sorted(each.request_id for each in found)) == expected
    [total] = await read(store).usage.sums((), which)
    assert total.requests == len(expected)


async def test_sums_of_all_columns(store: Store) -> None:
    await write(store).usage.add(
        [
            record(**FULL),
            record(outcome="cancelled", input_tokens=1, output_tokens=2, cost=0.5),
            record(outcome="refused", status=429, requests=40),
            record(outcome="failed", status=500, cached_tokens=3, reasoning_tokens=5),
        ]
    )
    [total] = await read(store).usage.sums()
    assert total == UsageSum(
        requests=45,
        ok=3,
        cancelled=1,
        refused=40,
        failed=1,
        input_tokens=11,
        cached_tokens=7,
        output_tokens=2**40 + 2,
        reasoning_tokens=6,
        cost=0.6,
    )
    assert all(type(getattr(total, name)) is int for name in ("requests", "ok", "input_tokens"))


async def test_sums_of_no_records(store: Store) -> None:
    assert await read(store).usage.sums() == [UsageSum()]
    assert await read(store).usage.sums(["day"]) == []


async def test_sums_by_utc_day(store: Store) -> None:
    moments = (MIDNIGHT - 0.001, MIDNIGHT, MIDNIGHT + DAY / 2, MIDNIGHT + DAY - 0.001, MIDNIGHT + DAY)
    await write(store).usage.add([record(at) for at in moments])
    sums = await read(store).usage.sums(["day"])
    assert [(each.day, each.requests) for each in sums] == [("2024-10-03", 1), ("2024-10-04", 3), ("2024-10-05", 1)]


@pytest.mark.parametrize("by", ["organization", "key", "model", "endpoint", "user"])
async def test_sums_by_one_group(store: Store, by: Any) -> None:
    await write(store).usage.add([record(**{by: value}) for value in ("b", "Z", "b", "ä", "a")])
    sums = await read(store).usage.sums([by])
    assert [(getattr(each, by), each.requests) for each in sums] == [("Z", 1), ("a", 1), ("b", 2), ("ä", 1)]
    assert all(each.day is None for each in sums)


async def test_sums_by_several_groups(store: Store) -> None:
    await write(store).usage.add(
        [
            record(model="b"),
            record(model="a", user="ada"),
            record(MIDNIGHT - 1, model="b"),
            record(model="b"),
            record(model="a"),
        ]
    )
    sums = await read(store).usage.sums(["day", "model", "user"])
    assert [(each.day, each.model, each.user, each.requests) for each in sums] == [
        ("2024-10-03", "b", None, 1),
        ("2024-10-04", "a", None, 1),
        ("2024-10-04", "a", "ada", 1),
        ("2024-10-04", "b", None, 2),
    ]


async def test_usage_by_model(store: Store) -> None:
    timed = {"output_tokens": 11, "first_token_seconds": 1.0, "total_seconds": 3.0}
    await write(store).usage.add(
        [
            record(MIDNIGHT - 1, **timed),  # too old
            record(MIDNIGHT, **timed),
            record(MIDNIGHT + 1, output_tokens=21, first_token_seconds=2.0, total_seconds=4.0),
            record(MIDNIGHT + 2, output_tokens=1, first_token_seconds=6.0, total_seconds=9.0),  # no later tokens
            record(MIDNIGHT + 3, output_tokens=100),  # never timed
            record(MIDNIGHT + 4, outcome="failed", status=500, **timed),
            record(MIDNIGHT + 5, outcome="cancelled", status=499, **timed),
            record(MIDNIGHT + 6, outcome="refused", status=429, requests=9),
            record(MIDNIGHT + 7, outcome="failed", status=503, model="never", requests=2),
        ]
    )
    m, never = await read(store).usage.by_model(MIDNIGHT)
    assert (m.model, m.ok, m.failed, m.decode_tokens, m.decode_seconds) == ("m", 4, 1, 30, 4.0)
    assert (m.first_token_seconds, m.last_at) == (3.0, MIDNIGHT + 6)
    assert (never.ok, never.failed, never.decode_tokens, never.decode_seconds) == (0, 2, 0, 0.0)
    assert never.first_token_seconds is None
    assert await read(store).usage.by_model(MIDNIGHT + 8) == []


async def test_expire_usage_deletes_in_chunks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    await write(store).usage.add([record(MIDNIGHT + n) for n in range(12)])
    with statements(store) as seen:
        assert await store.expire_usage(MIDNIGHT + 10) == 10
    assert sum(each.startswith("DELETE") for each in seen) == 4
    assert {each.at for each in await read(store).usage.records()} == {MIDNIGHT + 10, MIDNIGHT + 11}
    assert await store.expire_usage(MIDNIGHT + 10) == 0


async def test_many_records_are_one_transaction(store: Store) -> None:
    rows = [record(MIDNIGHT + n) for n in range(5000)]
    await store.open()
    with statements(store) as seen:
        await write(store).usage.add(rows)
    assert sum(each.startswith("INSERT") for each in seen) <= 20
    [total] = await read(store).usage.sums()
    assert total.requests == 5000


async def test_add_is_atomic(store: Store) -> None:
    with pytest.raises(Exception, match="rejected"):
        await write(store).usage.add([record(), record(model=None)])
    assert await read(store).usage.records() == []


async def test_client_text_is_cut_and_cleaned(store: Store) -> None:
    await write(store).usage.add([record(user="u" * 10_000, model="a\0b\ud800", request_id="")])
    [stored] = await read(store).usage.records()
    assert stored.user == "u" * module.MAX_TEXT_LENGTH
    assert stored.model == "a�b?"


async def test_usage_queries_use_indexes(store: Store) -> None:
    """Only on SQLite: the plan of PostgreSQL depends on the size of the table."""
    await store.open()
    engine = database_of(store).engine
    if engine.dialect.name != "sqlite":
        pytest.skip("the plan depends on the table's size")
    with engine.begin() as connection:
        for where, index in (("at >= 5", "usage_by_time"), ("organization = 'o' AND at > 5", "usage_by_organization")):
            query = f"EXPLAIN QUERY PLAN SELECT sum(cost) FROM usage WHERE {where}"
            assert index in str(connection.exec_driver_sql(query).all())
