"""What the servers of a cluster agree on, in the database that they share."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from syringa.cluster.folder import ClusterFolder
from syringa.config import Config
from syringa.fleet.cluster_records import Renewal

if TYPE_CHECKING:
    from syringa.store import Store
    from syringa.store.session import Session

T = TypeVar("T")


def cluster_records(config: Config) -> DatabaseRecords:
    """Return the records of a server's cluster, named after its authority: several clusters may share a database."""
    authority = Path(ClusterFolder(Path(config.cluster_dir)).files("client").ca).read_bytes()
    return DatabaseRecords(config.database, f"fleet-{hashlib.sha256(authority).hexdigest()[:16]}")


class DatabaseRecords:
    """`ClusterRecords`, used by one thread, which opens the database with its first call. Raises `StoreError`.

    Each server has a lease of its own, which says that it is there, beside the one lease on decisions.
    """

    def __init__(self, database: str, cluster: str, server: str = "") -> None:
        """`database`: the setting of that name; `server`: unique among servers."""
        self._database, self._cluster = database, cluster
        self._server = server or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._members = f"{cluster}/"  # with which the names of their leases begin
        self._runner: asyncio.Runner | None = None
        self._store: Store | None = None

    def renew(self, seconds: float, changes: Mapping[str, bool | None]) -> Renewal:
        def query(session: Session) -> Renewal:
            for pool, open in changes.items():
                session.pools.override(self._cluster, pool, open)
            session.leases.take(self._members + self._server, self._server, seconds)
            decides = session.leases.take(self._cluster, self._server, seconds)
            return Renewal(decides, session.pools.overrides(self._cluster))

        return self._write(query)

    def leave(self, seconds: float) -> bool:
        # Two transactions: of servers that leave at the same time, one looks when all of them have left.
        self._write(lambda session: session.leases.release(self._members + self._server, self._server))
        return self._write(lambda session: self._has_others(session, seconds))

    def _has_others(self, session: Session, seconds: float) -> bool:
        if session.leases.owners(self._members):
            session.leases.release(self._cluster, self._server)
            return True
        session.leases.take(self._cluster, self._server, seconds)
        return False

    def close(self) -> None:
        if self._runner is None or self._store is None:
            return
        try:
            self._write(lambda session: session.leases.release(self._cluster, self._server))
        finally:
            self._runner.run(self._store.close())
            self._runner.close()
            self._runner = self._store = None

    def _write(self, query: Callable[[Session], T]) -> T:
        from syringa.store import Store

        if self._runner is None or self._store is None:
            self._runner, self._store = asyncio.Runner(), Store(self._database)
        return self._runner.run(self._store.write(query))
