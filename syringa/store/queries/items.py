"""Lists of items, which responses and conversations both have: adding to one, and walking it page by page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sqlalchemy import Connection, Table, insert, select

from syringa.errors import InvalidRequest, NotFound
from syringa.store.records import Item, Order, Page

_LONGEST_ID = 256  # PostgreSQL's indexes have a limit, and an id that comes near it is no id

Owner = Mapping[str, str]  # the columns that say whose list it is, and their values


def check(items: Iterable[Item], param: str) -> None:
    """An id stands for one item of a list; the database would say so less clearly."""
    seen = set()
    for item in items:
        if item.id in seen:
            raise InvalidRequest(f"two items have the id {item.id!r}", param=param)
        if not 0 < len(item.id) <= _LONGEST_ID or not item.id.isprintable():
            raise InvalidRequest(f"an item's id has 1 to {_LONGEST_ID} printable characters", param=param)
        seen.add(item.id)


def add(connection: Connection, table: Table, owner: Owner, items: Iterable[Item], start: int = 0) -> None:
    rows = [
        {**owner, "position": position, "id": item.id, "item": item.json}
        for position, item in enumerate(items, start=start)
    ]
    if rows:
        connection.execute(insert(table), rows)


def everything(connection: Connection, table: Table, owner: Owner) -> tuple[Item, ...]:
    query = select(table.c.id, table.c.item).filter_by(**owner).order_by(table.c.position)
    return tuple(Item(id, item) for id, item in connection.execute(query))


def page(
    connection: Connection,
    table: Table,
    owner: Owner,
    *,
    after: str | None,
    before: str | None,
    limit: int,
    order: Order,
) -> Page:
    """`after` and `before` are ids in the list, in the list's own order; with both, the walk starts at `after`.

    A cursor is turned into a position by an index, and the page is a range of positions, so a page in the middle of a
    long list costs what the first one does.
    """
    backwards = before is not None and after is None  # the items next to `before`, not those at the list's beginning
    rising = (order == "asc") != backwards
    query = select(table.c.id, table.c.item).filter_by(**owner)
    for name, cursor, beyond in (("after", after, order == "asc"), ("before", before, order != "asc")):
        if cursor is not None:
            position = _position(connection, table, owner, cursor, name)
            query = query.where(table.c.position > position if beyond else table.c.position < position)
    query = query.order_by(table.c.position if rising else table.c.position.desc()).limit(limit + 1)
    found = [Item(id, item) for id, item in connection.execute(query)]
    shown = found[:limit]
    return Page(tuple(reversed(shown) if backwards else shown), has_more=len(found) > limit)


def _position(connection: Connection, table: Table, owner: Owner, id: str, param: str) -> int:
    found = connection.execute(select(table.c.position).filter_by(**owner, id=id)).scalar()
    if found is None:
        raise NotFound(f"there is no item {id!r} in this list", param=param)
    return int(found)
