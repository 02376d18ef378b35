"""The shared rate-limit table: counts per name, in memory shared by the API processes of one server.

The memory is a file made by `create` and mapped by each process, or anonymous memory for a single process. It is a hash
table of slots (`rate_slot`) with open addressing; an idle slot may be given to another name.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable

from syringa.errors import StartupError
from syringa.service.limits.rate_slot import (
    ATTACHED,
    GENERATIONS,
    HEADER,
    MAGIC,
    MICRO,
    PROCESSES,
    SIZE,
    SLOT,
    RateSlot,
)

logger = logging.getLogger("syringa.service")

SLOTS = 16_384  # a power of two
LOCK_TIMEOUT = 1.0  # the lock is held for microseconds, so after this time its holder must have been stopped
_PROBES = 64  # enough for all but one name in a thousand in a table that is 90 % full
_MAGIC_NUMBER = 0x5352_4C31
_DIGEST_BYTES = 16
_UNUSED = bytes(_DIGEST_BYTES)


class SharedRateTable:
    """The table, used as a context manager: inside, this process has the lock and the time is fixed.

    Only the event loop's thread should use it, since it may wait for other processes; other threads are safe.
    """

    def __init__(self, path: str | None, *, index: int, clock: Callable[[], float], slots: int = SLOTS) -> None:
        """`index`: the number of this process. Requests that an earlier process of that number ran are not counted."""
        if not 0 <= index < PROCESSES:
            raise StartupError(
                f"At most {PROCESSES} API processes can share rate limits, and process number {index} is one too many: "
                f"set workers to {PROCESSES} or less."
            )
        self._clock = clock
        self._index = index
        self._file: int | None = None
        self._mutex = threading.Lock()
        self._locked = False
        self._lock_timeout = LOCK_TIMEOUT
        self._logged_full = False
        self._now = 0
        if path is None:
            self._memory = mmap.mmap(-1, _table_bytes(slots))
            _initialize(self._memory, slots)
        else:
            self._file, self._memory = _open(path)
        self._words = memoryview(self._memory).cast("I")
        self._slots: int = self._words[SIZE]
        self.closed = False
        with self:
            self._generation: int = self._words[GENERATIONS + index] % 0xFFFF + 1
            self._words[GENERATIONS + index] = self._generation
            self._words[ATTACHED] = max(self._words[ATTACHED], index + 1)

    @staticmethod
    def create(path: str, slots: int = SLOTS) -> None:
        """Create the file that processes share. Raises `OSError`."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _table_bytes(slots))
            if hasattr(os, "posix_fallocate"):
                # Reserve the space: writing to a mapped page without disk space would kill the process.
                os.posix_fallocate(file, 0, _table_bytes(slots))
            with mmap.mmap(file, 0) as memory:
                _initialize(memory, slots)
        finally:
            os.close(file)

    def __enter__(self) -> None:
        self._mutex.acquire()
        if self._file is not None:
            self._locked = self._lock(self._file)
        self._now = int(self._clock() * MICRO)  # read under the lock, so that it never goes back

    def __exit__(self, *_: object) -> None:
        if self._locked and self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._locked = False
        self._mutex.release()

    def find(self, name: str, *, allocate: bool = True) -> RateSlot | None:
        """Return the slot of a name, without expired counts.

        None: the name has no slot, and `allocate` is false or no slot is free.
        """
        digest = _digest(name)
        start, step = int.from_bytes(digest[:4]), int.from_bytes(digest[4:8]) | 1  # an odd step visits every slot
        free: int | None = None
        for probe in range(min(_PROBES, self._slots)):
            base = HEADER + SLOT * ((start + probe * step) % self._slots)
            stored = self._memory[4 * base : 4 * base + _DIGEST_BYTES]
            if stored == digest:
                return self._advanced(base)
            if free is None and (stored == _UNUSED or self._slot(base).is_idle()):
                free = base
            if stored == _UNUSED:  # a used slot never becomes unused, so the name is not further on
                break
        if not allocate:
            return None
        if free is None:
            self._log_full()
            return None
        self._memory[4 * free : 4 * free + _DIGEST_BYTES] = digest
        return self._advanced(free)

    def _slot(self, base: int) -> RateSlot:
        return RateSlot(self._words, base, self._now, self._index, self._generation)

    def _advanced(self, base: int) -> RateSlot:
        slot = self._slot(base)
        slot.advance()
        return slot

    def close(self) -> None:
        """Release the memory. Running requests of this process are not counted any more."""
        if self.closed:
            return
        with self:
            self.closed = True
            self._words[GENERATIONS + self._index] = self._generation % 0xFFFF + 1
        self._words.release()
        self._memory.close()
        if self._file is not None:
            os.close(self._file)

    def _lock(self, file: int) -> bool:
        """Lock the table with `flock`, which the kernel releases if the process is killed.

        Not `lockf`: its locks are lost when any descriptor of the file is closed. Return False after `LOCK_TIMEOUT`: a
        process that was stopped must not stop the others.
        """
        deadline = time.monotonic() + self._lock_timeout
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(20e-6)
                    continue
                if self._lock_timeout:
                    logger.error("rate limits: lock timed out, limits are not exact: error=%s", error)
                    self._lock_timeout = 0.0  # wait only once, until the lock is free again
                return False
            self._lock_timeout = LOCK_TIMEOUT
            return True

    def _log_full(self) -> None:
        if not self._logged_full:
            self._logged_full = True
            logger.error(
                "rate limits: table is full, some organizations and keys are not limited: slots=%d", self._slots
            )


def _table_bytes(slots: int) -> int:
    return 4 * (HEADER + SLOT * slots)


def _initialize(memory: mmap.mmap, slots: int) -> None:
    with memoryview(memory).cast("I") as words:
        words[SIZE] = slots
        words[MAGIC] = _MAGIC_NUMBER


def _open(path: str) -> tuple[int, mmap.mmap]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(f"The file with the shared rate limits cannot be opened: {error}") from error
    memory = None
    if os.fstat(file).st_size >= _table_bytes(0):
        memory = mmap.mmap(file, 0)
        with memoryview(memory).cast("I") as words:
            if words[MAGIC] == _MAGIC_NUMBER and words[SIZE] > 0 and len(memory) == _table_bytes(words[SIZE]):
                return file, memory
    if memory is not None:
        memory.close()
    os.close(file)
    raise StartupError(f"{path} is not a file with shared rate limits.")


@functools.lru_cache(maxsize=4096)
def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
