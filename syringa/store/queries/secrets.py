"""What the server itself has to remember: keys that it drew once, and that all processes and restarts share."""

from __future__ import annotations

from sqlalchemy import select

from syringa.store.queries.base import Queries
from syringa.store.schema import secrets


class Secrets(Queries):
    def get(self, name: str) -> str | None:
        found: str | None = self.connection.execute(select(secrets.c.value).where(secrets.c.name == name)).scalar()
        return found

    def keep(self, name: str, value: str) -> str:
        """The value that counts: this one, or that of whoever came first."""
        self.insert_new(secrets, {"name": name, "created_at": int(self.now), "value": value})
        return self.get(name) or value
