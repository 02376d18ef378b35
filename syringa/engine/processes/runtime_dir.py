"""The runtime directory of a server: sockets and files that its processes share, removed when it exits.

A supervisor that was killed cannot remove its directory; the next one does. A lock shows whether the owner is alive:
the kernel releases it however the process ends, and unlike process ids it works between containers that share a folder.
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
def runtime_dir() -> Iterator[str]:
    """Create a runtime directory, and remove those of servers that are gone."""
    _remove_stale(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        new = Path(folder) / "new"
        with new.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            new.rename(Path(folder) / _LOCK)  # renamed once locked, so that the file never exists unlocked
            yield folder


def _remove_stale(parent: Path) -> None:
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
