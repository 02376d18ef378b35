"""The stored events of a background response's stream, from which a client can resume."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from syringa.store.queries.base import Queries
from syringa.store.records import StoredEvent
from syringa.store.schema import response_events, responses

_MAX_SEQUENCE = 2**63 - 1


class EventQueries(Queries):
    def append(self, organization: str, id: str, events: Sequence[StoredEvent]) -> bool:
        """Append events to a response's stream. Return False if the response is gone.

        An event whose number exists is left as it is, so that a batch with an unknown outcome can be sent again.
        """
        exists = select(1).where(self.visible(responses, organization, id)).with_for_update(read=True, key_share=True)
        if self.connection.execute(exists).first() is None:
            return False
        rows = [
            {"organization": organization, "response_id": id, "sequence": event.sequence, "event": event.json}
            for event in events
        ]
        self.insert_missing(response_events, rows)
        return True

    def after(self, organization: str, id: str, sequence: int = -1, *, limit: int = 1000) -> list[StoredEvent]:
        """Return up to `limit` events with higher numbers than `sequence`, in order."""
        table = response_events
        sequence = max(-1, min(sequence, _MAX_SEQUENCE))  # chosen by a client; SQLite integers have 64 bits
        query = (
            select(table.c.sequence, table.c.event)
            .join(
                responses, (responses.c.organization == table.c.organization) & (responses.c.id == table.c.response_id)
            )
            .where(table.c.organization == organization, table.c.response_id == id, table.c.sequence > sequence)
            .where(self.not_expired(responses))
            .order_by(table.c.sequence)
            .limit(limit)
        )
        return [StoredEvent(number, event) for number, event in self.connection.execute(query)]

    def last(self, organization: str, id: str) -> StoredEvent | None:
        table = response_events
        query = (
            select(table.c.sequence, table.c.event)
            .where(table.c.organization == organization, table.c.response_id == id)
            .order_by(table.c.sequence.desc())
            .limit(1)
        )
        found = self.connection.execute(query).first()
        return StoredEvent(found[0], found[1]) if found is not None else None
