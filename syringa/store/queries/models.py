"""Models that were configured at run time. Every change raises the revision of `models`."""

from __future__ import annotations

from sqlalchemy import delete, select

from syringa.store.queries.base import Queries
from syringa.store.queries.revisions import Revisions
from syringa.store.records import ModelRow
from syringa.store.schema import models


class Models(Queries):
    def put(self, id: str, definition: str) -> ModelRow:
        row = ModelRow(id=id, definition=definition, updated_at=int(self.now))
        changes = {"definition": row.definition, "updated_at": row.updated_at}
        self.upsert(models, {"id": id, **changes}, changes)
        Revisions(self.connection, self.now).advance("models")
        return row

    def delete(self, id: str) -> bool:
        if self.connection.execute(delete(models).where(models.c.id == id)).rowcount == 0:
            return False
        Revisions(self.connection, self.now).advance("models")
        return True

    def all(self) -> list[ModelRow]:
        query = select(models).order_by(models.c.updated_at, models.c.id)
        return [ModelRow(**row) for row in self.connection.execute(query).mappings()]
