"""The database itself: connections, transactions, and what its failures are called.

The rest of the store gets a connection inside a transaction and never sees a driver's error: a database that is away,
full, locked or read-only is `StoreUnavailable`, and the next attempt starts afresh, so that the store is back as soon
as the database is. What a failure says in detail goes to the log, not to the client.
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

from syringa.errors import ConfigError, StoreError, StoreUnavailable, SyringaError
from syringa.store import migrations
from syringa.store.url import Location, hide_password

logger = logging.getLogger("syringa.store")

T = TypeVar("T")

# Execution options of a connection: that it is going to write, and until when it may wait for a lock.
_WRITES, _UNTIL = "syringa_writes", "syringa_until"
_TRIES = 3
_RETRIED = {"40001", "40P01"}  # PostgreSQL chose this transaction to give way to another


class Database:
    """One database, opened and brought up to date by the first transaction that finds it so."""

    def __init__(self, location: Location, *, patience: float, readers: int) -> None:
        """`patience`: the seconds to wait for another process's lock, or for a connection."""
        self.location = location
        self._readers: Engine
        self._writers: Engine
        if location.kind == "sqlite":
            self.engine = _sqlite(location, patience, connections=readers + 1)
            self._readers, self._writers = self.engine, self.engine.execution_options(**{_WRITES: True})
        else:
            self.engine = _postgresql(location, patience, connections=2 * readers)
            # A reader's statements all see the same moment, as they do in SQLite.
            still = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            self._readers, self._writers = self.engine.execution_options(**still), self.engine
        self._current = threading.Event()  # set once the tables are known to be up to date
        self._opening = threading.Lock()
        self._complaint = ""  # what is the matter with the database, as far as it was logged

    def read(self, work: Callable[[Connection], T], until: float) -> T:
        """Runs `work` in a transaction that sees one moment of the database. `until`: when, by the clock that only goes
        forward, to have waited long enough for a lock."""
        return self._run(self._readers, work, until)

    def write(self, work: Callable[[Connection], T], until: float) -> T:
        """Runs `work` in a transaction that is kept whole, or not at all if `work` raises. It may be run again."""
        return self._run(self._writers, work, until)

    def close(self) -> None:
        self.engine.dispose()

    def _run(self, engine: Engine, work: Callable[[Connection], T], until: float) -> T:
        try:
            self._bring_up_to_date(until)
            result = _transact(engine, work, until)
        except SyringaError:
            raise
        except (SQLAlchemyError, OSError) as error:
            self._current.clear()  # what comes back may be another file, or an older copy
            raise self._named(error) from error
        self._complaint = ""
        return result

    def _bring_up_to_date(self, until: float) -> None:
        if self._current.is_set():
            return
        with self._opening:
            if self._current.is_set():
                return
            shown = self.location.shown
            if not _transact(self._readers, lambda connection: migrations.is_current(connection, shown), until):
                _transact(self._writers, lambda connection: migrations.migrate(connection, shown), until)
            self._current.set()

    def _named(self, error: SQLAlchemyError | OSError) -> StoreError:
        shown = self.location.shown
        said = hide_password(str(getattr(error, "orig", None) or error)).strip()
        ours = isinstance(error, IntegrityError | DataError | ArgumentError | CompileError)
        if ours or (isinstance(error, StatementError) and not isinstance(error, DBAPIError)):
            # The message may quote the row, which is a client's: its kind and its code have to do.
            code = getattr(getattr(error, "orig", None), "sqlstate", None)
            logger.error("%s refused what Syringa sent: %s %s", shown, type(error).__name__, code or "")
            return StoreError("the store refused what was to be kept")
        if said != self._complaint:  # some ask twice a second: a database that stays away is told once
            self._complaint = said
            logger.warning("%s is unavailable: %s", shown, said)
        return StoreUnavailable("nothing can be stored or looked up at the moment; try again in a few seconds")


def _transact(engine: Engine, work: Callable[[Connection], T], until: float) -> T:
    for attempt in range(1, _TRIES + 1):
        try:
            with engine.connect() as connection, connection.execution_options(**{_UNTIL: until}).begin():
                return work(connection)
        except DBAPIError as error:
            if attempt == _TRIES or getattr(error.orig, "sqlstate", None) not in _RETRIED:
                raise
    raise AssertionError("unreachable")


def _make_file(path: Path) -> None:
    """An empty file that only its user may read, as it is going to hold what people wrote."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _sqlite(location: Location, patience: float, connections: int) -> Engine:
    url = URL.create("sqlite", database=location.place)
    engine = create_engine(
        url, pool_size=connections, max_overflow=0, hide_parameters=True, connect_args={"timeout": patience}
    )

    @event.listens_for(engine, "do_connect")
    def before(*details: Any) -> None:
        _make_file(Path(location.place))

    @event.listens_for(engine, "connect")
    def connect(raw: sqlite3.Connection, record: Any) -> None:
        raw.isolation_level = None  # transactions begin where we say so, below
        # Several processes read while one writes. A power cut may cost the last transactions, never the file.
        _write_ahead(raw)
        raw.execute("PRAGMA synchronous = NORMAL")
        raw.execute("PRAGMA foreign_keys = ON")
        record.info["file"] = _identity(location.place)

    @event.listens_for(engine, "checkout")
    def checkout(raw: sqlite3.Connection, record: Any, proxy: Any) -> None:
        # A connection to a file that was removed or replaced goes on without complaint, and what it writes is lost.
        if record.info["file"] != _identity(location.place):
            raise DisconnectionError(f"{location.shown} is another file now")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        raw = connection.connection.dbapi_connection
        assert raw is not None
        raw.execute(f"PRAGMA busy_timeout = {_milliseconds(options, patience)}")  # of the connection, not of the file
        # A writer takes its lock at once. One that read first would fail, without waiting, if another wrote meanwhile.
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get(_WRITES) else "BEGIN")

    return engine


def _milliseconds(options: Mapping[str, Any], patience: float) -> int:
    """How long a transaction may still wait for a lock; who has waited too long already tries once."""
    until = options.get(_UNTIL)
    return round(1000 * (patience if until is None else min(patience, max(0.001, until - time.monotonic()))))


def _write_ahead(raw: sqlite3.Connection) -> None:
    """The mode stays with the file. Failing to set it (another process does, or the file is read-only) is no harm."""
    with contextlib.suppress(sqlite3.OperationalError):
        raw.execute("PRAGMA journal_mode = WAL").fetchall()


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _postgresql(location: Location, patience: float, connections: int) -> Engine:
    try:
        url = make_url(location.place)
    except (ArgumentError, ValueError):
        raise ConfigError(f"database {location.shown!r}: not a URL of PostgreSQL's kind", param="database") from None
    # A server that vanished without a word is noticed in seconds, not in the hours that TCP allows. The URL may differ.
    waits = {"connect_timeout": max(2, round(patience)), "keepalives_idle": 30, "tcp_user_timeout": 30_000}
    engine = create_engine(
        url,
        pool_size=connections,
        max_overflow=0,
        hide_parameters=True,  # logs must not show what clients wrote
        pool_pre_ping=True,
        connect_args={name: value for name, value in waits.items() if name not in url.query},
    )

    @event.listens_for(engine, "connect")
    def connect(raw: Any, record: Any) -> None:
        raw.autocommit = True
        raw.execute(f"SELECT set_config('lock_timeout', '{round(patience * 1000)}', false)")
        raw.autocommit = False

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        left = _milliseconds(connection.get_execution_options(), patience)
        if left < patience * 900:  # it has queued: a round trip more is well spent
            connection.exec_driver_sql(f"SET LOCAL lock_timeout = {left}")

    return engine
