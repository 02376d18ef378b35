"""Child processes that end with their parent, however that ends.

A child's standard input is a pipe from its parent. The first line is what the child needs to know, as JSON, so that no
secret stands in a process list; after that nothing is written, and the end of the pipe means that the parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

T = TypeVar("T")

CANNOT_START = 78  # the exit status for what starting again will not mend
NO_MEMORY, NO_GPU_MEMORY = 75, 76  # for what may start when others have left
SAID = (CANNOT_START, NO_MEMORY, NO_GPU_MEMORY)  # a child that ends with one of these has told people why


# A child that dies again and again waits this long, twice as long each time, up to the last.
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 30.0
HEALTHY_SECONDS = 30.0  # one that lived this long starts again without a pause


class Child:
    """A process that should always be running."""

    def __init__(self, name: str, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self.name = name
        self._start = start
        self._pause = FIRST_PAUSE
        self._next = 0.0
        self._begun = 0.0
        self.process: subprocess.Popen[bytes] | None = None

    def tend(self) -> int | None:
        """Starts it if it is due. Returns the exit status if it has just ended."""
        now = time.monotonic()
        if self.process is None:
            if now >= self._next:
                self.process = self._start()
                self._begun = now
            return None
        status = self.process.poll()
        if status is None:
            return None
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None
        if now - self._begun > HEALTHY_SECONDS:
            self._pause = FIRST_PAUSE
        self._next = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return status

    def stop(self, grace: float) -> None:
        if self.process is not None:
            stop(self.process, grace)
            self.process = None


def spawn(module: str, options: msgspec.Struct, *, keep: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Starts `python -m module`, handing it `options` and the open file descriptors `keep`."""
    child = subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, pass_fds=keep)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once: whoever waits for it will see
        child.stdin.write(msgspec.json.encode(options) + b"\n")
        child.stdin.flush()
    return child


def begin(kind: type[T]) -> T:
    """The child's side: reads its options, and makes sure that it ends with its parent."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise SystemExit("this is started by `syringa serve`, not by hand")
    threading.Thread(target=_end_with_parent, daemon=True, name="parent-watch").start()
    return msgspec.json.decode(line, type=kind)


def _end_with_parent() -> None:
    # Not sys.stdin: its lock would still be held when the interpreter shuts down.
    while os.read(0, 4096):
        pass
    os._exit(0)


def stop(child: subprocess.Popen[bytes], grace: float) -> None:
    """Asks a child to end, and after `grace` seconds makes it."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    if child.stdin is not None:
        child.stdin.close()


def give_up(reason: str, status: int, file: str) -> NoReturn:
    """The child's end when it cannot do its work. People read why on the terminal, and its parent in `file`."""
    print(f"syringa: {reason}", file=sys.stderr)
    with contextlib.suppress(OSError), open(file, "w", encoding="utf-8") as out:
        out.write(reason)
    sys.exit(status)


def tell_exit(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"status {status}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-status).name
        return f"signal {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
    return f"signal {-status}"
