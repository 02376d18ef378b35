"""What vLLM prints in this process and in those that it starts, where the reasons of their failures are.

While the model is loaded it is held back: a failure is reported in one line, not by tracebacks of several processes.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time

MAX_LINES = 10_000
QUIET_SECONDS, SETTLE_SECONDS = 0.2, 3.0

_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("direct cause of the following exception", "During handling of the above exception")
# The last line of a traceback, which vLLM's logger prefixes with the process, the time and the place.
_EXCEPTION = re.compile(r"(?:^|[\s\]])(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception)): (.+)$")


class ProcessOutput:
    """Takes standard output and error of this process and its children; `sys.stderr` of this process is as before."""

    def __init__(self, *, hold: bool) -> None:
        """`hold`: keep lines back until the model is loaded; otherwise they are passed on at once."""
        self._hold, self._loading = hold, True
        self._lines: list[str] = []  # printed while the model is loaded
        self._read_at = time.monotonic()
        self._lock = threading.Lock()
        sys.stdout.flush()
        sys.stderr.flush()
        self._target = os.dup(2)
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
        os.register_at_fork(after_in_child=_restore_stderr)
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(writer)
        threading.Thread(target=self._read, args=(reader,), daemon=True, name="vllm-output").start()

    def pass_on(self, *, held: bool = False) -> None:
        """From now on write everything at once. `held`: also what was held back."""
        with self._lock:
            for line in self._lines if held and self._hold else ():
                self._write(line)
            self._lines, self._hold, self._loading = [], False, False

    def settle(self) -> None:
        """Wait until what was printed before, by processes that have ended, has been read."""
        began = time.monotonic()
        while time.monotonic() < min(began + SETTLE_SECONDS, max(began, self._read_at) + QUIET_SECONDS):
            time.sleep(QUIET_SECONDS / 4)

    def first_exception(self) -> str:
        """Return the first exception that was printed with a traceback since loading began, or an empty string.

        Of a chain of exceptions, it is the last one, which says most.
        """
        found, in_traceback, is_chained = "", False, False
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            if _TRACEBACK in line:
                if found and not is_chained:
                    break
                in_traceback, is_chained = True, False
            elif any(phrase in line for phrase in _CHAINED):
                is_chained = True
            elif in_traceback and (match := _EXCEPTION.search(line.rstrip())):
                found, in_traceback = f"{match[1]}: {match[2]}", False
        return found

    def _read(self, reader: int) -> None:
        with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with self._lock:
                    self._read_at = time.monotonic()
                    if self._loading and len(self._lines) < MAX_LINES:
                        self._lines.append(line)
                    if not self._hold:
                        self._write(line)

    def _write(self, line: str) -> None:
        data = line.encode(errors="replace")
        while data:
            data = data[os.write(self._target, data) :]


def _restore_stderr() -> None:
    """Let a forked process of vLLM print where its others do."""
    if sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__
