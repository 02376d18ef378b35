"""The usage journal: a file with the usage records of one API process that are not in the database yet.

A record is appended before the last bytes of its response are sent, so that no record of an ended request is lost when
the process is killed: its successor, or the next start of the server, reads the file and writes the records to the
database. There a record's id is unique, so a record that is written again counts once. A record that several refusals
were merged into is appended each time it grows; its last line counts.

Records are written with `write(2)` and without `fsync`: that survives the end of the process, however it ends. A power
cut may cost the last records, as it may cost the last transactions of a SQLite database.

The files of a database are numbered and lie in one folder. A process uses the first one that no other process has
locked, and when it starts it takes over the records of every file that is not locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from syringa.store.records import UsageRecord
from syringa.store.url import DatabaseLocation, data_folder, hide_password

logger = logging.getLogger("syringa.service")

RECORDS, LOCK, NEW = ".jsonl", ".lock", ".new"  # suffixes of the files
_MODE = 0o600  # the records name organizations, keys and users

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(UsageRecord).decode


def journal_folder(location: DatabaseLocation) -> Path:
    """Return the folder of a database's journals: beside a SQLite file, or in the data folder."""
    if location.kind == "sqlite":
        return Path(location.target + "-usage")
    # A changed password does not make it another database.
    digest = hashlib.sha256(hide_password(location.target).encode()).hexdigest()[:16]
    return data_folder() / f"postgresql-{digest}-usage"


class UsageJournal:
    """The journal of one API process. Nothing is created before there is a record.

    No method raises `OSError`: with a full disk or an unwritable folder, records are in memory only, which is logged
    once, and the journal is tried again when `rewrite` is called.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"0{RECORDS}"  # until a file is locked
        self._lock = -1
        self._file = -1
        self._size = 0  # bytes in the file
        self._failed = self._closed = False
        self.lines = 0  # in the file

    @property
    def usable(self) -> bool:
        """Whether all records are in the file, as far as is known."""
        return not self._failed and not self._closed

    def recover(self) -> list[UsageRecord]:
        """Take over the records that ended processes have left, into this journal, and return them."""
        found: dict[str, UsageRecord] = {}
        adopted: list[tuple[int, Path]] = []
        try:
            for path in sorted(self._folder.glob(f"*{RECORDS}")):
                if path.stat().st_size and (lock := _try_lock(path)) is not None:
                    adopted.append((lock, path))
                    found |= {record.id: record for record in _read(path)}
            if adopted:
                self._lock, self._path = adopted.pop(0)
                self._file = _open(self._path)
                if self._rewrite(found.values()):
                    for _, path in adopted:
                        os.truncate(path, 0)
        except OSError as error:
            self._fail(error)
        finally:
            for lock, _ in adopted:
                os.close(lock)
        if found:
            logger.info("usage journal: records of an ended process are taken over: count=%d", len(found))
        return list(found.values())

    def append(self, record: UsageRecord) -> None:
        """Add a record, or a later state of one, with one system call."""
        if self.usable:
            self._attempt(lambda: self._append(_line(record)))

    def rewrite(self, records: Iterable[UsageRecord]) -> None:
        """Replace the contents, now that the other records are in the database."""
        if self._closed or (self._file < 0 and not self._failed):
            return
        if self._rewrite(records) and self._failed:
            self._failed = False
            logger.warning("usage journal: records are written again: folder=%s", self._folder)

    def close(self) -> None:
        """Release the file. What it contains is left for the next process."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1
        self._closed = True

    def _rewrite(self, records: Iterable[UsageRecord]) -> bool:
        lines = [_line(record) for record in records]
        return self._attempt(lambda: self._replace(lines) if lines else self._clear())

    def _attempt(self, write: Callable[[], None]) -> bool:
        try:
            if self._file < 0:
                self._choose_file()
            write()
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            logger.warning(
                "usage journal: cannot be written; records of the last second are lost if this process is killed:"
                " folder=%s error=%s", self._folder, error,
            )  # fmt: skip

    def _choose_file(self) -> None:
        """Lock the first file that is free and empty. One with records waits for the successor of its process."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in itertools.count():
            path = self._folder / f"{number}{RECORDS}"
            if (path.exists() and path.stat().st_size) or (lock := _try_lock(path)) is None:
                continue
            try:
                file = _open(path)
            except OSError:
                os.close(lock)
                raise
            if not os.fstat(file).st_size:
                self._path, self._lock, self._file = path, lock, file
                return
            os.close(file)
            os.close(lock)

    def _append(self, line: bytes) -> None:
        try:
            _write_all(self._file, line)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)  # without a part of a line
            raise
        self._size += len(line)
        self.lines += 1

    def _clear(self) -> None:
        os.ftruncate(self._file, 0)  # works on a full disk, too
        self._size = self.lines = 0

    def _replace(self, lines: list[bytes]) -> None:
        """Write a new file and rename it, so that the records are in the old or in the new one at any time."""
        new = self._path.with_suffix(NEW)
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, _MODE)
        data = b"".join(lines)
        try:
            _write_all(file, data)
            os.rename(new, self._path)
        except OSError:
            os.close(file)
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        os.close(self._file)
        self._file, self._size, self.lines = file, len(data), len(lines)


def _line(record: UsageRecord) -> bytes:
    return _encode(record) + b"\n"


def _write_all(file: int, data: bytes) -> None:
    while written := os.write(file, data):
        if written == len(data):
            return
        data = data[written:]  # a disk that fills up accepts a part first


def _read(path: Path) -> list[UsageRecord]:
    """Return the records of a file, without lines that cannot be read: the last one may be torn."""
    *complete, _ = path.read_bytes().split(b"\n")
    records, unreadable = [], 0
    for line in complete:
        try:
            records.append(_decode(line))
        except msgspec.DecodeError:
            unreadable += 1
    if unreadable:
        logger.warning("usage journal: lines that cannot be read are skipped: file=%s count=%d", path, unreadable)
    return records


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, _MODE)


def _try_lock(path: Path) -> int | None:
    """Lock a file, which may be replaced by another, through a file beside it.

    Return a descriptor that holds the lock until it is closed, or None if another process holds it.
    """
    descriptor = os.open(path.with_suffix(LOCK), os.O_RDWR | os.O_CREAT, _MODE)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
