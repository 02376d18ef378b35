"""Child processes that end with their parent, however that ends.

A child's standard input is a pipe from its parent. The first line is what the child needs to know, as JSON, so that no
secret stands in a process list; after that nothing is written, and the end of the pipe means that the parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import TypeVar

import msgspec

T = TypeVar("T")

CANNOT_START = 78  # the exit status for what starting again will not mend


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
