"""Responses with their input and output items."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from sqlalchemy import delete, select, update

from syringa.store.queries import items
from syringa.store.queries.base import Queries
from syringa.store.queries.conversations import ConversationQueries
from syringa.store.records import ACTIVE, ItemPage, ItemRole, Order, ResponseStatus, StoredItem, StoredResponse
from syringa.store.schema import response_items, responses

_COLUMNS = tuple(field.name for field in msgspec.structs.fields(StoredResponse) if field.name != "output")
# The statuses with which a response's items are added to its conversation.
_ADDED_TO_CONVERSATION: tuple[ResponseStatus, ...] = ("completed", "incomplete")


class ResponseQueries(Queries):
    def create(self, response: StoredResponse, input: Sequence[StoredItem] = ()) -> bool:
        """Insert a response with its input, and with its output if it is finished. Return False if the id exists.

        An active response names its process, which has to send heartbeats.
        """
        if (response.status in ACTIVE) != (response.process is not None):
            raise ValueError("a response names its process if and only if it is active")
        items.check((*input, *response.output), "input")
        row = {name: getattr(response, name) for name in _COLUMNS}
        row["heartbeat"] = self.now if response.process is not None else None
        if not self.insert_new(responses, row):
            return False
        self._add_items(response.organization, response.id, "input", input)
        self._add_items(response.organization, response.id, "output", response.output)
        if response.conversation_id is not None and response.status in _ADDED_TO_CONVERSATION:
            self._add_to_conversation(response.organization, response.conversation_id, (*input, *response.output))
        return True

    def update(self, organization: str, id: str, *, status: ResponseStatus, body: str) -> bool:
        """Change an active response, e.g. from queued to in_progress. Return False if it is not active or is gone."""
        change = update(responses).where(
            responses.c.organization == organization, responses.c.id == id, responses.c.status.in_(ACTIVE)
        )
        return self.connection.execute(change.values(status=status, body=body)).rowcount > 0

    def finish(
        self, organization: str, id: str, *, status: ResponseStatus, body: str, output: Sequence[StoredItem] = ()
    ) -> ResponseStatus | None:
        """Finish a response, and return its final status, or None if it was deleted.

        The first finish counts, later ones change nothing: a response that was cancelled stays cancelled. The input and
        output of a completed or incomplete response are added to its conversation.
        """
        this = (responses.c.organization == organization, responses.c.id == id)
        found = self.connection.execute(
            select(responses.c.status, responses.c.conversation_id).where(*this).with_for_update()
        ).first()
        if found is None:
            return None
        if found.status not in ACTIVE:
            return found.status  # type: ignore[no-any-return]
        change = update(responses).where(*this)
        self.connection.execute(change.values(status=status, body=body, process=None, heartbeat=None))
        self._add_items(organization, id, "output", output)
        if found.conversation_id is not None and status in _ADDED_TO_CONVERSATION:
            input = items.all_items(self.connection, response_items, _list_key(organization, id, "input"))
            self._add_to_conversation(organization, found.conversation_id, (*input, *output))
        return status

    def get(self, organization: str, id: str) -> StoredResponse | None:
        query = select(*(responses.c[name] for name in _COLUMNS)).where(self.visible(responses, organization, id))
        found = self.connection.execute(query).mappings().first()
        if found is None:
            return None
        output = items.all_items(self.connection, response_items, _list_key(organization, id, "output"))
        return StoredResponse(**found, output=output)

    def delete(self, organization: str, id: str) -> bool:
        """Delete a response with its items and events. Responses that continue it stay, as a broken chain."""
        return self.connection.execute(delete(responses).where(self.visible(responses, organization, id))).rowcount > 0

    def input_items(
        self,
        organization: str,
        id: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> ItemPage | None:
        """Return a page of a response's input, or None if there is no such response.

        Raises `NotFound` for a cursor that is not in the list.
        """
        if self.connection.execute(select(1).where(self.visible(responses, organization, id))).first() is None:
            return None
        key = _list_key(organization, id, "input")
        return items.page(self.connection, response_items, key, after=after, before=before, limit=limit, order=order)

    def _add_items(self, organization: str, id: str, role: ItemRole, new: Sequence[StoredItem]) -> None:
        items.add(self.connection, response_items, _list_key(organization, id, role), new)

    def _add_to_conversation(self, organization: str, conversation: str, new: Sequence[StoredItem]) -> None:
        """Add items to a conversation. A deleted conversation or a known item must not fail the response."""
        ConversationQueries(self.connection, self.now).add_items(organization, conversation, new, duplicates="skip")


def _list_key(organization: str, id: str, role: ItemRole) -> items.ListKey:
    return {"organization": organization, "response_id": id, "role": role}
