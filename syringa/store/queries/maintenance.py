"""Queries of the server's maintenance tasks: expiry, heartbeats and orphaned responses, for all organizations."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import delete, or_, select, tuple_, update

from syringa.store.queries.base import Queries
from syringa.store.records import ResponseKey
from syringa.store.schema import batches, conversations, responses

# Small, because deleting a response deletes thousands of events, and other writers wait meanwhile.
CHUNK = 20


class MaintenanceQueries(Queries):
    def expire(self, now: float) -> int:
        """Delete one chunk of what has expired, and return the number of rows."""
        count = 0
        for table in (responses, conversations, batches):
            key = tuple_(table.c.organization, table.c.id)
            due = select(table.c.organization, table.c.id).where(table.c.expires_at <= now).limit(CHUNK)
            # Skip rows that another process is deleting.
            keys = [tuple(row) for row in self.connection.execute(due.with_for_update(skip_locked=True))]
            if keys:
                count += self.connection.execute(delete(table).where(key.in_(keys))).rowcount
        return count

    def heartbeat(self, process: str) -> list[ResponseKey]:
        """Record that a process is alive, and return the responses that it still runs.

        A response of that process that is not among them was cancelled or deleted.
        """
        self.connection.execute(update(responses).where(responses.c.process == process).values(heartbeat=self.now))
        query = select(responses.c.organization, responses.c.id).where(responses.c.process == process)
        return [ResponseKey(organization, id) for organization, id in self.connection.execute(query)]

    def processes(self) -> list[str]:
        """Return the identities of all processes that run responses."""
        query = select(responses.c.process).where(responses.c.process.is_not(None)).distinct()
        return list(self.connection.execute(query).scalars())

    def fail_orphans(
        self, exited: Collection[str], silent_since: float | None, message: str, only: ResponseKey | None = None
    ) -> list[ResponseKey]:
        """Fail one chunk of the responses whose process has exited, or sent no heartbeat since `silent_since`.

        Rows locked by another process are skipped, unless `only` one response is asked for.
        """
        orphaned: list[Any] = [responses.c.process.in_(exited)]
        if silent_since is not None:
            orphaned.append(responses.c.heartbeat < silent_since)
        query = (
            select(responses.c.organization, responses.c.id, responses.c.body)
            .where(responses.c.process.is_not(None), or_(*orphaned))
            .limit(CHUNK)
            .with_for_update(skip_locked=only is None)
        )
        if only is not None:
            query = query.where(responses.c.organization == only.organization, responses.c.id == only.id)
        failed = []
        for organization, id, body in self.connection.execute(query).all():
            change = update(responses).where(responses.c.organization == organization, responses.c.id == id)
            values = {"status": "failed", "process": None, "heartbeat": None, "body": _failed_body(body, message)}
            self.connection.execute(change.values(**values))
            failed.append(ResponseKey(organization, id))
        return failed


def _failed_body(body: str, message: str) -> str:
    response = msgspec.json.decode(body, type=dict[str, Any])
    response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    return msgspec.json.encode(response).decode()
