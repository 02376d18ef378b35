"""The grammar probes of a server: one per model, started when an API server asks for it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syringa.engine.processes import managed_process
from syringa.engine.structured_output.probe_protocol import ProbeOptions, probe_key

logger = logging.getLogger("syringa.supervisor")

PROBE_MODULE = "syringa.engine.structured_output.probe"
RESTART_SECONDS = 2.0  # between two starts of a probe


def probe_path(folder: str, options: ProbeOptions) -> str:
    """Return the path of a probe's socket in the runtime directory."""
    return str(Path(folder) / f"probe-{probe_key(options)}.sock")


class GrammarProbes:
    """Start probes on demand. One that exits, because it was idle or by a fault, is started again when it is needed."""

    def __init__(
        self,
        folder: str,
        *,
        spawn: Callable[[ProbeOptions], subprocess.Popen[bytes]] = lambda options: managed_process.spawn(
            PROBE_MODULE, options
        ),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._spawn, self._clock = folder, spawn, clock
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by path of the socket
        self._started: dict[str, float] = {}

    def acquire(self, options: ProbeOptions) -> None:
        """Start the probe with these options unless it runs."""
        path = probe_path(self._folder, options)
        self.tick()
        now = self._clock()
        if path in self._processes or now - self._started.get(path, -RESTART_SECONDS) < RESTART_SECONDS:
            return
        self._started[path] = now
        with contextlib.suppress(OSError):
            os.unlink(path)
        self._processes[path] = self._spawn(msgspec.structs.replace(options, socket=path))

    def tick(self) -> None:
        """Forget the probes that have exited."""
        for path, process in list(self._processes.items()):
            if (status := process.poll()) is None:
                continue
            del self._processes[path]
            if process.stdin is not None:
                process.stdin.close()
            if status not in (0, -signal.SIGTERM):  # a service manager may stop all processes at once
                logger.error("grammar probe died: exit=%s", managed_process.describe_exit(status))

    def stop(self) -> None:
        for process in self._processes.values():
            managed_process.terminate(process, 0.0)
        self._processes.clear()
