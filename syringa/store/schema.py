"""The tables as queries see them.

What creates them is the list in `migrations`; a test holds the two together. Whatever a client stores has a key that
begins with `organisation`, so a query that forgets it finds no index, and one organisation's ids mean nothing in
another. From `secrets` on, the tables are the server's own.

`previous_id` and `conversation_id` are no foreign keys: what they name may be deleted, and the response stays. Nor is
anything in `usage`: what was used was used, whatever becomes of the key.
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
        return None if value is None else clean(value)


def clean(name: str) -> str:
    if name.isascii() and "\0" not in name:
        return name
    return name.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


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

organisations = Table(
    "organisations",
    metadata,
    Column("id", Name, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("requests_per_minute", BigInteger),  # null: the server's default; 0: no limit
    Column("tokens_per_minute", BigInteger),
    Column("concurrent", BigInteger),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", Name, primary_key=True),
    Column("organisation", Name, nullable=False),
    Column("name", Name, nullable=False),
    Column("digest", Text, nullable=False),  # unique; the key itself is nowhere
    Column("hint", Text, nullable=False),
    Column("admin", Boolean, nullable=False),
    Column("models", Text),  # a JSON list; null: all
    Column("requests_per_minute", BigInteger),  # null and 0: none of its own
    Column("tokens_per_minute", BigInteger),
    Column("concurrent", BigInteger),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("revoked_at", BigInteger),
    Column("last_used_at", BigInteger),
)

usage = Table(
    "usage",
    metadata,
    Column("id", Text, primary_key=True),
    Column("at", Double, nullable=False),
    Column("organisation", Name, nullable=False),
    Column("key", Name, nullable=False),
    Column("model", Name, nullable=False),
    Column("endpoint", Name, nullable=False),
    Column("user", Name),
    Column("request_id", Name, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("queue_seconds", Double, nullable=False),
    Column("load_seconds", Double, nullable=False),
    Column("first_token_seconds", Double),
    Column("total_seconds", Double, nullable=False),
    Column("cost", Double, nullable=False),
)

models = Table(
    "models",
    metadata,
    Column("id", Name, primary_key=True),
    Column("definition", Text, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
)

revisions = Table(
    "revisions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
)
