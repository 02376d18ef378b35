"""The identity of a process in the store, by which another process can tell whether it has exited.

A missing heartbeat tells it too, but only after a timeout. On the same machine the process table tells at once, so a
server that replaces a killed one immediately fails the responses that it left behind.
"""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

_SEPARATOR = "/"


def new_identity() -> str:
    """Return a unique identity for this process: machine, process id, start time and a random part."""
    parts = (_machine(), str(os.getpid()), _start_time(os.getpid()) or "", uuid.uuid4().hex[:8])
    return _SEPARATOR.join(parts)


def has_exited(identity: str) -> bool:
    """Return whether that process has certainly exited. A process of another machine is assumed to be alive."""
    machine, _, rest = identity.partition(_SEPARATOR)
    pid, _, rest = rest.partition(_SEPARATOR)
    started = rest.partition(_SEPARATOR)[0]
    if machine != _machine() or not pid.isdigit():
        return False
    if not started:
        return not _is_running(int(pid))
    return _start_time(int(pid)) != started


def _machine() -> str:
    """Return the same text for processes that see each other: one boot of one machine, and one pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname().replace(_SEPARATOR, "-")


def _start_time(pid: int) -> str | None:
    """Return when a process started, in ticks since boot. None: it does not run, or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it belongs to another user
    return True
