"""A server's folder for sockets and what its processes share. It goes with the server.

A supervisor that was killed cannot clear up after itself: the next one does. Whether a folder's owner lives is told by
a lock, which the kernel lets go however a process ends; process ids would not do, since containers may share a folder
and not their numbers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "syringa-serve-"
_LOCK = "lock"


@contextlib.contextmanager
def scratch() -> Iterator[str]:
    _clear_up(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        new = Path(folder) / "new"
        with new.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(Path(folder) / _LOCK)  # nobody ever sees it unlocked
            yield folder


def _clear_up(place: Path) -> None:
    """Removes what servers have left that are gone."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
