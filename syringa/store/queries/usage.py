"""What requests cost: a row for each, sums of them, and how each model does."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, get_args

import msgspec
from sqlalchemy import ColumnElement, Integer, Select, and_, case, cast, delete, func, or_, select

from syringa.store.queries.base import Queries
from syringa.store.records import Grouping, ModelUsage, Outcome, UsageFilter, UsageRow, UsageSum
from syringa.store.schema import clean, usage

# Some thousand rows are gone in milliseconds, and others write in between.
CHUNK = 2000
# What a client may have written goes no further than a person would read it.
LONGEST_TEXT = 512

_WRITTEN = ("model", "endpoint", "user", "request_id")
_TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
_DAY_SECONDS = 86400
_COLUMNS = tuple(column.name for column in usage.columns)
_INSERT = "INSERT INTO usage ({}) VALUES ({}) ON CONFLICT DO NOTHING".format(
    ", ".join(f'"{name}"' for name in _COLUMNS), ", ".join("?" * len(_COLUMNS))
)


class Usage(Queries):
    def add(self, rows: Sequence[UsageRow]) -> None:
        """A row that is there already is left out, so a write whose fate is unknown can be made again."""
        values = [_values(row) for row in rows]
        if values and self.connection.dialect.name == "sqlite":
            # Every process does this once a second: as SQL for the driver, it costs half of what it does otherwise.
            self.connection.exec_driver_sql(_INSERT, [tuple([row[name] for name in _COLUMNS]) for row in values])
        else:
            self.insert_missing(usage, values)

    def rows(self, which: UsageFilter, after: str | None, limit: int) -> list[UsageRow]:
        """Newest first. `after`: the id of the last row of the page before."""
        query = _narrow(select(usage), which)
        if after is not None:
            at = select(usage.c.at).where(usage.c.id == after).scalar_subquery()
            query = query.where(or_(usage.c.at < at, and_(usage.c.at == at, usage.c.id < after)))
        query = query.order_by(usage.c.at.desc(), usage.c.id.desc()).limit(limit)
        return [UsageRow(**row) for row in self.connection.execute(query).mappings()]

    def sums(self, by: Collection[Grouping], which: UsageFilter) -> list[UsageSum]:
        """In the order of what they are grouped by. One sum, of all, where that is nothing."""
        groups = {name: self._day() if name == "day" else usage.c[name] for name in by}
        counts = {name: _total(usage.c.requests, usage.c.outcome == name) for name in get_args(Outcome)}
        tokens = {name: _total(usage.c[name]) for name in _TOKENS}
        sums = {"requests": _total(usage.c.requests), **counts, **tokens, "cost": _total(usage.c.cost)}
        query = select(*(each.label(name) for name, each in (groups | sums).items()))
        found = self.connection.execute(_narrow(query, which).group_by(*groups.values())).mappings()
        read = [UsageSum(**{name: _read(name, value) for name, value in row.items()}) for row in found]
        # Here, as databases disagree about the order of text.
        return sorted(read, key=lambda each: [getattr(each, name) or "" for name in groups])

    def by_model(self, since: float) -> list[ModelUsage]:
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
                    later_tokens=int(tokens),
                    later_seconds=float(seconds),
                    first_token_seconds=first,
                    last_at=last,
                )
                for model, ok_count, failed, tokens, seconds, first, last in self.connection.execute(query)
            ),
            key=lambda each: each.model,
        )

    def expire(self, before: float) -> int:
        """Removes one chunk of the oldest rows, and says how many these were."""
        due = select(usage.c.id).where(usage.c.at < before).order_by(usage.c.at).limit(CHUNK)
        # What another process is removing is not waited for.
        gone = delete(usage).where(usage.c.id.in_(due.with_for_update(skip_locked=True)))
        return self.connection.execute(gone).rowcount

    def _day(self) -> ColumnElement[Any]:
        """The number of the day. SQLite may have no floor(), and cuts when it casts; PostgreSQL would round."""
        days = usage.c.at / _DAY_SECONDS
        return func.floor(days) if self.connection.dialect.name == "postgresql" else cast(days, Integer)


def _values(row: UsageRow) -> dict[str, Any]:
    values = msgspec.structs.asdict(row)
    for name in _WRITTEN:
        if values[name] is not None:
            values[name] = clean(values[name][:LONGEST_TEXT])
    for name in ("organisation", "key"):
        values[name] = clean(values[name])
    return values


def _narrow(query: Select[Any], which: UsageFilter) -> Select[Any]:
    for name in ("organisation", "key", "model"):
        if (value := getattr(which, name)) is not None:
            query = query.where(usage.c[name] == value)
    if which.since is not None:
        query = query.where(usage.c.at >= which.since)
    if which.until is not None:
        query = query.where(usage.c.at < which.until)
    return query


def _total(value: ColumnElement[Any], where: ColumnElement[bool] | None = None) -> ColumnElement[Any]:
    return func.coalesce(func.sum(value if where is None else case((where, value))), 0)


def _read(name: str, value: Any) -> Any:
    """PostgreSQL adds whole numbers up to a decimal."""
    if name == "day":
        return datetime.fromtimestamp(int(value) * _DAY_SECONDS, UTC).strftime("%Y-%m-%d")
    if name == "cost":
        return float(value)
    return value if value is None or isinstance(value, str) else int(value)
