"""The database: engines, transactions and the translation of driver errors.

A database that is unreachable, full, locked or read-only raises `StoreUnavailable`; the next transaction connects anew,
so the store recovers as soon as the database does. Details of a failure go to the log, not to the client.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import (
    ArgumentError,
    CompileError,
    DataError,
    DBAPIError,
    DisconnectionError,
    IntegrityError,
    SQLAlchemyError,
    StatementError,
)

from syringa.errors import ConfigError, StoreError, StoreOutcomeUnknown, StoreUnavailable, SyringaError
from syringa.store import migrations
from syringa.store.url import DatabaseLocation, hide_password

logger = logging.getLogger("syringa.store")

T = TypeVar("T")

# Execution options of a connection: whether it writes, and the deadline for waiting for a lock.
_WRITES, _DEADLINE = "syringa_writes", "syringa_deadline"
_ATTEMPTS = 3
_RETRIED = {"40001", "40P01"}  # PostgreSQL: serialization failure, deadlock


class Database:
    """One database. The first transaction connects and runs the migrations."""

    def __init__(self, location: DatabaseLocation, *, lock_timeout: float, readers: int) -> None:
        """`lock_timeout`: seconds to wait for another process's lock, or for a connection."""
        self.location = location
        self._readers: Engine
        self._writers: Engine
        if location.kind == "sqlite":
            self.engine = _sqlite(location, lock_timeout, connections=readers + 1)
            self._readers, self._writers = self.engine, self.engine.execution_options(**{_WRITES: True})
        else:
            self.engine = _postgresql(location, lock_timeout, connections=2 * readers)
            # All statements of a reader see one snapshot, as they do in SQLite.
            snapshot = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            self._readers, self._writers = self.engine.execution_options(**snapshot), self.engine
        self._migrated = threading.Event()
        self._migrating = threading.Lock()
        # Of readers and of writers: each is logged once until the next success. On a full disk, only reading succeeds.
        self._logged_failures: dict[Engine, str] = {}

    def read(self, query: Callable[[Connection], T], deadline: float) -> T:
        """Run `query` in a transaction that sees one snapshot. `deadline`: of `time.monotonic`, for lock waits."""
        return self._run(self._readers, query, deadline)

    def write(self, query: Callable[[Connection], T], deadline: float) -> T:
        """Run `query` in a transaction, rolled back if it raises. After a serialization failure it runs again."""
        return self._run(self._writers, query, deadline)

    def close(self) -> None:
        self.engine.dispose()

    def _run(self, engine: Engine, query: Callable[[Connection], T], deadline: float) -> T:
        try:
            self._ensure_migrated(deadline)
            result = _transact(engine, query, deadline)
        except SyringaError:
            raise
        except (SQLAlchemyError, OSError) as error:
            self._migrated.clear()  # the database that comes back may be another one, or an older copy
            raise self._translate(error, engine) from error
        self._logged_failures.pop(engine, None)
        return result

    def _ensure_migrated(self, deadline: float) -> None:
        if self._migrated.is_set():
            return
        with self._migrating:
            if self._migrated.is_set():
                return
            display = self.location.display
            if not _transact(self._readers, lambda connection: migrations.is_current(connection, display), deadline):
                _transact(self._writers, lambda connection: migrations.migrate(connection, display), deadline)
            self._migrated.set()

    def _translate(self, error: SQLAlchemyError | OSError, engine: Engine) -> StoreError:
        display = self.location.display
        message = hide_password(str(getattr(error, "orig", None) or error)).strip()
        rejected = isinstance(error, IntegrityError | DataError | ArgumentError | CompileError)
        if rejected or (isinstance(error, StatementError) and not isinstance(error, DBAPIError)):
            # The message may quote client data, so only the error's class and code are logged.
            code = getattr(getattr(error, "orig", None), "sqlstate", None)
            logger.error(
                "database rejected a statement: database=%s error=%s code=%s", display, type(error).__name__, code
            )
            return StoreError("the database rejected the data")
        message = message.partition("\n")[0]  # PostgreSQL quotes the statement in further lines
        if message != self._logged_failures.get(engine):
            self._logged_failures[engine] = message
            logger.warning("database unavailable: database=%s error=%s", display, message)
        lost = isinstance(error, DBAPIError) and error.connection_invalidated  # perhaps while it was committed
        kind = StoreOutcomeUnknown if lost else StoreUnavailable
        return kind("nothing can be stored or looked up at the moment; try again in a few seconds")


def _transact(engine: Engine, query: Callable[[Connection], T], deadline: float) -> T:
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with engine.connect() as connection, connection.execution_options(**{_DEADLINE: deadline}).begin():
                return query(connection)
        except DBAPIError as error:
            if attempt == _ATTEMPTS or getattr(error.orig, "sqlstate", None) not in _RETRIED:
                raise
    raise AssertionError("unreachable")


def _create_file(path: Path) -> None:
    """Create an empty file that only its user may read, because it will hold client data."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _sqlite(location: DatabaseLocation, lock_timeout: float, connections: int) -> Engine:
    url = URL.create("sqlite", database=location.target)
    engine = create_engine(
        url, pool_size=connections, max_overflow=0, hide_parameters=True, connect_args={"timeout": lock_timeout}
    )

    @event.listens_for(engine, "do_connect")
    def before(*details: Any) -> None:
        _create_file(Path(location.target))

    @event.listens_for(engine, "connect")
    def connect(raw: sqlite3.Connection, record: Any) -> None:
        raw.isolation_level = None  # transactions begin in the listener below
        # WAL: several processes read while one writes. A power cut may cost the last transactions, never the file.
        _enable_wal(raw)
        raw.execute("PRAGMA synchronous = NORMAL")
        raw.execute("PRAGMA foreign_keys = ON")
        record.info["file"] = _file_identity(location.target)

    @event.listens_for(engine, "checkout")
    def checkout(raw: sqlite3.Connection, record: Any, proxy: Any) -> None:
        # Writes to a file that was removed or replaced would succeed and be lost.
        if record.info["file"] != _file_identity(location.target):
            raise DisconnectionError(f"{location.display} was replaced by another file")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        raw = connection.connection.dbapi_connection
        assert raw is not None
        raw.execute(f"PRAGMA busy_timeout = {_lock_timeout_ms(options, lock_timeout)}")  # per connection
        # Take the write lock at once: upgrading a read lock fails without waiting if another process has written.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")

    return engine


def _lock_timeout_ms(options: Mapping[str, Any], lock_timeout: float) -> int:
    """Return how long a transaction may still wait for a lock: at least 1 ms, so that it always tries once."""
    deadline = options.get(_DEADLINE)
    seconds = lock_timeout if deadline is None else min(lock_timeout, max(0.001, deadline - time.monotonic()))
    return round(1000 * seconds)


def _enable_wal(raw: sqlite3.Connection) -> None:
    """Set the journal mode, which the file keeps. It may fail: another process sets it, or the file is read-only."""
    with contextlib.suppress(sqlite3.OperationalError):
        raw.execute("PRAGMA journal_mode = WAL").fetchall()


def _file_identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _postgresql(location: DatabaseLocation, lock_timeout: float, connections: int) -> Engine:
    try:
        url = make_url(location.target)
    except (ArgumentError, ValueError):
        raise ConfigError(
            f"database {location.display!r}: expected postgresql://USER@HOST/NAME", param="database"
        ) from None
    # Notice a server that vanished within seconds, not hours. Parameters of the URL take precedence.
    timeouts = {"connect_timeout": max(2, round(lock_timeout)), "keepalives_idle": 30, "tcp_user_timeout": 30_000}
    engine = create_engine(
        url,
        pool_size=connections,
        max_overflow=0,
        hide_parameters=True,  # keep client data out of logs
        pool_pre_ping=True,
        connect_args={name: value for name, value in timeouts.items() if name not in url.query},
    )

    @event.listens_for(engine, "connect")
    def connect(raw: Any, record: Any) -> None:
        raw.autocommit = True
        raw.execute(f"SELECT set_config('lock_timeout', '{round(lock_timeout * 1000)}', false)")
        raw.autocommit = False

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        left = _lock_timeout_ms(connection.get_execution_options(), lock_timeout)
        if left < lock_timeout * 900:  # it has queued, so the timeout of the connection is too long
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {left}")

    return engine
