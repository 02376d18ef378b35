"""The base class of all queries: a connection inside a transaction, and helpers for conditions and inserts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Insert, LargeBinary, Table, and_, cast, func, or_
from sqlalchemy.dialects import postgresql, sqlite

T = TypeVar("T")

_BATCH = 500  # values in one IN (…); both databases have a limit


class Queries:
    """A group of queries. Each is a method that runs in the caller's transaction."""

    def __init__(self, connection: Connection, now: float) -> None:
        """`now`: the time at which the transaction began."""
        self.connection = connection
        self.now = now

    def visible(self, table: Table, organization: str, id: str) -> ColumnElement[bool]:
        """Match the row with this id, if it belongs to the organization and has not expired."""
        return and_(table.c.organization == organization, table.c.id == id, self.not_expired(table))

    def not_expired(self, table: Any) -> ColumnElement[bool]:
        """Match rows that have not expired. Expired rows are hidden at once, and deleted later by `expire`."""
        return or_(table.c.expires_at.is_(None), table.c.expires_at > self.now)

    def insert_new(self, table: Table, row: dict[str, Any]) -> bool:
        """Insert a row unless its key exists. Return whether it was inserted."""
        counted = {"preserve_rowcount": True}  # by default SQLAlchemy keeps the count of updates and deletes only
        return self.connection.execute(self._insert(table), row, execution_options=counted).rowcount > 0

    def insert_missing(self, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Insert the rows whose keys do not exist yet."""
        if rows:
            self.connection.execute(self._insert(table), rows)

    def upsert(self, table: Table, row: dict[str, Any], changes: dict[str, Any]) -> None:
        """Insert a row, or apply `changes` to the one with its key."""
        statement = self._dialect.insert(table).values(row)
        self.connection.execute(statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changes))

    def measure(self, item: Any) -> tuple[ColumnElement[int], ColumnElement[int]]:
        """Return the columns of a `ListSize`, given the column of items. The items themselves are not loaded."""
        if self.connection.dialect.name == "postgresql":
            size = func.octet_length(item)
        else:
            size = func.length(cast(item, LargeBinary))  # of a text, SQLite returns the number of characters
        return func.count(item), func.coalesce(func.sum(size), 0)

    def _insert(self, table: Table) -> Insert:
        statement: Insert = self._dialect.insert(table).on_conflict_do_nothing()
        return statement

    @property
    def _dialect(self) -> Any:
        return postgresql if self.connection.dialect.name == "postgresql" else sqlite


def batches(values: Iterable[T]) -> Iterator[list[T]]:
    """Split values into lists that fit into one IN (…)."""
    left = list(values)
    while left:
        yield left[:_BATCH]
        left = left[_BATCH:]
