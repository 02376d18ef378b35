"""Small responses, items and conversations to store, a clock that tests set, and a count of SQL statements."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import event

from syringa.store import Conversation, Item, Store, StoredResponse
from syringa.store.database import Database

START = 1_700_000_000
ORGANISATION = "acme"


class Clock:
    def __init__(self) -> None:
        self.now = float(START)

    def __call__(self) -> float:
        return self.now


def item(id: str, text: str = "hello") -> Item:
    return Item(id, json.dumps({"id": id, "type": "message", "content": text}))


def items(*ids: str) -> list[Item]:
    return [item(id) for id in ids]


def response(id: str, **changes: Any) -> StoredResponse:
    status = changes.get("status", "completed")
    given = {
        "organisation": ORGANISATION,
        "created_at": START,
        "model": "m",
        "status": "completed",
        "body": json.dumps({"id": id, "status": status, "metadata": {"ä": "\0"}}),
        "owner": "process" if status in ("queued", "in_progress") else None,
    }
    return StoredResponse(id=id, **(given | changes))


def conversation(id: str, **changes: Any) -> Conversation:
    return Conversation(id=id, **({"organisation": ORGANISATION, "created_at": START} | changes))


def inside(store: Store) -> Database:
    """The database of a store that has been used."""
    assert store._database is not None
    return store._database


@contextmanager
def statements(store: Store) -> Iterator[list[str]]:
    """The SQL that is run meanwhile, without what begins and ends transactions."""
    seen: list[str] = []

    def note(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if not statement.startswith("BEGIN"):
            seen.append(statement)

    engine = inside(store).engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(engine, "before_cursor_execute", note)
