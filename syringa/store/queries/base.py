"""What all groups of queries have: a connection inside a transaction, and the time at which it began."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Insert, Table, and_, or_
from sqlalchemy.dialects import postgresql, sqlite

T = TypeVar("T")

_BATCH = 500  # values in one IN (…); both databases have a limit


class Queries:
    """A group of queries. Each is a method that runs in the caller's transaction."""

    def __init__(self, connection: Connection, now: float) -> None:
        self.connection = connection
        self.now = now

    def visible(self, table: Table, organisation: str, id: str) -> ColumnElement[bool]:
        """The one row with this id, unless it belongs to others or has expired."""
        return and_(table.c.organisation == organisation, table.c.id == id, self.lasting(table))

    def lasting(self, table: Any) -> ColumnElement[bool]:
        """What has expired is gone for every reader, also before `expire` removes it."""
        return or_(table.c.expires_at.is_(None), table.c.expires_at > self.now)

    def insert_new(self, table: Table, row: dict[str, Any]) -> bool:
        """Adds a row unless its key is there already, and says whether it did."""
        counted = {"preserve_rowcount": True}  # SQLAlchemy looks at the count of updates and deletes only
        return self.connection.execute(self._insert(table), row, execution_options=counted).rowcount > 0

    def insert_missing(self, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Adds those rows whose keys are not there yet."""
        if rows:
            self.connection.execute(self._insert(table), rows)

    def upsert(self, table: Table, row: dict[str, Any], changes: dict[str, Any]) -> None:
        """Adds a row, or makes the changes to the one that has its key."""
        statement = self._dialect.insert(table).values(row)
        self.connection.execute(statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=changes))

    def _insert(self, table: Table) -> Insert:
        statement: Insert = self._dialect.insert(table).on_conflict_do_nothing()
        return statement

    @property
    def _dialect(self) -> Any:
        return postgresql if self.connection.dialect.name == "postgresql" else sqlite


def batches(values: Iterable[T]) -> Iterator[list[T]]:
    left = list(values)
    while left:
        yield left[:_BATCH]
        left = left[_BATCH:]
