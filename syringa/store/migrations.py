"""How a database comes to have the tables of `schema`: an append-only list, run at start.

A migration that was released is never changed; a new one goes to the end. The statements are plain SQL that SQLite and
PostgreSQL both read, written out rather than taken from `schema`, which describes today's tables and not those of then.
"""

from __future__ import annotations

import time

import msgspec
from sqlalchemy import Connection, inspect, text

from syringa.errors import StartupError

_TABLE = "schema_migrations"
# Any number will do, as long as every version of Syringa takes the same one.
_LOCK = 0x53797269


class Migration(msgspec.Struct, frozen=True):
    name: str
    statements: tuple[str, ...]


MIGRATIONS: tuple[Migration, ...] = (
    Migration(
        "responses and conversations",
        (
            """
            CREATE TABLE responses (
                organisation TEXT NOT NULL,
                id TEXT NOT NULL,
                created_at BIGINT NOT NULL,
                expires_at BIGINT,
                model TEXT NOT NULL,
                status TEXT NOT NULL,
                background BOOLEAN NOT NULL,
                previous_id TEXT,
                conversation_id TEXT,
                body TEXT NOT NULL,
                owner TEXT,
                heartbeat DOUBLE PRECISION,
                PRIMARY KEY (organisation, id)
            )
            """,
            "CREATE INDEX responses_expiring ON responses (expires_at) WHERE expires_at IS NOT NULL",
            "CREATE INDEX responses_running ON responses (owner) WHERE owner IS NOT NULL",
            """
            CREATE TABLE response_items (
                organisation TEXT NOT NULL,
                response_id TEXT NOT NULL,
                role TEXT NOT NULL,
                position INTEGER NOT NULL,
                id TEXT NOT NULL,
                item TEXT NOT NULL,
                PRIMARY KEY (organisation, response_id, role, position),
                UNIQUE (organisation, id, response_id),
                FOREIGN KEY (organisation, response_id) REFERENCES responses (organisation, id) ON DELETE CASCADE
            )
            """,
            """
            CREATE TABLE response_events (
                organisation TEXT NOT NULL,
                response_id TEXT NOT NULL,
                sequence BIGINT NOT NULL,
                event TEXT NOT NULL,
                PRIMARY KEY (organisation, response_id, sequence),
                FOREIGN KEY (organisation, response_id) REFERENCES responses (organisation, id) ON DELETE CASCADE
            )
            """,
            """
            CREATE TABLE conversations (
                organisation TEXT NOT NULL,
                id TEXT NOT NULL,
                created_at BIGINT NOT NULL,
                expires_at BIGINT,
                metadata TEXT NOT NULL,
                PRIMARY KEY (organisation, id)
            )
            """,
            "CREATE INDEX conversations_expiring ON conversations (expires_at) WHERE expires_at IS NOT NULL",
            """
            CREATE TABLE conversation_items (
                organisation TEXT NOT NULL,
                conversation_id TEXT NOT NULL,
                position INTEGER NOT NULL,
                id TEXT NOT NULL,
                item TEXT NOT NULL,
                PRIMARY KEY (organisation, conversation_id, position),
                UNIQUE (organisation, id, conversation_id),
                FOREIGN KEY (organisation, conversation_id) REFERENCES conversations (organisation, id)
                    ON DELETE CASCADE
            )
            """,
        ),
    ),
    Migration(
        "secrets",
        (
            """
            CREATE TABLE secrets (
                name TEXT NOT NULL PRIMARY KEY,
                created_at BIGINT NOT NULL,
                value TEXT NOT NULL
            )
            """,
        ),
    ),
    Migration(
        "organisations, keys and usage",
        (
            """
            CREATE TABLE organisations (
                id TEXT NOT NULL PRIMARY KEY,
                created_at BIGINT NOT NULL,
                requests_per_minute BIGINT,
                tokens_per_minute BIGINT,
                concurrent BIGINT
            )
            """,
            """
            CREATE TABLE api_keys (
                id TEXT NOT NULL PRIMARY KEY,
                organisation TEXT NOT NULL REFERENCES organisations (id),
                name TEXT NOT NULL,
                digest TEXT NOT NULL UNIQUE,
                hint TEXT NOT NULL,
                admin BOOLEAN NOT NULL,
                models TEXT,
                requests_per_minute BIGINT,
                tokens_per_minute BIGINT,
                concurrent BIGINT,
                created_at BIGINT NOT NULL,
                expires_at BIGINT,
                revoked_at BIGINT,
                last_used_at BIGINT
            )
            """,
            """
            CREATE TABLE usage (
                id TEXT NOT NULL PRIMARY KEY,
                at DOUBLE PRECISION NOT NULL,
                organisation TEXT NOT NULL,
                key TEXT NOT NULL,
                model TEXT NOT NULL,
                endpoint TEXT NOT NULL,
                "user" TEXT,
                request_id TEXT NOT NULL,
                outcome TEXT NOT NULL,
                status INTEGER NOT NULL,
                requests BIGINT NOT NULL,
                input_tokens BIGINT NOT NULL,
                cached_tokens BIGINT NOT NULL,
                output_tokens BIGINT NOT NULL,
                reasoning_tokens BIGINT NOT NULL,
                queue_seconds DOUBLE PRECISION NOT NULL,
                load_seconds DOUBLE PRECISION NOT NULL,
                first_token_seconds DOUBLE PRECISION,
                total_seconds DOUBLE PRECISION NOT NULL,
                cost DOUBLE PRECISION NOT NULL
            )
            """,
            "CREATE INDEX usage_by_time ON usage (at, id)",
            "CREATE INDEX usage_by_organisation ON usage (organisation, at, id)",
        ),
    ),
    Migration(
        "models and revisions",
        (
            """
            CREATE TABLE models (
                id TEXT NOT NULL PRIMARY KEY,
                definition TEXT NOT NULL,
                updated_at BIGINT NOT NULL
            )
            """,
            """
            CREATE TABLE revisions (
                name TEXT NOT NULL PRIMARY KEY,
                number BIGINT NOT NULL
            )
            """,
        ),
    ),
)


def version(connection: Connection) -> int:
    """How many migrations have run."""
    if not inspect(connection).has_table(_TABLE):
        return 0
    return int(connection.execute(text(f"SELECT max(version) FROM {_TABLE}")).scalar() or 0)


def is_current(connection: Connection, shown: str) -> bool:
    """Whether nothing is left to run. Refuses a database that a newer Syringa has changed."""
    found = version(connection)
    if found > len(MIGRATIONS):
        raise StartupError(
            f"{shown} was written by a newer Syringa (its tables are at version {found}, this one knows "
            f"{len(MIGRATIONS)}): upgrade Syringa, or choose another database with --database"
        )
    return found == len(MIGRATIONS)


def migrate(connection: Connection, shown: str) -> None:
    """Runs what has not run yet, all in the caller's write transaction: whole or not at all.

    Of several processes that start at once, one runs it and the others wait. In SQLite a write transaction is alone
    as it is; PostgreSQL has a lock that is made for this and ends with the transaction.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL lock_timeout = '60s'"))  # a big table may take another process that long
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    if is_current(connection, shown):
        return
    connection.execute(
        text(
            f"CREATE TABLE IF NOT EXISTS {_TABLE} "
            "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at BIGINT NOT NULL)"
        )
    )
    done = version(connection)
    for number, migration in enumerate(MIGRATIONS[done:], start=done + 1):
        for statement in migration.statements:
            connection.execute(text(statement))
        connection.execute(
            text(f"INSERT INTO {_TABLE} (version, name, applied_at) VALUES (:version, :name, :at)"),
            {"version": number, "name": migration.name, "at": int(time.time())},
        )
