"""Checksums of files, computed once per file and remembered on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from syringa.cluster.folder import replace_file

_CHUNK = 1 << 20


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    size: int
    modified: int
    sha256: str


class Checksums:
    """SHA-256 of files by path, size and time of change. Threads may share it, and processes may share its file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = self._read()

    def known(self, path: Path, stat: os.stat_result) -> str | None:
        """Return the checksum of a file if it was computed and the file has not changed."""
        entry = self._entries.get(str(path))
        if entry is None or (entry.size, entry.modified) != (stat.st_size, stat.st_mtime_ns):
            return None
        return entry.sha256

    def compute(self, path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> str:
        """Return the checksum of a file. `on_bytes` gets the number of bytes after each chunk. Raises `OSError`."""
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            if (known := self.known(path, stat)) is not None:
                on_bytes(stat.st_size)
                return known
            digest = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                on_bytes(len(chunk))
            after = os.fstat(file.fileno())
        if (after.st_size, after.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            self._store(path, _Entry(stat.st_size, stat.st_mtime_ns, digest.hexdigest()))
        return digest.hexdigest()

    def _store(self, path: Path, entry: _Entry) -> None:
        with self._lock:
            merged = self._read() | self._entries | {str(path): entry}  # another process may have stored others
            self._entries = {each: value for each, value in merged.items() if os.path.exists(each)}
            with contextlib.suppress(OSError):  # it is computed again after a restart
                self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_file(self._file, msgspec.json.encode(self._entries))

    def _read(self) -> dict[str, _Entry]:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, _Entry])
        return {}
