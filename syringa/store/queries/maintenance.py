"""What is done to the whole store from time to time, whatever the organisation: it is the server's, not a client's."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import delete, or_, select, tuple_, update

from syringa.store.queries.base import Queries
from syringa.store.records import Running
from syringa.store.schema import conversations, responses

# A response may have thousands of events, which go with it: few at a time, so that no writer waits long.
CHUNK = 20


class Upkeep(Queries):
    def expire(self, now: float) -> int:
        """Removes one chunk of what has expired, and says how much that was."""
        count = 0
        for table in (responses, conversations):
            key = tuple_(table.c.organisation, table.c.id)
            due = select(table.c.organisation, table.c.id).where(table.c.expires_at <= now).limit(CHUNK)
            # What another process is removing is not waited for.
            keys = [tuple(row) for row in self.connection.execute(due.with_for_update(skip_locked=True))]
            if keys:
                count += self.connection.execute(delete(table).where(key.in_(keys))).rowcount
        return count

    def heartbeat(self, owner: str) -> list[Running]:
        self.connection.execute(update(responses).where(responses.c.owner == owner).values(heartbeat=self.now))
        query = select(responses.c.organisation, responses.c.id).where(responses.c.owner == owner)
        return [Running(organisation, id) for organisation, id in self.connection.execute(query)]

    def owners(self) -> list[str]:
        query = select(responses.c.owner).where(responses.c.owner.is_not(None)).distinct()
        return list(self.connection.execute(query).scalars())

    def fail_orphans(
        self, gone: Collection[str], silent_since: float | None, message: str, only: Running | None = None
    ) -> list[Running]:
        """Ends one chunk of the responses whose process is gone, or was not heard of since then.

        What another has at hand is left to it; but `only` one is waited for.
        """
        lost: list[Any] = [responses.c.owner.in_(gone)]
        if silent_since is not None:
            lost.append(responses.c.heartbeat < silent_since)
        query = (
            select(responses.c.organisation, responses.c.id, responses.c.body)
            .where(responses.c.owner.is_not(None), or_(*lost))
            .limit(CHUNK)
            .with_for_update(skip_locked=only is None)
        )
        if only is not None:
            query = query.where(responses.c.organisation == only.organisation, responses.c.id == only.id)
        failed = []
        for organisation, id, body in self.connection.execute(query).all():
            change = update(responses).where(responses.c.organisation == organisation, responses.c.id == id)
            ended = {"status": "failed", "owner": None, "heartbeat": None, "body": _failed(body, message)}
            self.connection.execute(change.values(**ended))
            failed.append(Running(organisation, id))
        return failed


def _failed(body: str, message: str) -> str:
    response = msgspec.json.decode(body, type=dict[str, Any])
    response |= {"status": "failed", "error": {"code": "server_error", "message": message}}
    return msgspec.json.encode(response).decode()
