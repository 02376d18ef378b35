"""The tables as SQLAlchemy queries see them.

`migrations` creates them, and a test compares the two. The primary key of every table with client data begins with
`organization`: a query that omits it uses no index, and ids of one organization are unknown in another. The tables from
`secrets` on are the server's own.

`previous_id` and `conversation_id` are not foreign keys, because a response outlives what they name. Nor has `usage`
any: a usage record outlives its API key.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Double, Integer, MetaData, Table, Text, TypeDecorator

metadata = MetaData()


class ClientText(TypeDecorator[str]):
    """Text chosen by a client: an id, an organization, a model.

    PostgreSQL refuses NUL, and both databases refuse lone surrogates. They are replaced, so that such a name matches
    nothing instead of failing in the driver.
    """

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else clean(value)


def clean(name: str) -> str:
    """Replace the characters that a database refuses."""
    if name.isascii() and "\0" not in name:
        return name
    return name.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


responses = Table(
    "responses",
    metadata,
    Column("organization", ClientText, primary_key=True),
    Column("id", ClientText, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("model", ClientText, nullable=False),
    Column("status", Text, nullable=False),
    Column("background", Boolean, nullable=False),
    Column("previous_id", ClientText),
    Column("conversation_id", ClientText),
    Column("body", Text, nullable=False),
    Column("process", ClientText),  # set while the response is active, so that the partial index stays small
    Column("heartbeat", Double),
)

response_items = Table(
    "response_items",
    metadata,
    Column("organization", ClientText, primary_key=True),
    Column("response_id", ClientText, primary_key=True),
    Column("role", Text, primary_key=True),  # 'input' sorts before 'output'
    Column("position", Integer, primary_key=True),
    Column("id", ClientText, nullable=False),
    Column("item", Text, nullable=False),
)

response_events = Table(
    "response_events",
    metadata,
    Column("organization", ClientText, primary_key=True),
    Column("response_id", ClientText, primary_key=True),
    Column("sequence", BigInteger, primary_key=True),
    Column("event", Text, nullable=False),
)

conversations = Table(
    "conversations",
    metadata,
    Column("organization", ClientText, primary_key=True),
    Column("id", ClientText, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("metadata", Text, nullable=False),
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("organization", ClientText, primary_key=True),
    Column("conversation_id", ClientText, primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("id", ClientText, nullable=False),
    Column("item", Text, nullable=False),
)

files = Table(
    "files",
    metadata,
    Column("organization", ClientText, primary_key=True),
    Column("id", ClientText, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("filename", ClientText, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("bytes", BigInteger, nullable=False),
)

batches = Table(
    "batches",
    metadata,
    Column("organization", ClientText, primary_key=True),
    Column("id", ClientText, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("deadline", BigInteger, nullable=False),
    Column("status", Text, nullable=False),
    Column("key", ClientText, nullable=False),
    Column("endpoint", Text, nullable=False),
    Column("completion_window", Text, nullable=False),
    Column("input_file", ClientText, nullable=False),
    Column("output_file", Text),
    Column("error_file", Text),
    Column("output_seconds", BigInteger),
    Column("model", ClientText),
    Column("metadata", Text),
    Column("errors", Text),
    Column("times", Text, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("completed", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
)

batch_results = Table(
    "batch_results",
    metadata,
    Column("organization", ClientText, primary_key=True),
    Column("batch_id", ClientText, primary_key=True),
    Column("line", BigInteger, primary_key=True),
    Column("failed", Boolean, nullable=False),
    Column("body", Text, nullable=False),
)

secrets = Table(
    "secrets",
    metadata,
    Column("name", Text, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("value", Text, nullable=False),
)

organizations = Table(
    "organizations",
    metadata,
    Column("id", ClientText, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("requests_per_minute", BigInteger),  # null: the server's default; 0: no limit
    Column("tokens_per_minute", BigInteger),
    Column("concurrent", BigInteger),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", ClientText, primary_key=True),
    Column("organization", ClientText, nullable=False),
    Column("name", ClientText, nullable=False),
    Column("digest", Text, nullable=False),  # unique; the key itself is not stored
    Column("hint", Text, nullable=False),
    Column("admin", Boolean, nullable=False),
    Column("models", Text),  # a JSON list; null: all
    Column("requests_per_minute", BigInteger),  # null or 0: no limit of its own
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
    Column("organization", ClientText, nullable=False),
    Column("key", ClientText, nullable=False),
    Column("model", ClientText, nullable=False),
    Column("endpoint", ClientText, nullable=False),
    Column("user", ClientText),
    Column("request_id", ClientText, nullable=False),
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
    Column("id", ClientText, primary_key=True),
    Column("definition", Text, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
)

revisions = Table(
    "revisions",
    metadata,
    Column("name", Text, primary_key=True),
    Column("number", BigInteger, nullable=False),
)

series = Table(
    "series",
    metadata,
    Column("resolution", Integer, primary_key=True),  # seconds
    Column("start", BigInteger, primary_key=True),
    Column("model", ClientText, primary_key=True),
    Column("source", Text, primary_key=True),
    Column("figures", Text, nullable=False),
)

pulls = Table(
    "pulls",
    metadata,
    Column("id", ClientText, primary_key=True),
    Column("model", ClientText, nullable=False),
    Column("serve_as", ClientText, nullable=False),
    Column("status", Text, nullable=False),
    Column("stage", Text),
    Column("files", Text, nullable=False),
    Column("total_bytes", BigInteger),
    Column("bytes_per_second", Double),
    Column("error", ClientText),
    Column("process", ClientText, nullable=False),
    Column("cancel", Boolean, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("ended_at", BigInteger),
)

leases = Table(
    "leases",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("expires_at", Double, nullable=False),
)

pool_overrides = Table(
    "pool_overrides",
    metadata,
    Column("cluster", Text, primary_key=True),
    Column("pool", Text, primary_key=True),
    Column("open", Boolean, nullable=False),
)
