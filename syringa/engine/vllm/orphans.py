"""vLLM computes in child processes, which outlive a worker that is killed. A guard process ends them.

The worker and all of its descendants form a process group; the guard kills the group when the worker has ended, however
that happened.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys


def guard_children() -> None:
    """Start the guard of this process. To be called before any thread is started."""
    if not hasattr(os, "pidfd_open"):  # only on Linux
        return
    worker = os.getpid()
    with contextlib.suppress(PermissionError):  # it leads a session already
        os.setpgid(0, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork():
        return
    # The child has nothing of the worker's: closing its end of a pipe or socket must be noticed by the other end.
    try:
        ended = os.pidfd_open(worker)
        if os.getppid() == worker:
            os.closerange(0, ended)
            os.closerange(ended + 1, os.sysconf("SC_OPEN_MAX"))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            select.select([ended], [], [])
        os.killpg(os.getpgid(0), signal.SIGKILL)
    finally:
        os._exit(0)
