"""Usage records: one per request, sums of them, and statistics per model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
from sqlalchemy import ColumnElement, Integer, Select, and_, case, cast, delete, func, or_, select

from syringa.store.queries.base import Queries
from syringa.store.records import Grouping, ModelUsage, Outcome, UsageFilter, UsageRecord, UsageSum
from syringa.store.schema import clean, usage

# Rows deleted in one transaction: a few milliseconds, after which other writers get their turn.
CHUNK = 2000
# Longer text from clients is cut.
MAX_TEXT_LENGTH = 512

_CLIENT_TEXT = ("model", "endpoint", "user", "request_id")
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_DAY_SECONDS = 86400
_ALL = UsageFilter()
_COLUMNS = tuple(column.name for column in usage.columns)
_INSERT = "INSERT INTO usage ({}) VALUES ({}) ON CONFLICT DO NOTHING".format(
    ", ".join(f'"{name}"' for name in _COLUMNS), ", ".join("?" * len(_COLUMNS))
)


class UsageQueries(Queries):
    def add(self, records: Sequence[UsageRecord]) -> None:
        """Insert records. Existing ids are skipped, so that a write with an unknown outcome can be repeated."""
        values = [_values(record) for record in records]
        if values and self.connection.dialect.name == "sqlite":
            # Every process does this once a second; bypassing statement compilation halves its cost.
            self.connection.exec_driver_sql(_INSERT, [tuple([row[name] for name in _COLUMNS]) for row in values])
        else:
            self.insert_missing(usage, values)

    def records(self, filter: UsageFilter = _ALL, *, after: str | None = None, limit: int = 100) -> list[UsageRecord]:
        """Return records, newest first. `after`: the id of the last record of the previous page."""
        query = _filtered(select(usage), filter)
        if after is not None:
            at = select(usage.c.at).where(usage.c.id == after).scalar_subquery()
            query = query.where(or_(usage.c.at < at, and_(usage.c.at == at, usage.c.id < after)))
        query = query.order_by(usage.c.at.desc(), usage.c.id.desc()).limit(limit)
        return [UsageRecord(**row) for row in self.connection.execute(query).mappings()]

    def sums(self, by: Collection[Grouping] = (), filter: UsageFilter = _ALL) -> list[UsageSum]:
        """Return sums per day (UTC), key, model and so on, sorted by group; one total sum if `by` is empty."""
        groups = {name: self._day() if name == "day" else usage.c[name] for name in by}
        counts = {name: _total(usage.c.requests, usage.c.outcome == name) for name in get_args(Outcome)}
        tokens = {name: _total(usage.c[name]) for name in _TOKENS}
        sums = {"requests": _total(usage.c.requests), **counts, **tokens, "cost": _total(usage.c.cost)}
        query = select(*(each.label(name) for name, each in (groups | sums).items()))
        found = self.connection.execute(_filtered(query, filter).group_by(*groups.values())).mappings()
        sums_read = [UsageSum(**{name: _from_database(name, value) for name, value in row.items()}) for row in found]
        # Sorted here, because databases collate text differently.
        return sorted(sums_read, key=lambda each: [getattr(each, name) or "" for name in groups])

    def by_model(self, since: float) -> list[ModelUsage]:
        """Return statistics of each model with requests since `since`. This reads every such row."""
        ok = usage.c.outcome == "ok"
        timed = and_(ok, usage.c.output_tokens >= 2, usage.c.first_token_seconds.is_not(None))
        query = (
            select(
                usage.c.model,
                _total(usage.c.requests, ok),
                _total(usage.c.requests, usage.c.outcome == "failed"),
                _total(usage.c.output_tokens - 1, timed),
                _total(usage.c.total_seconds - usage.c.first_token_seconds, timed),
                func.avg(case((ok, usage.c.first_token_seconds))),
                func.max(usage.c.at),
            )
            .where(usage.c.at >= since)
            .group_by(usage.c.model)
        )
        return sorted(
            (
                ModelUsage(
                    model=model,
                    ok=int(ok_count),
                    failed=int(failed),
                    decode_tokens=int(tokens),
                    decode_seconds=float(seconds),
                    first_token_seconds=first,
                    last_at=last,
                )
                for model, ok_count, failed, tokens, seconds, first, last in self.connection.execute(query)
            ),
            key=lambda each: each.model,
        )

    def expire(self, before: float) -> int:
        """Delete one chunk of the oldest records before `before`, and return their number."""
        due = select(usage.c.id).where(usage.c.at < before).order_by(usage.c.at).limit(CHUNK)
        # Skip rows that another process is deleting.
        statement = delete(usage).where(usage.c.id.in_(due.with_for_update(skip_locked=True)))
        return self.connection.execute(statement).rowcount

    def _day(self) -> ColumnElement[Any]:
        """The number of the day. SQLite may lack floor() and truncates in a cast; PostgreSQL would round."""
        days = usage.c.at / _DAY_SECONDS
        return func.floor(days) if self.connection.dialect.name == "postgresql" else cast(days, Integer)


def _values(record: UsageRecord) -> dict[str, Any]:
    values = msgspec.structs.asdict(record)
    for name in _CLIENT_TEXT:
        if values[name] is not None:
            values[name] = clean(values[name][:MAX_TEXT_LENGTH])
    for name in ("organization", "key"):
        values[name] = clean(values[name])
    return values


def _filtered(query: Select[Any], filter: UsageFilter) -> Select[Any]:
    for name in ("organization", "key", "model"):
        if (value := getattr(filter, name)) is not None:
            query = query.where(usage.c[name] == value)
    if filter.since is not None:
        query = query.where(usage.c.at >= filter.since)
    if filter.until is not None:
        query = query.where(usage.c.at < filter.until)
    return query


def _total(value: ColumnElement[Any], where: ColumnElement[bool] | None = None) -> ColumnElement[Any]:
    return func.coalesce(func.sum(value if where is None else case((where, value))), 0)


def _from_database(name: str, value: Any) -> Any:
    """Convert a value of a sum. PostgreSQL sums integers to a decimal."""
    if name == "day":
        return datetime.fromtimestamp(int(value) * _DAY_SECONDS, UTC).strftime("%Y-%m-%d")
    if name == "cost":
        return float(value)
    return value if value is None or isinstance(value, str) else int(value)
