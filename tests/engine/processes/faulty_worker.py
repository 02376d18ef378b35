"""A worker process with a fault in its engine, run as `python -m tests.engine.processes.faulty_worker`.

A step that computes a prompt with the token `CRASH_TOKEN` kills the process; one with `LATE_CRASH_TOKEN` does so after
a few tokens.
"""

from __future__ import annotations

import os
import signal

from syringa.engine.execution.executor import ClientDelta
from syringa.engine.execution.sync import SyncExecutor
from syringa.engine.scheduling.scheduler_output import SchedulerOutput
from syringa.engine.worker import server

CRASH_TOKEN, LATE_CRASH_TOKEN = 150, 151
LATE = 3  # generated tokens


def main() -> None:
    step = SyncExecutor.step

    def faulty_step(self: SyncExecutor, output: SchedulerOutput) -> list[ClientDelta]:
        for sequence in (item.sequence for item in output.scheduled):
            late = LATE_CRASH_TOKEN in sequence.request.prompt and sequence.generated >= LATE
            if late or CRASH_TOKEN in sequence.request.prompt:
                os.kill(os.getpid(), signal.SIGKILL)
        return step(self, output)

    SyncExecutor.step = faulty_step  # type: ignore[method-assign]
    server.main()


if __name__ == "__main__":
    main()
