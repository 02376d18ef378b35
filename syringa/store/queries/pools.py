"""Pools that operators have opened or closed, for all servers of a cluster."""

from __future__ import annotations

from sqlalchemy import delete, select

from syringa.store.queries.base import Queries
from syringa.store.schema import pool_overrides


class PoolQueries(Queries):
    def overrides(self, cluster: str) -> dict[str, bool]:
        """Return the pools of a cluster that do not follow their schedules: whether each one is open."""
        table = pool_overrides
        rows = self.connection.execute(select(table.c.pool, table.c.open).where(table.c.cluster == cluster))
        return {row.pool: row.open for row in rows}

    def override(self, cluster: str, pool: str, open: bool | None) -> None:
        """Open or close a pool; None: let it follow its schedule."""
        table = pool_overrides
        if open is None:
            self.connection.execute(delete(table).where(table.c.cluster == cluster, table.c.pool == pool))
        else:
            self.upsert(table, {"cluster": cluster, "pool": pool, "open": open}, {"open": open})
