"""The tables as queries see them.

What creates them is the list in `migrations`; a test holds the two together. Every key begins with `organisation`, so a
query that forgets it finds no index, and one organisation's ids mean nothing in another; `secrets` alone are the
server's.

`previous_id` and `conversation_id` are no foreign keys: what they name may be deleted, and the response stays.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, MetaData, Table, Text, TypeDecorator

metadata = MetaData()


class Name(TypeDecorator[str]):
    """Text that a client may have written: an id, an organisation, a model.

    PostgreSQL refuses NUL and both databases refuse half a surrogate pair. Such a name matches nothing rather than
    failing in the driver.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        if value is None or (value.isascii() and "\0" not in value):
            return value
        return value.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


responses = Table(
    "responses",
    metadata,
    Column("organisation", Name, primary_key=True),
    Column("id", Name, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("model", Name, nullable=False),
    Column("status", Text, nullable=False),
    Column("background", Boolean, nullable=False),
    Column("previous_id", Name),
    Column("conversation_id", Name),
    Column("body", Text, nullable=False),
    Column("owner", Name),  # set while it runs, so that an index of what runs stays small
    Column("heartbeat", Double),
)

response_items = Table(
    "response_items",
    metadata,
    Column("organisation", Name, primary_key=True),
    Column("response_id", Name, primary_key=True),
    Column("role", Text, primary_key=True),  # 'input' sorts before 'output'
    Column("position", Integer, primary_key=True),
    Column("id", Name, nullable=False),
    Column("item", Text, nullable=False),
)

response_events = Table(
    "response_events",
    metadata,
    Column("organisation", Name, primary_key=True),
    Column("response_id", Name, primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("event", Text, nullable=False),
)

conversations = Table(
    "conversations",
    metadata,
    Column("organisation", Name, primary_key=True),
    Column("id", Name, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("metadata", Text, nullable=False),
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("organisation", Name, primary_key=True),
    Column("conversation_id", Name, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("id", Name, nullable=False),
    Column("item", Text, nullable=False),
)

secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("value", Text, nullable=False),
)
