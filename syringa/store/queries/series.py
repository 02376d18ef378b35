"""Figures over time: rows of a model, an interval and the process that counted, merged into longer intervals later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from sqlalchemy import delete, func, select, tuple_

from syringa.store.queries.base import Queries, batches
from syringa.store.records import SeriesRow
from syringa.store.schema import series

# Rows that are merged or deleted in one transaction, after which other writers get their turn.
CHUNK = 500
MERGED = ""  # the source of merged rows

Merge = Callable[[str | None, Sequence[SeriesRow]], str]
"""Returns the figures of an interval, given its own so far and rows of shorter intervals in it."""


class SeriesQueries(Queries):
    def put(self, rows: Sequence[SeriesRow]) -> None:
        """Insert rows, or replace the figures of those that exist, so that a write can be repeated."""
        for row in rows:
            self.upsert(series, msgspec.structs.asdict(row), {"figures": row.figures})

    def read(self, since: int, until: int, model: str | None = None) -> list[SeriesRow]:
        """Return the rows of all intervals that begin at `since` or later and before `until`."""
        query = select(series).where(series.c.start >= since, series.c.start < until)
        if model is not None:
            query = query.where(series.c.model == model)
        return [SeriesRow(**row) for row in self.connection.execute(query).mappings()]

    def roll(self, fine: int, coarse: int, before: int, merge: Merge) -> int:
        """Merge one chunk of rows with the resolution `fine` that begin before `before`, and return their number."""
        if self.connection.dialect.name == "postgresql":
            self.connection.execute(select(func.pg_advisory_xact_lock(func.hashtext("syringa series"))))
        query = (
            select(series)
            .where(series.c.resolution == fine, series.c.start < before)
            .order_by(series.c.start, series.c.model, series.c.source)
            .limit(CHUNK)
        )
        rows = [SeriesRow(**row) for row in self.connection.execute(query).mappings()]
        groups: dict[tuple[int, str], list[SeriesRow]] = {}
        for row in rows:
            groups.setdefault((row.start // coarse * coarse, row.model), []).append(row)
        for (start, model), group in groups.items():
            existing = self.connection.execute(
                select(series.c.figures).filter_by(resolution=coarse, start=start, model=model, source=MERGED)
            ).scalar()
            self.put([SeriesRow(coarse, start, model, MERGED, merge(existing, group))])
        key = tuple_(series.c.resolution, series.c.start, series.c.model, series.c.source)
        for batch in batches([(row.resolution, row.start, row.model, row.source) for row in rows]):
            self.connection.execute(delete(series).where(key.in_(batch)))
        return len(rows)

    def expire(self, before: int) -> int:
        """Delete one chunk of the rows of intervals that began before `before`, and return their number."""
        key = tuple_(series.c.resolution, series.c.start, series.c.model, series.c.source)
        due = select(series.c.resolution, series.c.start, series.c.model, series.c.source)
        found = self.connection.execute(due.where(series.c.start < before).limit(CHUNK // 4)).all()
        if found:
            self.connection.execute(delete(series).where(key.in_([tuple(row) for row in found])))
        return len(found)
