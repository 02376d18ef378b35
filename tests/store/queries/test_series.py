from __future__ import annotations

import asyncio
from collections.abc import Sequence

from syringa.store import SeriesRow, Store
from syringa.store.queries.series import CHUNK, MERGED
from tests.store.helpers import START, read, write

T = START // 900 * 900


def row(start: int, figures: str = "1", *, resolution: int = 10, model: str = "m", source: str = "a") -> SeriesRow:
    return SeriesRow(resolution, start, model, source, figures)


def add_numbers(existing: str | None, rows: Sequence[SeriesRow]) -> str:
    return str(int(existing or 0) + sum(int(each.figures) for each in rows))


async def all_rows(store: Store) -> list[SeriesRow]:
    found: list[SeriesRow] = await read(store).series.read(0, T + 10**6)
    return sorted(found, key=lambda each: (each.start, each.model, each.source))


async def test_rows_are_read_by_time_and_model(store: Store) -> None:
    await write(store).series.put([row(T), row(T + 10, "2"), row(T + 10, "3", source="b"), row(T, "4", model="n")])
    found = await read(store).series.read(T, T + 10)
    assert {each.figures for each in found} == {"1", "4"}
    found = await read(store).series.read(T, T + 11, "m")
    assert {each.figures for each in found} == {"1", "2", "3"}
    assert await read(store).series.read(T, T + 11, "none") == []


async def test_write_that_is_repeated_replaces_the_row(store: Store) -> None:
    for figures in ("1", "2"):
        await write(store).series.put([row(T, figures)])
    assert await all_rows(store) == [row(T, "2")]


async def test_old_rows_of_all_sources_are_merged(store: Store) -> None:
    fine = [row(T + 10 * index, source=source) for index in range(12) for source in ("a", "b")]
    await write(store).series.put([*fine, row(T, "7", model="n")])
    assert await write(store).series.roll(10, 60, T + 60, add_numbers) == 13
    merged = [row(T, "12", resolution=60, source=MERGED), row(T, "7", resolution=60, model="n", source=MERGED)]
    assert await all_rows(store) == [*merged, *(each for each in fine if each.start >= T + 60)]
    assert await write(store).series.roll(10, 60, T + 60, add_numbers) == 0


async def test_late_row_is_added_to_the_merged_one(store: Store) -> None:
    for figures in ("5", "6"):
        await write(store).series.put([row(T, figures)])
        await write(store).series.roll(10, 60, T + 60, add_numbers)
    assert await all_rows(store) == [row(T, "11", resolution=60, source=MERGED)]


async def test_rows_are_merged_in_chunks(store: Store) -> None:
    await write(store).series.put([row(T + index, source=str(index)) for index in range(CHUNK + 5)])
    counts = [await write(store).series.roll(10, 900, T + 10**4, add_numbers) for _ in range(3)]
    assert counts == [CHUNK, 5, 0]
    assert [each.figures for each in await all_rows(store)] == [str(CHUNK + 5)]


async def test_concurrent_maintenance_counts_nothing_twice(store: Store, database: str) -> None:
    await write(store).series.put([row(T + index % 900, source=str(index)) for index in range(2 * CHUNK)])
    async with Store(database) as other:
        await asyncio.gather(*(write(each).series.roll(10, 900, T + 10**4, add_numbers) for each in (store, other) * 2))
    assert [each.figures for each in await all_rows(store)] == [str(2 * CHUNK)]


async def test_rows_expire(store: Store) -> None:
    await write(store).series.put([row(T - 10), row(T), row(T - 900, resolution=900)])
    assert await write(store).series.expire(T) == 2
    assert await write(store).series.expire(T) == 0
    assert await all_rows(store) == [row(T)]
