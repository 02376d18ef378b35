"""A number for each thing that other processes keep a copy of: one cheap query tells them whether theirs is old."""

from __future__ import annotations

from sqlalchemy import case, select

from syringa.store.queries.base import Queries
from syringa.store.records import Revised
from syringa.store.schema import revisions


class Revisions(Queries):
    def get(self, name: Revised) -> int:
        found = self.connection.execute(select(revisions.c.number).where(revisions.c.name == name)).scalar()
        return int(found or 0)

    def all(self) -> dict[str, int]:
        found = self.connection.execute(select(revisions.c.name, revisions.c.number))
        return {name: int(number) for name, number in found}

    def advance(self, name: Revised) -> None:
        """Belongs at the end of the transaction that changes something: whoever sees the number sees the change.

        It grows, and is at least the time in milliseconds. So a database that takes another's place, which began to
        count anew, has a different number, and is noticed.
        """
        at_least = int(self.now * 1000)
        number = revisions.c.number
        self.upsert(
            revisions,
            {"name": name, "number": at_least},
            {"number": case((number >= at_least, number + 1), else_=at_least)},
        )
