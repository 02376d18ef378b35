"""A real server whose workers read only as many layers as a test allows: `python -m tests.e2e.load_gate serve …`.

So a model can be seen while it is loaded, however fast the machine is. Without arguments this is one of the workers.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from syringa.engine.processes.health import HealthPage
from syringa.types import LoadPhase

MODULE = "tests.e2e.load_gate"
VARIABLE = "TEST_LOAD_GATE"  # names the file in the environment of the server
WAIT_SECONDS = 0.005


class LoadGate:
    """The test's side: a file that holds back the workers while it exists."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def close(self, layers: int) -> None:
        """Let models that are loaded from now on have so many layers, and those that are held back up to so many."""
        made = self._path.with_suffix(".new")
        made.write_text(str(layers))
        made.replace(self._path)

    def open(self) -> None:
        self._path.unlink()


def hold_layers(path: Path) -> None:
    """Make the loader of this process obey the file."""
    report_loading = HealthPage.report_loading

    def gated_report(page: HealthPage, phase: LoadPhase, done: int = 0, total: int = 0) -> None:
        report_loading(page, phase, done, total)
        while phase == "weights" and done >= _allowed(path, done):
            time.sleep(WAIT_SECONDS)

    HealthPage.report_loading = gated_report  # type: ignore[method-assign]


def _allowed(path: Path, done: int) -> int:
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return done + 1


def main() -> None:
    if len(sys.argv) == 1:
        from syringa.engine.worker import server

        hold_layers(Path(os.environ[VARIABLE]))
        server.main()
    else:
        from syringa import cli
        from syringa.engine.processes import worker_process

        worker_process.WORKER_MODULE = MODULE
        cli.main()


if __name__ == "__main__":
    main()
