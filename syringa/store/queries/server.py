"""The server's own tables: models configured at run time, change counters and secrets."""

from __future__ import annotations

from sqlalchemy import case, delete, select

from syringa.store.queries.base import Queries
from syringa.store.records import RevisionName, StoredModel
from syringa.store.schema import models, revisions, secrets


class RevisionQueries(Queries):
    """Counters of changes. A process that caches rows compares one number to find out whether its copy is stale."""

    def get(self, name: RevisionName) -> int:
        found = self.connection.execute(select(revisions.c.number).where(revisions.c.name == name)).scalar()
        return int(found or 0)

    def all(self) -> dict[RevisionName, int]:
        """Return all counters. One that is missing is 0."""
        return {row.name: row.number for row in self.connection.execute(select(revisions.c.name, revisions.c.number))}

    def advance(self, name: RevisionName) -> None:
        """Increase a counter, in the transaction that makes the change.

        The number is at least the time in milliseconds, so that a database that was replaced by another one, whose
        counter started anew, is noticed as a change.
        """
        at_least = int(self.now * 1000)
        number = revisions.c.number
        self.upsert(
            revisions,
            {"name": name, "number": at_least},
            {"number": case((number >= at_least, number + 1), else_=at_least)},
        )


class ModelQueries(Queries):
    """Models configured at run time. Every change advances the revision of `models`."""

    def put(self, id: str, definition: str) -> StoredModel:
        """Insert or replace a model. `definition` is JSON."""
        row = StoredModel(id=id, definition=definition, updated_at=int(self.now))
        changes = {"definition": row.definition, "updated_at": row.updated_at}
        self.upsert(models, {"id": id, **changes}, changes)
        RevisionQueries(self.connection, self.now).advance("models")
        return row

    def delete(self, id: str) -> bool:
        """Delete a model. Return whether there was one."""
        if self.connection.execute(delete(models).where(models.c.id == id)).rowcount == 0:
            return False
        RevisionQueries(self.connection, self.now).advance("models")
        return True

    def all(self) -> list[StoredModel]:
        query = select(models).order_by(models.c.updated_at, models.c.id)
        return [StoredModel(**row) for row in self.connection.execute(query).mappings()]

    def snapshot(self) -> tuple[int, list[StoredModel]]:
        """Return all models and their revision."""
        return RevisionQueries(self.connection, self.now).get("models"), self.all()


class SecretQueries(Queries):
    """Keys generated once, and shared by all processes and across restarts."""

    def get(self, name: str) -> str | None:
        found: str | None = self.connection.execute(select(secrets.c.value).where(secrets.c.name == name)).scalar()
        return found

    def insert(self, name: str, value: str) -> str:
        """Store a secret unless there is one of that name, and return the stored one."""
        self.insert_new(secrets, {"name": name, "created_at": int(self.now), "value": value})
        return self.get(name) or value
