"""The context of a new response: the chain of its previous responses, and items referenced by id."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import and_, literal, select

from syringa.store.queries.base import Queries, batches
from syringa.store.records import BrokenChain, Chain, ChainLink, StoredItem
from syringa.store.schema import conversation_items, conversations, response_items, responses

# Chains have no cycles; this bounds the recursive query on a damaged database.
_MAX_LENGTH = 100_000

_LINK = (responses.c.status, responses.c.model, responses.c.conversation_id)


class ChainQueries(Queries):
    def chain(self, organization: str, id: str) -> Chain | BrokenChain:
        """Return a response and all its predecessors, by one recursive statement however long the chain is."""
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
        query = (
            select(chain, items.c.id.label("item_id"), items.c.item)
            .select_from(chain.outerjoin(items, same_response))  # a response without items is still a link
            .order_by(chain.c.depth.desc(), items.c.role, items.c.position)
        )
        return _read_chain(self.connection.execute(query).all(), id)

    def find_items(self, organization: str, ids: Collection[str]) -> dict[str, StoredItem]:
        """Return the items with these ids, from responses and conversations; an unknown id is left out.

        Of several copies, generated ones take precedence over sent ones, and newer over older.
        """
        found: dict[str, StoredItem] = {}
        for batch in batches(ids):
            in_conversations = (
                select(conversation_items.c.id, conversation_items.c.item)
                .join(conversations, _belongs_to(conversation_items, conversations, "conversation_id"))
                .where(conversation_items.c.organization == organization, conversation_items.c.id.in_(batch))
                .where(self.not_expired(conversations))
                .order_by(conversations.c.created_at)
            )
            in_responses = (
                select(response_items.c.id, response_items.c.item)
                .join(responses, _belongs_to(response_items, responses, "response_id"))
                .where(response_items.c.organization == organization, response_items.c.id.in_(batch))
                .where(self.not_expired(responses))
                .order_by(response_items.c.role, responses.c.created_at)
            )
            for query in (in_conversations, in_responses):  # later rows replace earlier ones
                found |= {id: StoredItem(id, item) for id, item in self.connection.execute(query)}
        return found


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
