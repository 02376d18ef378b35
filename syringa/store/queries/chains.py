"""What a new response continues: the chain of responses before it, and items that are named by their ids."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import and_, literal, select

from syringa.store.queries.base import Queries, batches
from syringa.store.records import BrokenChain, Chain, ChainLink, Item
from syringa.store.schema import conversation_items, conversations, response_items, responses

# Nothing creates a circle. If a damaged database has one, a query must still end.
_LONGEST = 100_000

_LINK = (responses.c.status, responses.c.model, responses.c.conversation_id)


class Chains(Queries):
    def chain(self, organisation: str, id: str) -> Chain | BrokenChain:
        """One statement, however long the chain: the database walks a link in microseconds, we in a round trip."""
        fields = (responses.c.id, responses.c.previous_id, *_LINK)
        back = (
            select(*fields, literal(0).label("depth"))
            .where(self.visible(responses, organisation, id))
            .cte("back", recursive=True)
        )
        earlier = select(*fields, back.c.depth + 1).where(
            responses.c.organisation == organisation,
            responses.c.id == back.c.previous_id,
            self.lasting(responses),
            back.c.depth < _LONGEST,
        )
        back = back.union_all(earlier)
        found = response_items
        theirs = and_(found.c.organisation == organisation, found.c.response_id == back.c.id)
        query = (
            select(back, found.c.id.label("item_id"), found.c.item)
            .select_from(back.outerjoin(found, theirs))  # a response may be without items, and is still a link
            .order_by(back.c.depth.desc(), found.c.role, found.c.position)
        )
        return _read_chain(self.connection.execute(query).all(), id)

    def find_items(self, organisation: str, ids: Collection[str]) -> dict[str, Item]:
        """Of several copies, the one that a model wrote counts before one that was sent, a new one before an old."""
        found: dict[str, Item] = {}
        for some in batches(ids):
            in_conversations = (
                select(conversation_items.c.id, conversation_items.c.item)
                .join(conversations, _belongs(conversation_items, conversations, "conversation_id"))
                .where(conversation_items.c.organisation == organisation, conversation_items.c.id.in_(some))
                .where(self.lasting(conversations))
                .order_by(conversations.c.created_at)
            )
            in_responses = (
                select(response_items.c.id, response_items.c.item)
                .join(responses, _belongs(response_items, responses, "response_id"))
                .where(response_items.c.organisation == organisation, response_items.c.id.in_(some))
                .where(self.lasting(responses))
                .order_by(response_items.c.role, responses.c.created_at)
            )
            for query in (in_conversations, in_responses):  # what comes last counts
                found |= {id: Item(id, item) for id, item in self.connection.execute(query)}
        return found


def _belongs(inner: Any, outer: Any, column: str) -> Any:
    return and_(outer.c.organisation == inner.c.organisation, outer.c.id == inner.c[column])


def _read_chain(rows: Any, asked: str) -> Chain | BrokenChain:
    if not rows:
        return BrokenChain(asked, None)
    if (missing := rows[0].previous_id) is not None:  # the oldest that was found is not the first
        return BrokenChain(missing, rows[0].id)
    links = {row.id: ChainLink(row.id, row.status, row.model, row.conversation_id) for row in rows}
    items = tuple(Item(row.item_id, row.item) for row in rows if row.item_id is not None)
    return Chain(items, tuple(links.values()))
