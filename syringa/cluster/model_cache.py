"""The cache of model files on a node: bounded, shared by its replicas, the least recently used model out first.

    <folder>/
      <digest>/          the files of a model, complete and checked
      <digest>.part/     files of a model that is being fetched, or whose download was interrupted
      <digest>.json      what it is, and how much space is reserved for it; its time of change is that of the last use
      <digest>.lock      shared by replicas that use the model, exclusive while it is evicted
      <digest>.fetch     exclusive for the process that downloads it
      cache.lock         exclusive while space is reserved

Locks are those of `flock`: they end with their process, however it ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from syringa.cluster.folder import replace_file
from syringa.cluster.manifest import Manifest
from syringa.errors import ModelError
from syringa.modelfiles.download import Progress

logger = logging.getLogger("syringa.cluster")

RESERVE = 64 << 20  # bytes of the disk that stay free
POLL_SECONDS = 0.2  # while another process downloads

PART = ".part"  # ends the name of a file, and of a folder, that is not complete

Download = Callable[[Path], None]
"""Put the files of a model into a folder, where a part of them may be. Raises `ModelError` and `OSError`."""


class _CacheRecord(msgspec.Struct, frozen=True):
    model: str  # path or Hub name on the server, for operators
    size: int  # of all its files


class CacheEntry(msgspec.Struct, frozen=True):
    """A model in the cache."""

    digest: str
    model: str
    size: int  # of all its files, also those that are not here yet
    present: int  # bytes that are here
    used_at: float  # Unix time


class CachedModel:
    """A model of the cache that is in use, and stays until `release`."""

    def __init__(self, path: Path, lock: int, touch: Callable[[], None]) -> None:
        self.path = path
        self._lock: int | None = lock
        self._touch = touch

    def release(self) -> None:
        if self._lock is not None:
            self._touch()
            os.close(self._lock)
            self._lock = None


class ModelCache:
    """Processes and threads may use the same folder at the same time."""

    def __init__(
        self,
        folder: Path,
        capacity: int = 0,
        *,
        free_space: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`capacity`: bytes of all models together; 0: as much as the disk has."""
        self.folder, self._capacity = folder, capacity
        self._free_space, self._sleep = free_space, sleep

    def acquire(self, model: str, manifest: Manifest, download: Download, progress: Progress) -> CachedModel:
        """Return a model, downloaded unless it is here. Only one process downloads it; others wait.

        `progress` may raise to give up. What was downloaded is kept. Raises `ModelError`.
        """
        digest = manifest.digest
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _lock(self._path(digest, ".lock"), fcntl.LOCK_SH)
            try:
                self._fetch(model, manifest, download, progress)
                self._touch(digest)
                return CachedModel(self._path(digest), lock, lambda: self._touch(digest))
            except BaseException:
                os.close(lock)
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise ModelError(f"{model} cannot be stored: the disk of {self.folder} is full") from error
            raise ModelError(f"{model} cannot be stored in {self.folder}: {error.strerror or error}") from error

    def entries(self) -> list[CacheEntry]:
        """Return the models in the cache, the least recently used first."""
        found = []
        for path in self.folder.glob("*.json"):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=_CacheRecord)
                used_at = path.stat().st_mtime
            except (OSError, msgspec.DecodeError):
                continue
            present = _bytes_in(self._path(path.stem)) + _bytes_in(self._path(path.stem, PART))
            found.append(CacheEntry(path.stem, record.model, record.size, present, used_at))
        return sorted(found, key=lambda entry: (entry.used_at, entry.digest))

    def _fetch(self, model: str, manifest: Manifest, download: Download, progress: Progress) -> None:
        """Download a model that is locked for use, or wait until another process has done so."""
        digest, complete, part = manifest.digest, self._path(manifest.digest), self._path(manifest.digest, PART)
        fetching: int | None = None
        while not self._is_complete(manifest) and fetching is None:
            fetching = _try_lock(self._path(digest, ".fetch"), fcntl.LOCK_EX)
            if fetching is None:
                progress(min(_bytes_in(part), manifest.size), manifest.size)
                self._sleep(POLL_SECONDS)
        if fetching is None:
            return
        try:
            if self._is_complete(manifest):
                return
            if complete.exists():  # a file was changed by others: those with their sizes are kept
                shutil.rmtree(part, ignore_errors=True)
                complete.rename(part)
            with self._reserving():
                self._reserve(model, manifest)
                replace_file(self._path(digest, ".json"), msgspec.json.encode(_CacheRecord(model, manifest.size)))
                part.mkdir(mode=0o700, exist_ok=True)
            download(part)
            part.rename(complete)
        finally:
            os.close(fetching)

    def _touch(self, digest: str) -> None:
        with contextlib.suppress(OSError):
            os.utime(self._path(digest, ".json"))

    def _is_complete(self, manifest: Manifest) -> bool:
        folder = self._path(manifest.digest)
        try:
            return all((folder / file.name).stat().st_size == file.size for file in manifest.files)
        except OSError:
            return False

    @contextlib.contextmanager
    def _reserving(self) -> Iterator[None]:
        lock = _lock(self.folder / "cache.lock", fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(lock)

    def _reserve(self, model: str, manifest: Manifest) -> None:
        """Evict models until there is room for another. Raises `ModelError`."""
        entries = {entry.digest: entry for entry in self.entries()}
        own = entries.pop(manifest.digest, None)
        missing = manifest.size - (min(own.present, manifest.size) if own is not None else 0)
        if self._capacity and manifest.size > self._capacity:
            raise ModelError(
                f"{model} has {_gigabytes(manifest.size)}, and the cache of this node's pool holds "
                f"{_gigabytes(self._capacity)}: raise cache.capacity of the pool"
            )
        used = sum(entry.size for entry in entries.values())
        awaited = sum(max(entry.size - entry.present, 0) for entry in entries.values())  # by other downloads
        free = self._free_space(self.folder)
        for entry in list(entries.values()):
            if self._fits(used + manifest.size, missing + awaited, free):
                return
            if self._evict(entry):
                used -= entry.size
                awaited -= max(entry.size - entry.present, 0)
                free = self._free_space(self.folder)
        if not self._fits(used + manifest.size, missing + awaited, free):
            place = (
                f"{_gigabytes(free)} are free in {self.folder}"
                if missing + awaited + RESERVE > free
                else f"{_gigabytes(self._capacity - used)} are free in the cache of this node's pool"
            )
            in_use = ": other models there are in use" if used else ""
            raise ModelError(f"{model} needs {_gigabytes(missing)}, and {place}{in_use}")

    def _fits(self, used: int, missing: int, free: int) -> bool:
        return (not self._capacity or used <= self._capacity) and missing + RESERVE <= free

    def _evict(self, entry: CacheEntry) -> bool:
        """Delete a model unless it is in use. Return whether it was deleted."""
        lock = _try_lock(self._path(entry.digest, ".lock"), fcntl.LOCK_EX)
        if lock is None:
            return False
        try:
            shutil.rmtree(self._path(entry.digest), ignore_errors=True)
            shutil.rmtree(self._path(entry.digest, PART), ignore_errors=True)
            for suffix in (".json", ".fetch", ".lock"):
                self._path(entry.digest, suffix).unlink(missing_ok=True)
        finally:
            os.close(lock)
        logger.info("cluster: model evicted from the cache of this node: model=%s bytes=%d", entry.model, entry.size)
        return True

    def _path(self, digest: str, suffix: str = "") -> Path:
        return self.folder / f"{digest}{suffix}"


def _lock(path: Path, operation: int) -> int:
    """Lock a file, and return its descriptor, whose end is that of the lock."""
    while True:
        if (lock := _open_locked(path, operation)) is not None:
            return lock


def _try_lock(path: Path, operation: int) -> int | None:
    """Like `_lock`, but return None if another process has the lock."""
    try:
        return _lock(path, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def _open_locked(path: Path, operation: int) -> int | None:
    """Open and lock a file. Return None if it was deleted before it could be locked."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, operation)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == os.stat(path).st_ino:
                return lock
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _bytes_in(folder: Path) -> int:
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        for entry in found:
            with contextlib.suppress(OSError):
                total += entry.stat().st_size
    return total


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
