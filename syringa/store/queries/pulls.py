"""Downloads of models, as all processes see them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import delete, func, select, update

from syringa.store.queries.base import Queries
from syringa.store.records import StoredPull
from syringa.store.schema import pulls


class PullQueries(Queries):
    def create(self, pull: StoredPull, abandoned: Collection[str] = ()) -> StoredPull:
        """Insert a pull, and return it; or the one that runs already for the same model and id.

        `abandoned`: ids of those that do not run, whatever their status is.
        """
        if self.connection.dialect.name == "postgresql":
            self.connection.execute(select(func.pg_advisory_xact_lock(func.hashtext("syringa pulls"))))
        same = select(pulls).where(
            pulls.c.model == pull.model,
            pulls.c.serve_as == pull.serve_as,
            pulls.c.status == "running",
            pulls.c.cancel.is_(False),
            pulls.c.id.not_in(abandoned),
        )
        if (found := self.connection.execute(same).mappings().first()) is not None:
            return StoredPull(**found)
        self.connection.execute(pulls.insert(), msgspec.structs.asdict(pull))
        return pull

    def get(self, id: str) -> StoredPull | None:
        found = self.connection.execute(select(pulls).where(pulls.c.id == id)).mappings().first()
        return None if found is None else StoredPull(**found)

    def all(self) -> list[StoredPull]:
        """Return all pulls, the newest first."""
        query = select(pulls).order_by(pulls.c.created_at.desc(), pulls.c.id)
        return [StoredPull(**row) for row in self.connection.execute(query).mappings()]

    def update(self, id: str, **values: Any) -> bool:
        """Change a pull that is running. Return whether it is to go on: it is there, and not to be canceled."""
        change = update(pulls).where(pulls.c.id == id, pulls.c.status == "running")
        self.connection.execute(change.values(**values, updated_at=self.now))
        found = self.get(id)
        return found is not None and not found.cancel

    def cancel(self, id: str) -> StoredPull | None:
        """Ask the process that runs a pull to cancel it. Return the pull; None if there is none."""
        self.connection.execute(update(pulls).where(pulls.c.id == id).values(cancel=True))
        return self.get(id)

    def delete(self, id: str) -> bool:
        return self.connection.execute(delete(pulls).where(pulls.c.id == id)).rowcount > 0

    def expire(self, before: float) -> int:
        """Delete pulls that were last updated before `before`, and return their number."""
        return self.connection.execute(delete(pulls).where(pulls.c.updated_at < before)).rowcount
