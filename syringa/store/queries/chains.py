"""The context of a new response: the chain of its previous responses, and items referenced by id."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import CTE, FromClause, and_, case, func, literal, select

from syringa.store.queries.base import Queries, batches
from syringa.store.queries.conversations import ConversationQueries
from syringa.store.records import BrokenChain, Chain, ChainLink, ListSize, StoredItem
from syringa.store.schema import conversation_items, conversations, response_items, responses

# Chains have no cycles; this bounds the recursive query on a damaged database.
_MAX_LENGTH = 100_000

_LINK = (responses.c.status, responses.c.model, responses.c.conversation_id)


class ChainQueries(Queries):
    def chain(self, organization: str, id: str) -> Chain | BrokenChain:
        """Return a response and all its predecessors, by one recursive statement however long the chain is."""
        chain, chain_items = self._chain(organization, id)
        query = (
            select(chain, response_items.c.id.label("item_id"), response_items.c.item)
            .select_from(chain_items)
            .order_by(chain.c.depth.desc(), response_items.c.role, response_items.c.position)
        )
        return _read_chain(self.connection.execute(query).all(), id)

    def chain_size(self, organization: str, id: str) -> ListSize:
        """Return the size of a chain with the conversation that its first response ran in, without loading it."""
        chain, chain_items = self._chain(organization, id)
        conversation = func.max(case((chain.c.previous_id.is_(None), chain.c.conversation_id)))
        query = select(*self.measure(response_items.c.item), conversation).select_from(chain_items)
        count, size, first = self.connection.execute(query).one()
        found = ListSize(int(count), int(size))
        if first is not None:
            found += ConversationQueries(self.connection, self.now).size(organization, first)
        return found

    def _chain(self, organization: str, id: str) -> tuple[CTE, FromClause]:
        """Return a response and its predecessors with their `depth`, and the same joined with their items."""
        fields = (responses.c.id, responses.c.previous_id, *_LINK)
        chain = (
            select(*fields, literal(0).label("depth"))
            .where(self.visible(responses, organization, id))
            .cte("chain", recursive=True)
        )
        previous = select(*fields, chain.c.depth + 1).where(
            responses.c.organization == organization,
            responses.c.id == chain.c.previous_id,
            self.not_expired(responses),
            chain.c.depth < _MAX_LENGTH,
        )
        chain = chain.union_all(previous)
        items = response_items
        same_response = and_(items.c.organization == organization, items.c.response_id == chain.c.id)
        return chain, chain.outerjoin(items, same_response)  # a response without items is still a link

    def find_items(self, organization: str, ids: Collection[str]) -> dict[str, StoredItem]:
        """Return the items with these ids, from responses and conversations; an unknown id is left out.

        Of several copies, generated ones take precedence over sent ones, and newer over older.
        """
        found: dict[str, StoredItem] = {}
        for batch in batches(ids):
            in_conversations = self._in_conversations(
                select(conversation_items.c.id, conversation_items.c.item), organization, batch
            ).order_by(conversations.c.created_at)
            in_responses = self._in_responses(
                select(response_items.c.id, response_items.c.item), organization, batch
            ).order_by(response_items.c.role, responses.c.created_at)
            for query in (in_conversations, in_responses):  # later rows replace earlier ones
                found |= {id: StoredItem(id, item) for id, item in self.connection.execute(query)}
        return found

    def items_size(self, organization: str, ids: Collection[str]) -> ListSize:
        """Return the size of all copies of items that `find_items` would load."""
        found = ListSize()
        for batch in batches(set(ids)):
            in_conversations = select(*self.measure(conversation_items.c.item)).select_from(conversation_items)
            in_responses = select(*self.measure(response_items.c.item)).select_from(response_items)
            for query in (
                self._in_conversations(in_conversations, organization, batch),
                self._in_responses(in_responses, organization, batch),
            ):
                found += ListSize(*map(int, self.connection.execute(query).one()))
        return found

    def _in_conversations(self, query: Any, organization: str, ids: Collection[str]) -> Any:
        return (
            query.join(conversations, _belongs_to(conversation_items, conversations, "conversation_id"))
            .where(conversation_items.c.organization == organization, conversation_items.c.id.in_(ids))
            .where(self.not_expired(conversations))
        )

    def _in_responses(self, query: Any, organization: str, ids: Collection[str]) -> Any:
        return (
            query.join(responses, _belongs_to(response_items, responses, "response_id"))
            .where(response_items.c.organization == organization, response_items.c.id.in_(ids))
            .where(self.not_expired(responses))
        )


def _belongs_to(inner: Any, outer: Any, column: str) -> Any:
    return and_(outer.c.organization == inner.c.organization, outer.c.id == inner.c[column])


def _read_chain(rows: Any, requested: str) -> Chain | BrokenChain:
    if not rows:
        return BrokenChain(requested, None)
    if (missing := rows[0].previous_id) is not None:  # the oldest response found has a predecessor
        return BrokenChain(missing, rows[0].id)
    links = {row.id: ChainLink(row.id, row.status, row.model, row.conversation_id) for row in rows}
    items = tuple(StoredItem(row.item_id, row.item) for row in rows if row.item_id is not None)
    return Chain(items, tuple(links.values()))
