"""Lists of an organization's responses and conversations, page by page, the newest or the oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, and_, func, select, tuple_

from syringa.errors import NotFound
from syringa.store.queries.base import Queries
from syringa.store.records import ListedConversation, ListedResponse, Order, ResponseFilter
from syringa.store.schema import conversation_items, conversations, response_items, responses

# Longer items are not loaded for a list.
MAX_ITEM_LENGTH = 65_536

_ALL = ResponseFilter()
_RESPONSE_COLUMNS = (
    *("id", "created_at", "expires_at", "model", "status", "background", "previous_id", "conversation_id", "body"),
)


class ListingQueries(Queries):
    def responses(
        self,
        organization: str,
        filter: ResponseFilter = _ALL,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> tuple[list[ListedResponse], bool]:
        """Return a page of responses by age, and whether there are more.

        Raises `NotFound` for a cursor that is not a response of the organization.
        """
        where: list[ColumnElement[bool]] = []
        for name in ("model", "conversation_id", "previous_id", "background"):
            if (value := getattr(filter, name)) is not None:
                where.append(responses.c[name] == value)
        if filter.statuses is not None:
            where.append(responses.c.status.in_(filter.statuses))
        rows, has_more = self._page(
            responses, _RESPONSE_COLUMNS, organization, where, after=after, before=before, limit=limit, order=order
        )
        last = self._last_items(organization, [row["id"] for row in rows])
        found = [
            ListedResponse(**row, input=last.get((row["id"], "input")), output=last.get((row["id"], "output")))
            for row in rows
        ]
        return found, has_more

    def conversations(
        self,
        organization: str,
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int = 20,
        order: Order = "desc",
    ) -> tuple[list[ListedConversation], bool]:
        """Return a page of conversations by age, and whether there are more. Raises as `responses` does."""
        columns = ("id", "created_at", "metadata")
        rows, has_more = self._page(
            conversations, columns, organization, (), after=after, before=before, limit=limit, order=order
        )
        counted = (
            select(conversation_items.c.conversation_id, func.count())
            .where(
                conversation_items.c.organization == organization,
                conversation_items.c.conversation_id.in_([row["id"] for row in rows]),
            )
            .group_by(conversation_items.c.conversation_id)
        )
        items = {id: int(count) for id, count in self.connection.execute(counted)} if rows else {}
        return [ListedConversation(**row, items=items.get(row["id"], 0)) for row in rows], has_more

    def _page(
        self,
        table: Table,
        columns: Sequence[str],
        organization: str,
        where: Sequence[ColumnElement[bool]],
        *,
        after: str | None,
        before: str | None,
        limit: int,
        order: Order,
    ) -> tuple[list[dict[str, Any]], bool]:
        """Return the rows of a page and whether there are more. With both cursors, the page begins at `after`.

        A page is a range of the index by time, so every page costs the same.
        """
        backwards = before is not None and after is None  # the rows next to `before`, not those at the beginning
        ascending = (order == "asc") != backwards
        key = tuple_(table.c.created_at, table.c.id)
        query = select(*(table.c[name] for name in columns))
        query = query.where(table.c.organization == organization, self.not_expired(table), *where)
        for name, cursor, above in (("after", after, order == "asc"), ("before", before, order != "asc")):
            if cursor is not None:
                position = self._position(table, organization, cursor, name)
                query = query.where(key > position if above else key < position)
        by_age = (table.c.created_at, table.c.id)
        query = query.order_by(*(each if ascending else each.desc() for each in by_age)).limit(limit + 1)
        found = [dict(row) for row in self.connection.execute(query).mappings()]
        rows = found[:limit]
        return rows[::-1] if backwards else rows, len(found) > limit

    def _position(self, table: Table, organization: str, id: str, param: str) -> Any:
        query = select(table.c.created_at, table.c.id).where(self.visible(table, organization, id))
        found = self.connection.execute(query).first()
        if found is None:
            raise NotFound(f"there is no {id!r} in this list", param=param)
        return tuple_(*found)

    def _last_items(self, organization: str, ids: Sequence[str]) -> dict[tuple[str, str], str]:
        """Return the last item of the input and of the output of each response, unless it is long."""
        if not ids:
            return {}
        item = response_items.c
        last = (
            select(item.response_id, item.role, func.max(item.position).label("position"))
            .where(item.organization == organization, item.response_id.in_(ids))
            .group_by(item.response_id, item.role)
            .subquery()
        )
        query = (
            select(item.response_id, item.role, item.item)
            .join(
                last,
                and_(
                    item.response_id == last.c.response_id,
                    item.role == last.c.role,
                    item.position == last.c.position,
                ),
            )
            .where(item.organization == organization, func.length(item.item) <= MAX_ITEM_LENGTH)
        )
        return {(response, role): text for response, role, text in self.connection.execute(query)}
