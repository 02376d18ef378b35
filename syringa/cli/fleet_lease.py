"""The lease on the decisions about a cluster's replicas, in the database that its servers share."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from syringa.cluster.folder import ClusterFolder
from syringa.config import Config

if TYPE_CHECKING:
    from syringa.store import Store
    from syringa.store.session import Session

T = TypeVar("T")


def cluster_lease(config: Config) -> DatabaseLease:
    """Return the lease on a server's cluster, named after its authority: several clusters may share a database."""
    authority = Path(ClusterFolder(Path(config.cluster_dir)).files("client").ca).read_bytes()
    return DatabaseLease(config.database, f"fleet-{hashlib.sha256(authority).hexdigest()[:16]}")


class DatabaseLease:
    """A `Lease`, used by one thread, which opens the database with its first call. Raises `StoreError`."""

    def __init__(self, database: str, name: str, owner: str = "") -> None:
        """`database`: the setting of that name; `owner`: unique among servers."""
        self._database, self._name = database, name
        self._owner = owner or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._runner: asyncio.Runner | None = None
        self._store: Store | None = None

    def take(self, seconds: float) -> bool:
        return self._write(lambda session: session.leases.take(self._name, self._owner, seconds))

    def release(self) -> None:
        if self._runner is None or self._store is None:
            return
        try:
            self._write(lambda session: session.leases.release(self._name, self._owner))
        finally:
            self._runner.run(self._store.close())
            self._runner.close()
            self._runner = self._store = None

    def _write(self, query: Callable[[Session], T]) -> T:
        from syringa.store import Store

        if self._runner is None or self._store is None:
            self._runner, self._store = asyncio.Runner(), Store(self._database)
        return self._runner.run(self._store.write(query))
