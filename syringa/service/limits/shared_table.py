"""What names did in the last minute and what they run now, in memory that the API processes of one server share.

The memory is a file that `create` makes, mapped by each process; without one it is this process's own, with the same
code. It holds a table of slots (`slot.py`), found by a hash of the name. A slot with nothing in it may be given to
another name.
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
from syringa.service.limits.slot import ATTACHED, HEADER, KIND, LIVES, MICRO, PROCESSES, SIZE, SLOT, Slot

logger = logging.getLogger("syringa.service")

SLOTS = 16_384  # a power of two
PATIENCE = 1.0  # a lock is held for microseconds: one that is not free by then belongs to a process that was stopped
_PROBES = 64  # with so many, a table that is nine tenths full still has room for all but one name in a thousand
_MAGIC = 0x5352_4C31
_DIGEST_BYTES = 16
_NOBODY = bytes(_DIGEST_BYTES)


class Windows:
    """The table. Used as a context: inside, nobody else reads or writes it, and the time stands still.

    The event loop is the only thread that should come here, because it may wait for other processes; others are safe.
    """

    def __init__(self, path: str | None, *, index: int, clock: Callable[[], float], slots: int = SLOTS) -> None:
        """`index`: which of the server's processes this is. Whatever an earlier one of that number held is free."""
        if not 0 <= index < PROCESSES:
            raise StartupError(
                f"At most {PROCESSES} API processes can share their limits; this would be number {index}."
            )
        self._clock = clock
        self._index = index
        self._file: int | None = None
        self._mutex = threading.Lock()
        self._locked = False
        self._patience = PATIENCE
        self._said_full = False
        self._now = 0
        if path is None:
            self._memory = mmap.mmap(-1, _bytes(slots))
            _begin(self._memory, slots)
        else:
            self._file, self._memory = _open(path)
        self._words = memoryview(self._memory).cast("I")
        self._slots: int = self._words[SIZE]
        self.closed = False
        with self:
            self._life: int = self._words[LIVES + index] % 0xFFFF + 1
            self._words[LIVES + index] = self._life
            self._words[ATTACHED] = max(self._words[ATTACHED], index + 1)

    @staticmethod
    def create(path: str, slots: int = SLOTS) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _bytes(slots))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, _bytes(slots))  # or a full disk would kill whoever writes to it
            with mmap.mmap(file, 0) as memory:
                _begin(memory, slots)
        finally:
            os.close(file)

    def __enter__(self) -> None:
        self._mutex.acquire()
        if self._file is not None:
            self._locked = self._lock(self._file)
        self._now = int(self._clock() * MICRO)  # not before it is locked: it never goes back

    def __exit__(self, *_: object) -> None:
        if self._locked and self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._locked = False
        self._mutex.release()

    def find(self, name: str, *, take: bool = True) -> Slot | None:
        """The name's slot, brought up to date. None: it has none, and `take` is false or none is free."""
        digest = _digest(name)
        place, step = int.from_bytes(digest[:4]), int.from_bytes(digest[4:8]) | 1  # an odd step comes by all of them
        free: int | None = None
        for probe in range(min(_PROBES, self._slots)):
            base = HEADER + SLOT * ((place + probe * step) % self._slots)
            owner = self._memory[4 * base : 4 * base + _DIGEST_BYTES]
            if owner == digest:
                return self._advanced(base)
            if free is None and (owner == _NOBODY or self._slot(base).is_idle()):
                free = base
            if owner == _NOBODY:  # slots change hands, and are never empty again: it is not further on
                break
        if not take:
            return None
        if free is None:
            self._say_full()
            return None
        self._memory[4 * free : 4 * free + _DIGEST_BYTES] = digest
        return self._advanced(free)

    def _slot(self, base: int) -> Slot:
        return Slot(self._words, base, self._now, self._index, self._life)

    def _advanced(self, base: int) -> Slot:
        slot = self._slot(base)
        slot.advance()
        return slot

    def close(self) -> None:
        """What this process still held is free."""
        if self.closed:
            return
        with self:
            self.closed = True
            self._words[LIVES + self._index] = self._life % 0xFFFF + 1
        self._words.release()
        self._memory.close()
        if self._file is not None:
            os.close(self._file)

    def _lock(self, file: int) -> bool:
        """By the kernel, which unlocks what a killed process held. Not `lockf`: its locks belong to the process, and
        closing any other descriptor of the file would lose them. One that was stopped must not stop the others."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() < deadline:
                    time.sleep(20e-6)
                    continue
                if self._patience:
                    logger.error("limits are not exact: another process does not let go of them (%s)", error)
                    self._patience = 0.0  # this once was enough, until it can be had again
                return False
            self._patience = PATIENCE
            return True

    def _say_full(self) -> None:
        if not self._said_full:
            self._said_full = True
            logger.error("more names than the table of limits can hold were used in a minute: some have no limit")


def _bytes(slots: int) -> int:
    return 4 * (HEADER + SLOT * slots)


def _begin(memory: mmap.mmap, slots: int) -> None:
    with memoryview(memory).cast("I") as words:
        words[SIZE] = slots
        words[KIND] = _MAGIC


def _open(path: str) -> tuple[int, mmap.mmap]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(f"The file with the shared limits cannot be opened: {error}") from error
    memory = None
    if os.fstat(file).st_size >= _bytes(0):
        memory = mmap.mmap(file, 0)
        with memoryview(memory).cast("I") as words:
            if words[KIND] == _MAGIC and words[SIZE] > 0 and len(memory) == _bytes(words[SIZE]):
                return file, memory
    if memory is not None:
        memory.close()
    os.close(file)
    raise StartupError(f"{path} is not a file with shared limits.")


@functools.lru_cache(maxsize=4096)
def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
