"""Responses with their input and output items."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import delete, select, update

from syringa.store.queries import items
from syringa.store.queries.base import Queries
from syringa.store.queries.conversations import Conversations
from syringa.store.records import ACTIVE, Item, Order, Page, Role, Status, StoredResponse
from syringa.store.schema import response_items, responses

_COLUMNS = tuple(field.name for field in msgspec.structs.fields(StoredResponse) if field.name != "output")
# What a conversation goes on from. A failed or cancelled answer is none.
_REMEMBERED: tuple[Status, ...] = ("completed", "incomplete")


class Responses(Queries):
    def create(self, response: StoredResponse, input: Sequence[Item]) -> bool:
        if (response.status in ACTIVE) != (response.owner is not None):
            raise ValueError("a response has an owner for as long as it runs")
        items.check((*input, *response.output), "input")
        row = {name: getattr(response, name) for name in _COLUMNS}
        row["heartbeat"] = self.now if response.owner is not None else None
        if not self.insert_new(responses, row):
            return False
        self._add(response.organisation, response.id, "input", input)
        self._add(response.organisation, response.id, "output", response.output)
        if response.conversation_id is not None and response.status in _REMEMBERED:
            self._remember(response.organisation, response.conversation_id, (*input, *response.output))
        return True

    def update(self, organisation: str, id: str, status: Status, body: str) -> bool:
        change = update(responses).where(
            responses.c.organisation == organisation, responses.c.id == id, responses.c.status.in_(ACTIVE)
        )
        return self.connection.execute(change.values(status=status, body=body)).rowcount > 0

    def finish(self, organisation: str, id: str, status: Status, body: str, output: Sequence[Item]) -> Status | None:
        mine = (responses.c.organisation == organisation, responses.c.id == id)
        found = self.connection.execute(
            select(responses.c.status, responses.c.conversation_id).where(*mine).with_for_update()
        ).first()
        if found is None:
            return None
        if found.status not in ACTIVE:  # it was finished before, or cancelled, or given up for lost
            return found.status  # type: ignore[no-any-return]
        change = update(responses).where(*mine)
        self.connection.execute(change.values(status=status, body=body, owner=None, heartbeat=None))
        self._add(organisation, id, "output", output)
        if found.conversation_id is not None and status in _REMEMBERED:
            sent = items.everything(self.connection, response_items, _whose(organisation, id, "input"))
            self._remember(organisation, found.conversation_id, (*sent, *output))
        return status

    def get(self, organisation: str, id: str) -> StoredResponse | None:
        query = select(*(responses.c[name] for name in _COLUMNS)).where(self.visible(responses, organisation, id))
        found = self.connection.execute(query).mappings().first()
        if found is None:
            return None
        output = items.everything(self.connection, response_items, _whose(organisation, id, "output"))
        return StoredResponse(**found, output=output)

    def delete(self, organisation: str, id: str) -> bool:
        return self.connection.execute(delete(responses).where(self.visible(responses, organisation, id))).rowcount > 0

    def input_items(
        self, organisation: str, id: str, *, after: str | None, before: str | None, limit: int, order: Order
    ) -> Page | None:
        if self.connection.execute(select(1).where(self.visible(responses, organisation, id))).first() is None:
            return None
        owner = _whose(organisation, id, "input")
        return items.page(self.connection, response_items, owner, after=after, before=before, limit=limit, order=order)

    def _add(self, organisation: str, id: str, role: Role, these: Sequence[Item]) -> None:
        items.add(self.connection, response_items, _whose(organisation, id, role), these)

    def _remember(self, organisation: str, conversation: str, these: Sequence[Item]) -> None:
        """A conversation that is gone, or an item that it already has, is no reason to lose the answer."""
        Conversations(self.connection, self.now).add_items(organisation, conversation, these, known="skip")


def _whose(organisation: str, id: str, role: Role) -> items.Owner:
    return {"organisation": organisation, "response_id": id, "role": role}
