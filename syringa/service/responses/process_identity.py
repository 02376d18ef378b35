"""The name of this process in the store, from which another process can tell whether it is still there.

A heartbeat tells it too, but only after a silence. On the same machine the process table knows at once, so what a
killed server was running is reported as failed by the one that is started in its place.
"""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

_SEPARATOR = "/"


def name() -> str:
    """A new name for this process; no two are the same."""
    parts = (_machine(), str(os.getpid()), _began(os.getpid()) or "", uuid.uuid4().hex[:8])
    return _SEPARATOR.join(parts)


def is_gone(owner: str) -> bool:
    """Whether that process has certainly ended. One on another machine may always be alive."""
    machine, _, rest = owner.partition(_SEPARATOR)
    pid, _, rest = rest.partition(_SEPARATOR)
    began = rest.partition(_SEPARATOR)[0]
    if machine != _machine() or not pid.isdigit():
        return False
    if not began:
        return not _is_running(int(pid))
    return _began(int(pid)) != began


def _machine() -> str:
    """Processes with the same answer see each other: one boot of one machine, and one space of process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname().replace(_SEPARATOR, "-")


def _began(pid: int) -> str | None:
    """When a process began, in ticks since the boot. None: it does not run, or this system does not say."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state[0] in "ZX" else state[19]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is there, and is another user's
    return True
