"""Builders of small records, shorthand for single queries, a settable clock and a log of SQL statements."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from syringa.store import Store, StoredConversation, StoredItem, StoredResponse
from syringa.store.database import Database
from syringa.store.session import Session

START = 1_700_000_000
ORGANIZATION = "acme"


def read(store: Store) -> Any:
    """Run one query: `await read(store).responses.get(organization, id)`."""
    return _Groups(store.read)


def write(store: Store) -> Any:
    """Like `read`, in a transaction that writes."""
    return _Groups(store.write)


async def find_item(store: Store, organization: str, id: str) -> StoredItem | None:
    found = await store.read(lambda session: session.chains.find_items(organization, [id]))
    return found.get(id)


class _Groups:
    """The groups of queries of a session. Each query of a group is run by `run`."""

    def __init__(self, run: Callable[[Callable[[Session], Any]], Awaitable[Any]]) -> None:
        self._run = run

    def __getattr__(self, group: str) -> _Group:
        return _Group(self._run, group)


class _Group:
    def __init__(self, run: Callable[[Callable[[Session], Any]], Awaitable[Any]], group: str) -> None:
        self._run, self._group = run, group

    def __getattr__(self, query: str) -> Callable[..., Awaitable[Any]]:
        def call(*args: Any, **kwargs: Any) -> Awaitable[Any]:
            return self._run(lambda session: getattr(getattr(session, self._group), query)(*args, **kwargs))

        return call


class Clock:
    def __init__(self) -> None:
        self.now = float(START)

    def __call__(self) -> float:
        return self.now


def item(id: str, text: str = "hello") -> StoredItem:
    return StoredItem(id, json.dumps({"id": id, "type": "message", "content": text}))


def items(*ids: str) -> list[StoredItem]:
    return [item(id) for id in ids]


def response(id: str, **changes: Any) -> StoredResponse:
    status = changes.get("status", "completed")
    given = {
        "organization": ORGANIZATION,
        "created_at": START,
        "model": "m",
        "status": "completed",
        "body": json.dumps({"id": id, "status": status, "metadata": {"ä": "\0"}}),
        "process": "process" if status in ("queued", "in_progress") else None,
    }
    return StoredResponse(id=id, **(given | changes))


def conversation(id: str, **changes: Any) -> StoredConversation:
    return StoredConversation(id=id, **({"organization": ORGANIZATION, "created_at": START} | changes))


def database_of(store: Store) -> Database:
    """Return the database of a store that has run a query."""
    assert store._database is not None
    return store._database


@contextmanager
def statements(store: Store) -> Iterator[list[str]]:
    """Collect the SQL statements that are run, except those that begin and end transactions."""
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if not statement.startswith("BEGIN"):
            seen.append(statement)

    engine = database_of(store).engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)
