"""The events of a response's stream, kept so that a client that was cut off can go on where it was."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select

from syringa.store.queries.base import Queries
from syringa.store.records import Event
from syringa.store.schema import response_events, responses

_HIGHEST = 2**63 - 1


class Events(Queries):
    def append(self, organisation: str, id: str, events: Sequence[Event]) -> bool:
        there = select(1).where(self.visible(responses, organisation, id)).with_for_update(read=True, key_share=True)
        if self.connection.execute(there).first() is None:
            return False
        rows = [
            {"organisation": organisation, "response_id": id, "sequence": event.sequence, "event": event.json}
            for event in events
        ]
        # A batch whose fate was unknown is sent again: what is there already stays as it is.
        self.insert_missing(response_events, rows)
        return True

    def after(self, organisation: str, id: str, sequence: int, limit: int) -> list[Event]:
        table = response_events
        sequence = max(-1, min(sequence, _HIGHEST))  # a client chose it, and SQLite takes no more than 64 bits
        query = (
            select(table.c.sequence, table.c.event)
            .join(
                responses, (responses.c.organisation == table.c.organisation) & (responses.c.id == table.c.response_id)
            )
            .where(table.c.organisation == organisation, table.c.response_id == id, table.c.sequence > sequence)
            .where(self.lasting(responses))
            .order_by(table.c.sequence)
            .limit(limit)
        )
        return [Event(number, event) for number, event in self.connection.execute(query)]

    def last(self, organisation: str, id: str) -> Event | None:
        table = response_events
        query = (
            select(table.c.sequence, table.c.event)
            .where(table.c.organisation == organisation, table.c.response_id == id)
            .order_by(table.c.sequence.desc())
            .limit(1)
        )
        found = self.connection.execute(query).first()
        return Event(found[0], found[1]) if found is not None else None
