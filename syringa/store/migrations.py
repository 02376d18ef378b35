"""Schema migrations: an append-only list, applied when the database is opened.

A released migration is never changed; a new one is appended. Statements are plain SQL that SQLite and PostgreSQL both
accept. They are not derived from `schema`, which describes the current tables only.
"""

from __future__ import annotations

import time

import msgspec
from sqlalchemy import Connection, inspect, text

from syringa.errors import StartupError

_TABLE = "schema_migrations"
# Any constant; the same one in every version of Syringa.
_ADVISORY_LOCK = 0x53797269


class Migration(msgspec.Struct, frozen=True):
    name: str
    statements: tuple[str, ...]


_BASELINE = Migration(
    "baseline",
    (
        """
        CREATE TABLE responses (
            organization TEXT NOT NULL,
            id TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            expires_at BIGINT,
            model TEXT NOT NULL,
            status TEXT NOT NULL,
            background BOOLEAN NOT NULL,
            previous_id TEXT,
            conversation_id TEXT,
            body TEXT NOT NULL,
            process TEXT,
            heartbeat DOUBLE PRECISION,
            PRIMARY KEY (organization, id)
        )
        """,
        "CREATE INDEX responses_expiring ON responses (expires_at) WHERE expires_at IS NOT NULL",
        "CREATE INDEX responses_active ON responses (process) WHERE process IS NOT NULL",
        """
        CREATE TABLE response_items (
            organization TEXT NOT NULL,
            response_id TEXT NOT NULL,
            role TEXT NOT NULL,
            position INTEGER NOT NULL,
            id TEXT NOT NULL,
            item TEXT NOT NULL,
            PRIMARY KEY (organization, response_id, role, position),
            UNIQUE (organization, id, response_id),
            FOREIGN KEY (organization, response_id) REFERENCES responses (organization, id) ON DELETE CASCADE
        )
        """,
        """
        CREATE TABLE response_events (
            organization TEXT NOT NULL,
            response_id TEXT NOT NULL,
            sequence BIGINT NOT NULL,
            event TEXT NOT NULL,
            PRIMARY KEY (organization, response_id, sequence),
            FOREIGN KEY (organization, response_id) REFERENCES responses (organization, id) ON DELETE CASCADE
        )
        """,
        """
        CREATE TABLE conversations (
            organization TEXT NOT NULL,
            id TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            expires_at BIGINT,
            metadata TEXT NOT NULL,
            PRIMARY KEY (organization, id)
        )
        """,
        "CREATE INDEX conversations_expiring ON conversations (expires_at) WHERE expires_at IS NOT NULL",
        """
        CREATE TABLE conversation_items (
            organization TEXT NOT NULL,
            conversation_id TEXT NOT NULL,
            position INTEGER NOT NULL,
            id TEXT NOT NULL,
            item TEXT NOT NULL,
            PRIMARY KEY (organization, conversation_id, position),
            UNIQUE (organization, id, conversation_id),
            FOREIGN KEY (organization, conversation_id) REFERENCES conversations (organization, id)
                ON DELETE CASCADE
        )
        """,
        """
        CREATE TABLE secrets (
            name TEXT NOT NULL PRIMARY KEY,
            created_at BIGINT NOT NULL,
            value TEXT NOT NULL
        )
        """,
        """
        CREATE TABLE organizations (
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
            organization TEXT NOT NULL REFERENCES organizations (id),
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
            organization TEXT NOT NULL,
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
        "CREATE INDEX usage_by_organization ON usage (organization, at, id)",
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
)

_LEASES = Migration(
    "leases",
    (
        """
        CREATE TABLE leases (
            name TEXT NOT NULL PRIMARY KEY,
            owner TEXT NOT NULL,
            expires_at DOUBLE PRECISION NOT NULL
        )
        """,
    ),
)

_POOL_OVERRIDES = Migration(
    "pool overrides",
    (
        """
        CREATE TABLE pool_overrides (
            cluster TEXT NOT NULL,
            pool TEXT NOT NULL,
            open BOOLEAN NOT NULL,
            PRIMARY KEY (cluster, pool)
        )
        """,
    ),
)

_BATCHES = Migration(
    "batches",
    (
        """
        CREATE TABLE files (
            organization TEXT NOT NULL,
            id TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            expires_at BIGINT,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            bytes BIGINT NOT NULL,
            PRIMARY KEY (organization, id),
            UNIQUE (id)
        )
        """,
        "CREATE INDEX files_by_time ON files (organization, created_at, id)",
        "CREATE INDEX files_expiring ON files (expires_at) WHERE expires_at IS NOT NULL",
        """
        CREATE TABLE batches (
            organization TEXT NOT NULL,
            id TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            expires_at BIGINT,
            deadline BIGINT NOT NULL,
            status TEXT NOT NULL,
            key TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            completion_window TEXT NOT NULL,
            input_file TEXT NOT NULL,
            output_file TEXT,
            error_file TEXT,
            output_seconds BIGINT,
            model TEXT,
            metadata TEXT,
            errors TEXT,
            times TEXT NOT NULL,
            total BIGINT NOT NULL,
            completed BIGINT NOT NULL,
            failed BIGINT NOT NULL,
            input_tokens BIGINT NOT NULL,
            cached_tokens BIGINT NOT NULL,
            output_tokens BIGINT NOT NULL,
            reasoning_tokens BIGINT NOT NULL,
            PRIMARY KEY (organization, id)
        )
        """,
        "CREATE INDEX batches_by_time ON batches (organization, created_at, id)",
        "CREATE INDEX batches_expiring ON batches (expires_at) WHERE expires_at IS NOT NULL",
        """
        CREATE INDEX batches_active ON batches (created_at)
            WHERE status IN ('validating', 'in_progress', 'finalizing', 'cancelling')
        """,
        """
        CREATE TABLE batch_results (
            organization TEXT NOT NULL,
            batch_id TEXT NOT NULL,
            line BIGINT NOT NULL,
            failed BOOLEAN NOT NULL,
            body TEXT NOT NULL,
            PRIMARY KEY (organization, batch_id, line),
            FOREIGN KEY (organization, batch_id) REFERENCES batches (organization, id) ON DELETE CASCADE
        )
        """,
    ),
)

_LISTS = Migration(
    "lists",
    (
        "CREATE INDEX responses_by_time ON responses (organization, created_at, id)",
        "CREATE INDEX conversations_by_time ON conversations (organization, created_at, id)",
    ),
)

_SERIES = Migration(
    "series",
    (
        """
        CREATE TABLE series (
            resolution INTEGER NOT NULL,
            start BIGINT NOT NULL,
            model TEXT NOT NULL,
            source TEXT NOT NULL,
            figures TEXT NOT NULL,
            PRIMARY KEY (resolution, start, model, source)
        )
        """,
        "CREATE INDEX series_by_time ON series (start)",
    ),
)

_PULLS = Migration(
    "pulls",
    (
        """
        CREATE TABLE pulls (
            id TEXT NOT NULL PRIMARY KEY,
            model TEXT NOT NULL,
            serve_as TEXT NOT NULL,
            status TEXT NOT NULL,
            stage TEXT,
            files TEXT NOT NULL,
            total_bytes BIGINT,
            bytes_per_second DOUBLE PRECISION,
            error TEXT,
            process TEXT NOT NULL,
            cancel BOOLEAN NOT NULL,
            created_at BIGINT NOT NULL,
            updated_at DOUBLE PRECISION NOT NULL,
            ended_at BIGINT
        )
        """,
    ),
)

MIGRATIONS: tuple[Migration, ...] = (_BASELINE, _LEASES, _POOL_OVERRIDES, _BATCHES, _LISTS, _SERIES, _PULLS)


def version(connection: Connection) -> int:
    """Return the number of migrations that were applied."""
    if not inspect(connection).has_table(_TABLE):
        return 0
    return int(connection.execute(text(f"SELECT max(version) FROM {_TABLE}")).scalar() or 0)


def is_current(connection: Connection, display: str) -> bool:
    """Return whether all migrations were applied. Raises `StartupError` for a database of a newer Syringa."""
    found = version(connection)
    if found > len(MIGRATIONS):
        raise StartupError(
            f"{display} was written by a newer Syringa (its schema has version {found}, this Syringa knows "
            f"{len(MIGRATIONS)}): upgrade Syringa, or choose another database with --database"
        )
    return found == len(MIGRATIONS)


def migrate(connection: Connection, display: str) -> None:
    """Apply the missing migrations in the caller's write transaction, all or none.

    Of several processes that start at once, one applies them and the others wait: a write transaction is exclusive in
    SQLite, and in PostgreSQL an advisory lock is held until the transaction ends.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SET LOCAL lock_timeout = '60s'"))  # migrating a large table may take that long
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    if is_current(connection, display):
        return
    connection.execute(
        text(
            f"CREATE TABLE IF NOT EXISTS {_TABLE} "
            "(version INTEGER PRIMARY KEY, name TEXT NOT NULL, applied_at BIGINT NOT NULL)"
        )
    )
    applied = version(connection)
    for number, migration in enumerate(MIGRATIONS[applied:], start=applied + 1):
        for statement in migration.statements:
            connection.execute(text(statement))
        connection.execute(
            text(f"INSERT INTO {_TABLE} (version, name, applied_at) VALUES (:version, :name, :at)"),
            {"version": number, "name": migration.name, "at": int(time.time())},
        )
