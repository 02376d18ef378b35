"""Leases: of several servers with one database, one at a time does something, such as deciding on replicas."""

from __future__ import annotations

from sqlalchemy import delete, or_, select

from syringa.store.queries.base import Queries
from syringa.store.schema import leases


class LeaseQueries(Queries):
    """A lease has an owner until it expires. The clocks of servers that share one must agree to a second or so."""

    def take(self, name: str, owner: str, seconds: float) -> bool:
        """Take a lease that is free or has expired, or renew one's own. Return whether `owner` has it now."""
        row = {"name": name, "owner": owner, "expires_at": self.now + seconds}
        changes = {"owner": owner, "expires_at": row["expires_at"]}
        statement = self._dialect.insert(leases).values(row)
        free = or_(leases.c.owner == owner, leases.c.expires_at <= self.now)
        self.connection.execute(statement.on_conflict_do_update(index_elements=["name"], set_=changes, where=free))
        return self.owner(name) == owner

    def owner(self, name: str) -> str | None:
        """Return the owner of a lease; None if it is free or has expired."""
        query = select(leases.c.owner).where(leases.c.name == name, leases.c.expires_at > self.now)
        found: str | None = self.connection.execute(query).scalar()
        return found

    def owners(self, prefix: str) -> list[str]:
        """Return the owners of the leases whose names begin with `prefix`. Of these, delete what has expired."""
        named = leases.c.name.startswith(prefix, autoescape=True)
        self.connection.execute(delete(leases).where(named, leases.c.expires_at <= self.now))
        return list(self.connection.execute(select(leases.c.owner).where(named)).scalars())

    def release(self, name: str, owner: str) -> None:
        """Free a lease, if `owner` has it."""
        self.connection.execute(delete(leases).where(leases.c.name == name, leases.c.owner == owner))
