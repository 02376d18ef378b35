from __future__ import annotations

from typing import Any

import pytest

from syringa.store import Store, UsageFilter, UsageRow, UsageSum
from syringa.store.queries import usage as module
from tests.store.things import inside, statements

DAY = 86400
MIDNIGHT = 20_000 * DAY  # 2024-10-04


def row(at: float = MIDNIGHT, **changes: Any) -> UsageRow:
    given = {"organisation": "acme", "key": "k1", "model": "m", "endpoint": "/v1/completions", "request_id": "r"}
    return UsageRow(at=at, **(given | {"outcome": "ok", "status": 200} | changes))


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


async def test_rows_come_back_newest_first(store: Store) -> None:
    rows = [row(MIDNIGHT + n, **FULL) for n in range(3)] + [row(MIDNIGHT - 1)]
    await store.usage.add(rows)
    await store.usage.add([])
    assert await store.usage.rows() == [rows[2], rows[1], rows[0], rows[3]]


async def test_a_row_that_is_written_twice_counts_once(store: Store) -> None:
    first, second = row(), row()
    await store.usage.add([first])
    await store.usage.add([first, second])
    [total] = await store.usage.sums()
    assert total.requests == 2


async def test_pages(store: Store) -> None:
    rows = [row(MIDNIGHT + n // 3, request_id=str(n)) for n in range(10)]  # several of the same moment
    await store.usage.add(rows)
    seen: list[UsageRow] = []
    after = None
    while page := await store.usage.rows(after=after, limit=4):
        assert len(page) <= 4
        seen += page
        after = page[-1].id
    assert sorted(each.id for each in seen) == sorted(each.id for each in rows)
    assert [each.at for each in seen] == sorted((each.at for each in rows), reverse=True)
    assert await store.usage.rows(after="unknown") == []


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (UsageFilter(), "abcd"),
        (UsageFilter(since=MIDNIGHT), "bcd"),
        (UsageFilter(until=MIDNIGHT), "a"),
        (UsageFilter(since=MIDNIGHT, until=MIDNIGHT + 2), "bc"),
        (UsageFilter(organisation="other"), "d"),
        (UsageFilter(organisation=""), ""),
        (UsageFilter(key="k2"), "c"),
        (UsageFilter(model="n", organisation="acme"), "b"),
    ],
)
async def test_which_rows_count(store: Store, which: UsageFilter, expected: str) -> None:
    await store.usage.add(
        [
            row(MIDNIGHT - 1, request_id="a"),
            row(MIDNIGHT, request_id="b", model="n"),
            row(MIDNIGHT + 1, request_id="c", key="k2"),
            row(MIDNIGHT + 2, request_id="d", organisation="other", model="n"),
        ]
    )
    found = await store.usage.rows(which)
    assert "".join(sorted(each.request_id for each in found)) == expected
    [total] = await store.usage.sums((), which)
    assert total.requests == len(expected)


async def test_sums(store: Store) -> None:
    await store.usage.add(
        [
            row(**FULL),
            row(outcome="cancelled", input_tokens=1, output_tokens=2, cost=0.5),
            row(outcome="refused", status=429, requests=40),
            row(outcome="failed", status=500, cached_tokens=3, reasoning_tokens=5),
        ]
    )
    [total] = await store.usage.sums()
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


async def test_nothing_adds_up_to_nothing(store: Store) -> None:
    assert await store.usage.sums() == [UsageSum()]
    assert await store.usage.sums(["day"]) == []


async def test_days_are_those_of_utc(store: Store) -> None:
    moments = (MIDNIGHT - 0.001, MIDNIGHT, MIDNIGHT + DAY / 2, MIDNIGHT + DAY - 0.001, MIDNIGHT + DAY)
    await store.usage.add([row(at) for at in moments])
    sums = await store.usage.sums(["day"])
    assert [(each.day, each.requests) for each in sums] == [("2024-10-03", 1), ("2024-10-04", 3), ("2024-10-05", 1)]


@pytest.mark.parametrize("by", ["organisation", "key", "model", "endpoint", "user"])
async def test_sums_by_one_thing(store: Store, by: Any) -> None:
    await store.usage.add([row(**{by: value}) for value in ("b", "Z", "b", "ä", "a")])
    sums = await store.usage.sums([by])
    assert [(getattr(each, by), each.requests) for each in sums] == [("Z", 1), ("a", 1), ("b", 2), ("ä", 1)]
    assert all(each.day is None for each in sums)


async def test_sums_by_several(store: Store) -> None:
    await store.usage.add(
        [row(model="b"), row(model="a", user="ada"), row(MIDNIGHT - 1, model="b"), row(model="b"), row(model="a")]
    )
    sums = await store.usage.sums(["day", "model", "user"])
    assert [(each.day, each.model, each.user, each.requests) for each in sums] == [
        ("2024-10-03", "b", None, 1),
        ("2024-10-04", "a", None, 1),
        ("2024-10-04", "a", "ada", 1),
        ("2024-10-04", "b", None, 2),
    ]


async def test_how_models_do(store: Store) -> None:
    timed = {"output_tokens": 11, "first_token_seconds": 1.0, "total_seconds": 3.0}
    await store.usage.add(
        [
            row(MIDNIGHT - 1, **timed),  # too old
            row(MIDNIGHT, **timed),
            row(MIDNIGHT + 1, output_tokens=21, first_token_seconds=2.0, total_seconds=4.0),
            row(MIDNIGHT + 2, output_tokens=1, first_token_seconds=6.0, total_seconds=9.0),  # no later tokens
            row(MIDNIGHT + 3, output_tokens=100),  # never timed
            row(MIDNIGHT + 4, outcome="failed", status=500, **timed),
            row(MIDNIGHT + 5, outcome="cancelled", status=499, **timed),
            row(MIDNIGHT + 6, outcome="refused", status=429, requests=9),
            row(MIDNIGHT + 7, outcome="failed", status=503, model="never", requests=2),
        ]
    )
    m, never = await store.usage.by_model(MIDNIGHT)
    assert (m.model, m.ok, m.failed, m.later_tokens, m.later_seconds) == ("m", 4, 1, 30, 4.0)
    assert (m.first_token_seconds, m.last_at) == (3.0, MIDNIGHT + 6)
    assert (never.ok, never.failed, never.later_tokens, never.later_seconds) == (0, 2, 0, 0.0)
    assert never.first_token_seconds is None
    assert await store.usage.by_model(MIDNIGHT + 8) == []


async def test_expiry_in_chunks(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    await store.usage.add([row(MIDNIGHT + n) for n in range(12)])
    with statements(store) as seen:
        assert await store.usage.expire(MIDNIGHT + 10) == 10
    assert sum(each.startswith("DELETE") for each in seen) == 4
    assert {each.at for each in await store.usage.rows()} == {MIDNIGHT + 10, MIDNIGHT + 11}
    assert await store.usage.expire(MIDNIGHT + 10) == 0


async def test_many_rows_are_one_transaction(store: Store) -> None:
    rows = [row(MIDNIGHT + n) for n in range(5000)]
    await store.open()
    with statements(store) as seen:
        await store.usage.add(rows)
    assert sum(each.startswith("INSERT") for each in seen) <= 20
    [total] = await store.usage.sums()
    assert total.requests == 5000


async def test_one_bad_row_leaves_nothing(store: Store) -> None:
    with pytest.raises(Exception, match="store"):
        await store.usage.add([row(), row(model=None)])
    assert await store.usage.rows() == []


async def test_what_clients_write_is_kept_short_and_clean(store: Store) -> None:
    await store.usage.add([row(user="u" * 10_000, model="a\0b\ud800", request_id="")])
    [kept] = await store.usage.rows()
    assert kept.user == "u" * module.LONGEST_TEXT
    assert kept.model == "a�b?"


async def test_queries_find_an_index(store: Store) -> None:
    """SQLite says how it would go about it; PostgreSQL decides by how much there is."""
    await store.open()
    engine = inside(store).engine
    if engine.dialect.name != "sqlite":
        pytest.skip("its plan depends on the table's size")
    with engine.begin() as connection:
        for where, index in (("at >= 5", "usage_by_time"), ("organisation = 'o' AND at > 5", "usage_by_organisation")):
            query = f"EXPLAIN QUERY PLAN SELECT sum(cost) FROM usage WHERE {where}"
            assert index in str(connection.exec_driver_sql(query).all())
