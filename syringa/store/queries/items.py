"""Lists of items, as responses and conversations have them: validate, insert and read page by page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, Table, insert, select

from syringa.errors import InvalidRequest, NotFound
from syringa.store.records import ItemPage, Order, StoredItem

_MAX_ID_LENGTH = 256  # the size of an index entry is limited in PostgreSQL

ListKey = Mapping[str, str]
"""The columns that identify a list of items, with their values."""


def check(items: Iterable[StoredItem], param: str) -> None:
    """Raise `InvalidRequest` for an id that is malformed or occurs twice."""
    seen = set()
    for item in items:
        if item.id in seen:
            raise InvalidRequest(f"two items have the id {item.id!r}", param=param)
        if not 0 < len(item.id) <= _MAX_ID_LENGTH or not item.id.isprintable():
            raise InvalidRequest(f"an item's id has 1 to {_MAX_ID_LENGTH} printable characters", param=param)
        seen.add(item.id)


def add(connection: Connection, table: Table, key: ListKey, items: Iterable[StoredItem], start: int = 0) -> None:
    """Insert items at the positions from `start` on."""
    rows = [
        {**key, "position": position, "id": item.id, "item": item.json}
        for position, item in enumerate(items, start=start)
    ]
    if rows:
        connection.execute(insert(table), rows)


def all_items(connection: Connection, table: Table, key: ListKey) -> tuple[StoredItem, ...]:
    query = select(table.c.id, table.c.item).filter_by(**key).order_by(table.c.position)
    return tuple(StoredItem(id, item) for id, item in connection.execute(query))


def page(
    connection: Connection,
    table: Table,
    key: ListKey,
    *,
    after: str | None,
    before: str | None,
    limit: int,
    order: Order,
) -> ItemPage:
    """Return one page. `after` and `before` are item ids; with both, the page begins at `after`.

    A cursor becomes a position by an index lookup, and a page is a range of positions, so every page costs the same.
    """
    backwards = before is not None and after is None  # the items next to `before`, not those at the list's beginning
    ascending = (order == "asc") != backwards
    query = select(table.c.id, table.c.item).filter_by(**key)
    for name, cursor, above in (("after", after, order == "asc"), ("before", before, order != "asc")):
        if cursor is not None:
            position = _position(connection, table, key, cursor, name)
            query = query.where(table.c.position > position if above else table.c.position < position)
    query = query.order_by(table.c.position if ascending else table.c.position.desc()).limit(limit + 1)
    found = [StoredItem(id, item) for id, item in connection.execute(query)]
    items = found[:limit]
    return ItemPage(tuple(reversed(items) if backwards else items), has_more=len(found) > limit)


def _position(connection: Connection, table: Table, key: ListKey, id: str, param: str) -> int:
    found = connection.execute(select(table.c.position).filter_by(**key, id=id)).scalar()
    if found is None:
        raise NotFound(f"there is no item {id!r} in this list", param=param)
    return int(found)
