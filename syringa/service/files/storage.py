"""The bytes of files: a folder with a file for each, which exists completely or not at all under its id.

A file is written under a temporary name, flushed to the disk and renamed. Its row in the database is inserted
afterwards and deleted before it, so a row always has its bytes. Bytes without a row are left behind by processes that
were killed, and where it is unknown whether the row was inserted; they are removed as garbage.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from syringa.errors import StoreUnavailable
from syringa.store.url import DatabaseLocation, data_folder, hide_password

logger = logging.getLogger("syringa.service")

CHUNK_BYTES = 1 << 20  # written and read at a time
_TEMPORARY = ".part"
_MODE = 0o600  # files hold client data


def files_folder(location: DatabaseLocation, configured: str = "") -> Path:
    """Return the folder of a database's files: the configured one, beside a SQLite file, or in the data folder."""
    if configured:
        return Path(configured).expanduser()
    if location.kind == "sqlite":
        return Path(location.target + "-files")
    # A changed password does not make it another database.
    digest = hashlib.sha256(hide_password(location.target).encode()).hexdigest()[:16]
    return data_folder() / f"postgresql-{digest}-files"


class FileStorage:
    """The folder of a server's files. Nothing is created before there is a file. Methods block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def writer(self, id: str) -> FileWriter:
        return FileWriter(self._path(id))

    def open(self, id: str) -> BinaryIO:
        """Open a file for reading. Raises `FileNotFoundError`."""
        return open(self._path(id), "rb")

    def exists(self, id: str) -> bool:
        return self._path(id).exists()

    def remove(self, id: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path(id).unlink()

    def old_ids(self, seconds: float) -> Iterator[str]:
        """Yield the ids of the files that were last written so long ago, and remove temporary files of that age."""
        before = time.time() - seconds
        for path in self.folder.glob("*/*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime >= before:
                    continue
                if path.suffix == _TEMPORARY:
                    path.unlink()
                    logger.info("files: removed the rest of an interrupted upload: file=%s", path.name)
                else:
                    yield path.name

    def _path(self, id: str) -> Path:
        return self.folder / id[-2:] / id  # ids are random: folders of equal size


class FileWriter:
    """Writes one file, in threads, so that a slow disk delays no other request.

    `finish` makes it visible under its id; `discard` removes it. Raises `StoreUnavailable` where the disk is full or
    fails.
    """

    def __init__(self, path: Path) -> None:
        self.id = path.name
        self.bytes = 0
        self._path, self._temporary = path, path.with_name(path.name + _TEMPORARY)
        self._file = -1
        self._buffer: list[bytes] = []
        self._buffered = 0

    async def write(self, data: bytes) -> None:
        self._buffer.append(data)
        self._buffered += len(data)
        self.bytes += len(data)
        if self._buffered >= CHUNK_BYTES:
            await self._run(self._flush)

    async def finish(self) -> None:
        await self._run(self._finish)

    async def discard(self) -> None:
        """Remove what was written, also after `finish`. To be called once nothing is being written."""
        with contextlib.suppress(StoreUnavailable):
            await self._run(self._discard)

    async def _run(self, work: Callable[[], None]) -> None:
        try:
            # Not interrupted: a canceled upload must not close the file while a thread writes to it.
            await asyncio.shield(task := asyncio.ensure_future(asyncio.to_thread(work)))
        except asyncio.CancelledError:
            await asyncio.gather(task, return_exceptions=True)
            raise
        except OSError as error:
            logger.error("files: a file cannot be written: folder=%s error=%s", self._path.parent, error)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            reason = "the disk of the server is full" if full else "the disk of the server cannot be written"
            raise StoreUnavailable(f"The file cannot be stored: {reason}.") from None

    def _flush(self) -> None:
        if self._file < 0:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
        buffer, self._buffer, self._buffered = self._buffer, [], 0
        data = memoryview(b"".join(buffer))
        while data:
            data = data[os.write(self._file, data) :]

    def _finish(self) -> None:
        self._flush()
        os.fsync(self._file)
        self._close()
        os.rename(self._temporary, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _discard(self) -> None:
        self._close()
        for path in (self._temporary, self._path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
