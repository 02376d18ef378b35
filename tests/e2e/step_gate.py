"""A real server whose workers compute only as many tokens as a test allows: `python -m tests.e2e.step_gate serve …`.

So a fault can be caused at a known point of all streams, however fast the machine is. Without arguments this is one of
the workers.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

MODULE = "tests.e2e.step_gate"
VARIABLE = "TEST_STEP_GATE"  # names the file in the environment of the server
WAIT_SECONDS = 0.002


class StepGate:
    """The test's side: a file that holds back the workers while it exists."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def close(self, tokens: int) -> None:
        """Let sequences have so many tokens of output, and no more. Workers still receive messages."""
        made = self._path.with_suffix(".new")
        made.write_text(str(tokens))
        made.replace(self._path)

    def open(self) -> None:
        self._path.unlink()


def hold_sequences(path: Path) -> None:
    """Make the engine of this process obey the file."""
    from syringa.engine.scheduling.scheduler import Scheduler
    from syringa.engine.worker.core import EngineCore

    step, schedule_sequence = EngineCore.step, Scheduler._schedule_sequence
    allowed: int | None = None

    def gated_step(core: EngineCore) -> Any:
        nonlocal allowed
        try:
            allowed = int(path.read_text())
        except FileNotFoundError:
            allowed = None
        deltas = step(core)
        if allowed is not None and not deltas:
            time.sleep(WAIT_SECONDS)
        return deltas

    def gated_schedule(scheduler: Scheduler, output: Any, sequence: Any, budget: int) -> int:
        if allowed is not None and sequence.generated >= allowed:
            return 0
        return schedule_sequence(scheduler, output, sequence, budget)

    EngineCore.step = gated_step  # type: ignore[method-assign, assignment]
    Scheduler._schedule_sequence = gated_schedule  # type: ignore[method-assign, assignment]


def main() -> None:
    if len(sys.argv) == 1:
        from syringa.engine.worker import server

        hold_sequences(Path(os.environ[VARIABLE]))
        server.main()
    else:
        from syringa import cli
        from syringa.engine.processes import worker_process

        worker_process.WORKER_MODULE = MODULE
        cli.main()


if __name__ == "__main__":
    main()
