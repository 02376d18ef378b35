"""Conversations: a list of items that grows, and a name for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import msgspec
from sqlalchemy import delete, func, select, update

from syringa.errors import InvalidRequest
from syringa.store.queries import items
from syringa.store.queries.base import Queries, batches
from syringa.store.records import Conversation, Item, Order, Page
from syringa.store.schema import conversation_items, conversations

_COLUMNS = tuple(field.name for field in msgspec.structs.fields(Conversation))


class Conversations(Queries):
    def create(self, conversation: Conversation, these: Sequence[Item]) -> bool:
        items.check(these, "items")
        if not self.insert_new(conversations, msgspec.structs.asdict(conversation)):
            return False
        owner = _whose(conversation.organisation, conversation.id)
        items.add(self.connection, conversation_items, owner, these)
        return True

    def get(self, organisation: str, id: str) -> Conversation | None:
        query = select(*(conversations.c[name] for name in _COLUMNS))
        found = self.connection.execute(query.where(self.visible(conversations, organisation, id))).mappings().first()
        return None if found is None else Conversation(**found)

    def update(self, organisation: str, id: str, metadata: str) -> Conversation | None:
        change = update(conversations).where(self.visible(conversations, organisation, id))
        self.connection.execute(change.values(metadata=metadata))
        return self.get(organisation, id)

    def delete(self, organisation: str, id: str) -> bool:
        gone = delete(conversations).where(self.visible(conversations, organisation, id))
        return self.connection.execute(gone).rowcount > 0

    def add_items(
        self, organisation: str, id: str, these: Sequence[Item], *, known: Literal["refuse", "skip"] = "refuse"
    ) -> bool:
        """Adds at the end. `known`: what happens to an item whose id the conversation already has."""
        items.check(these, "items")
        # The lock keeps two that add at once from taking the same positions.
        there = select(1).where(self.visible(conversations, organisation, id)).with_for_update()
        if self.connection.execute(there).first() is None:
            return False
        already = self._known(organisation, id, [item.id for item in these])
        if already and known == "refuse":
            raise InvalidRequest(f"the conversation already has an item {min(already)!r}", param="items")
        owner = _whose(organisation, id)
        last = self.connection.execute(select(func.max(conversation_items.c.position)).filter_by(**owner)).scalar()
        new = [item for item in these if item.id not in already]
        items.add(self.connection, conversation_items, owner, new, start=0 if last is None else last + 1)
        return True

    def list_items(
        self, organisation: str, id: str, *, after: str | None, before: str | None, limit: int, order: Order
    ) -> Page | None:
        if not self._there(organisation, id):
            return None
        owner = _whose(organisation, id)
        return items.page(
            self.connection, conversation_items, owner, after=after, before=before, limit=limit, order=order
        )

    def all_items(self, organisation: str, id: str) -> tuple[Item, ...] | None:
        if not self._there(organisation, id):
            return None
        return items.everything(self.connection, conversation_items, _whose(organisation, id))

    def get_item(self, organisation: str, id: str, item: str) -> Item | None:
        if not self._there(organisation, id):
            return None
        query = select(conversation_items.c.item).filter_by(**_whose(organisation, id), id=item)
        found = self.connection.execute(query).scalar()
        return None if found is None else Item(item, found)

    def delete_item(self, organisation: str, id: str, item: str) -> bool:
        if not self._there(organisation, id):
            return False
        gone = delete(conversation_items).filter_by(**_whose(organisation, id), id=item)
        return self.connection.execute(gone).rowcount > 0

    def _there(self, organisation: str, id: str) -> bool:
        there = select(1).where(self.visible(conversations, organisation, id))
        return self.connection.execute(there).first() is not None

    def _known(self, organisation: str, id: str, ids: Collection[str]) -> set[str]:
        found: set[str] = set()
        for some in batches(ids):
            query = select(conversation_items.c.id).filter_by(**_whose(organisation, id))
            found.update(self.connection.execute(query.where(conversation_items.c.id.in_(some))).scalars())
        return found


def _whose(organisation: str, id: str) -> items.Owner:
    return {"organisation": organisation, "conversation_id": id}
