"""Conversations and their items."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

import msgspec
from sqlalchemy import delete, func, select, update

from syringa.errors import InvalidRequest
from syringa.store.queries import items
from syringa.store.queries.base import Queries, batches
from syringa.store.records import ItemPage, ListSize, Order, StoredConversation, StoredItem
from syringa.store.schema import conversation_items, conversations

_COLUMNS = tuple(field.name for field in msgspec.structs.fields(StoredConversation))


class ConversationQueries(Queries):
    def create(self, conversation: StoredConversation, new: Sequence[StoredItem] = ()) -> bool:
        """Insert a conversation with its first items. Return False if the id exists."""
        items.check(new, "items")
        if not self.insert_new(conversations, msgspec.structs.asdict(conversation)):
            return False
        key = _list_key(conversation.organization, conversation.id)
        items.add(self.connection, conversation_items, key, new)
        return True

    def get(self, organization: str, id: str) -> StoredConversation | None:
        query = select(*(conversations.c[name] for name in _COLUMNS))
        found = self.connection.execute(query.where(self.visible(conversations, organization, id))).mappings().first()
        return None if found is None else StoredConversation(**found)

    def update(self, organization: str, id: str, *, metadata: str) -> StoredConversation | None:
        """Replace the metadata, and return the conversation, or None if there is no such conversation."""
        change = update(conversations).where(self.visible(conversations, organization, id))
        self.connection.execute(change.values(metadata=metadata))
        return self.get(organization, id)

    def delete(self, organization: str, id: str) -> bool:
        """Delete a conversation with its items. Responses that ran in it stay."""
        statement = delete(conversations).where(self.visible(conversations, organization, id))
        return self.connection.execute(statement).rowcount > 0

    def add_items(
        self,
        organization: str,
        id: str,
        new: Sequence[StoredItem],
        *,
        duplicates: Literal["refuse", "skip"] = "refuse",
        check_size: Callable[[ListSize], None] = lambda before: None,
    ) -> bool:
        """Append items. Return False if there is no such conversation.

        With `duplicates="refuse"`, an item whose id the conversation already has raises `InvalidRequest`. `check_size`
        may raise an error, given the size that the conversation has had so far.
        """
        items.check(new, "items")
        # The row lock keeps two concurrent calls from using the same positions.
        exists = select(1).where(self.visible(conversations, organization, id)).with_for_update()
        if self.connection.execute(exists).first() is None:
            return False
        check_size(self.size(organization, id))
        known = self._known(organization, id, [item.id for item in new])
        if known and duplicates == "refuse":
            raise InvalidRequest(f"the conversation already has an item {min(known)!r}", param="items")
        key = _list_key(organization, id)
        last = self.connection.execute(select(func.max(conversation_items.c.position)).filter_by(**key)).scalar()
        missing = [item for item in new if item.id not in known]
        items.add(self.connection, conversation_items, key, missing, start=0 if last is None else last + 1)
        return True

    def list_items(
        self,
        organization: str,
        id: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> ItemPage | None:
        """Return a page of items, or None if there is no such conversation.

        Raises `NotFound` for a cursor that is not in the list.
        """
        if not self._exists(organization, id):
            return None
        key = _list_key(organization, id)
        return items.page(
            self.connection, conversation_items, key, after=after, before=before, limit=limit, order=order
        )

    def all_items(self, organization: str, id: str) -> tuple[StoredItem, ...] | None:
        """Return all items, oldest first, or None if there is no such conversation."""
        if not self._exists(organization, id):
            return None
        return items.all_items(self.connection, conversation_items, _list_key(organization, id))

    def size(self, organization: str, id: str) -> ListSize:
        """Return the size of a conversation; 0 if there is no such conversation."""
        query = select(*self.measure(conversation_items.c.item)).filter_by(**_list_key(organization, id))
        return ListSize(*map(int, self.connection.execute(query).one()))

    def get_item(self, organization: str, id: str, item: str) -> StoredItem | None:
        if not self._exists(organization, id):
            return None
        query = select(conversation_items.c.item).filter_by(**_list_key(organization, id), id=item)
        found = self.connection.execute(query).scalar()
        return None if found is None else StoredItem(item, found)

    def delete_item(self, organization: str, id: str, item: str) -> bool:
        if not self._exists(organization, id):
            return False
        statement = delete(conversation_items).filter_by(**_list_key(organization, id), id=item)
        return self.connection.execute(statement).rowcount > 0

    def _exists(self, organization: str, id: str) -> bool:
        exists = select(1).where(self.visible(conversations, organization, id))
        return self.connection.execute(exists).first() is not None

    def _known(self, organization: str, id: str, ids: Collection[str]) -> set[str]:
        """Return the ids that the conversation already has."""
        found: set[str] = set()
        for batch in batches(ids):
            query = select(conversation_items.c.id).filter_by(**_list_key(organization, id))
            found.update(self.connection.execute(query.where(conversation_items.c.id.in_(batch))).scalars())
        return found


def _list_key(organization: str, id: str) -> items.ListKey:
    return {"organization": organization, "conversation_id": id}
