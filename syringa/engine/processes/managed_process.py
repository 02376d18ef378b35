"""Child processes that exit when their parent does, however it exits.

A child's standard input is a pipe from its parent. Its first line holds the child's options as JSON, so that no secret
appears in a process list. Nothing follows; end of file means that the parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

import msgspec

T = TypeVar("T")

EXIT_CANNOT_START = 78  # starting again will not help
EXIT_NO_MEMORY, EXIT_NO_GPU_MEMORY = 75, 76  # starting again may help once other models are unloaded
# Exit statuses of a child that has printed the reason to stderr.
REPORTED_STATUSES = (EXIT_CANNOT_START, EXIT_NO_MEMORY, EXIT_NO_GPU_MEMORY)

# Delay before a restart, doubled after each failure. A process that ran for HEALTHY_SECONDS resets it.
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 30.0
HEALTHY_SECONDS = 30.0


class ManagedProcess:
    """A process that is restarted whenever it exits."""

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._start = start
        self._backoff = MIN_BACKOFF_SECONDS
        self._start_at = 0.0
        self._started_at = 0.0

    def poll(self) -> int | None:
        """Start the process if it is due. Return its exit status if it has just exited."""
        now = time.monotonic()
        if self.process is None:
            if now >= self._start_at:
                self.process = self._start()
                self.starts += 1
                self._started_at = now
            return None
        status = self.process.poll()
        if status is None:
            return None
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None
        if now - self._started_at > HEALTHY_SECONDS:
            self._backoff = MIN_BACKOFF_SECONDS
        self._start_at = now + self._backoff
        self._backoff = min(2 * self._backoff, MAX_BACKOFF_SECONDS)
        return status

    def stop(self, grace: float) -> None:
        """Terminate the process, and kill it after `grace` seconds."""
        if self.process is not None:
            terminate(self.process, grace)
            self.process = None

    def stop_after(self, seconds: float) -> None:
        """Close the process's standard input, at which it exits, and kill it after so many seconds."""
        if self.process is not None:
            if self.process.stdin is not None:
                self.process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
            self.stop(0.0)


def spawn(
    module: str,
    options: msgspec.Struct,
    *,
    pass_fds: tuple[int, ...] = (),
    environment: Mapping[str, str] | None = None,
    python: str = sys.executable,
) -> subprocess.Popen[bytes]:
    """Start `python -m module` with `options` and open file descriptors. `environment`: variables in addition.

    The child starts with SIGINT blocked: Ctrl-C reaches all processes, also one that is still importing its modules.
    """
    variables = {**os.environ, **environment} if environment else None
    command = [python, "-m", module]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=pass_fds, env=variables)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # what has arrived meanwhile is handled now
    send_options(child, options)
    return child


def send_options(child: subprocess.Popen[bytes], options: msgspec.Struct) -> None:
    """Write the first line of a child's standard input. If it has already exited, the caller's poll will see that."""
    assert child.stdin is not None
    try:
        child.stdin.write(msgspec.json.encode(options) + b"\n")
        child.stdin.flush()
    except BrokenPipeError:
        with contextlib.suppress(BrokenPipeError):  # nothing may stay in the buffer, or closing it later fails
            child.stdin.close()


def attach_to_parent(options_type: type[T], *, watch: bool = True) -> T:
    """Read the options of this child process, and exit when the parent does.

    Without `watch`, the caller has to exit at the end of its standard input, and no thread is started.
    """
    line = sys.stdin.buffer.readline()
    if not line:
        raise SystemExit("this is started by `syringa serve`, not by hand")
    if watch:
        threading.Thread(target=_exit_with_parent, daemon=True, name="parent-watch").start()
    return msgspec.json.decode(line, type=options_type)


def _exit_with_parent() -> None:
    # Not sys.stdin: its lock would still be held when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    os._exit(0)


def terminate(child: subprocess.Popen[bytes], grace: float) -> None:
    """Send SIGTERM, and SIGKILL after `grace` seconds."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.stdin is not None:
        child.stdin.close()


def exit_with_reason(reason: str, status: int, file: str) -> NoReturn:
    """Exit this child process. The reason is printed for the user and written to `file` for the parent."""
    print(f"syringa: {reason}", file=sys.stderr)
    with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as out:
        out.write(reason)
    sys.exit(status)


def describe_exit(status: int) -> str:
    """Return an exit status in words."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-status).name
        causes = {"SIGKILL": ", perhaps out of memory", "SIGBUS": ", perhaps a model file was truncated while in use"}
        return f"signal {name}" + causes.get(name, "")
    return f"signal {-status}"
