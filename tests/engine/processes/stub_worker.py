"""A worker process without a model, run as `python -m tests.engine.processes.stub_worker`.

The name of the model selects its behavior: `fine`, `slow` (to load), `broken`, `crowded` (fits only alone), `huge`
(never fits), `doomed` (dies while loading). It answers every request with the prompt's tokens, one per step; a resumed
one with those that are left. A step with the token `CRASH` kills the process, and the first step of all with
`HANG_ONCE` does not end. While a test has called `hold`, a request gets no more than its first token.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from syringa.engine.client import protocol
from syringa.engine.processes import managed_process
from syringa.engine.worker.options import WorkerOptions
from syringa.engine.worker.server import WorkerServer, open_listeners, report_health
from syringa.types import EmbeddingResult, EngineDelta, EngineRequest, EngineStats, ModelInfo

STEP_SECONDS = 0.005
CRASH, HANG_ONCE = 7001, 7002
HOLD_FILE = "hold"

INFO = ModelInfo(
    architecture="Stub", dtype="none", max_model_len=1000, vocab_size=1000, parameters=0, kernels="none", threads=1,
    load_seconds=0.0,
)  # fmt: skip


@contextlib.contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Let no request end that begins meanwhile at a stub worker in this folder, however slow the test itself is."""
    file = folder / HOLD_FILE
    file.touch()
    try:
        yield
    finally:
        file.unlink()


class StubCore:
    def __init__(self, folder: Path) -> None:
        self._hang_file, self._hold_file = folder / "hung", folder / HOLD_FILE
        self.record_running: Callable[[list[bytes]], None] = lambda fingerprints: None
        self.preparing = ()
        self.steps = 0
        self._active = time.monotonic()
        self._running: deque[tuple[int, EngineRequest, list[int]]] = deque()

    def attach(self, wake: Callable[[], None], record_running: Callable[[list[bytes]], None]) -> None:
        self.record_running = record_running

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def next_step_delay(self) -> float | None:
        return 0.0 if self.busy else None

    def submit(self, request: EngineRequest, client_id: int = 0) -> None:
        before = len(request.resumed[0].tokens) if request.resumed else 0
        self._running.append((client_id, request, request.prompt[before:]))

    def abort(self, request_id: str, choice: int | None = None, client_id: int = 0) -> None:
        self._running = deque(each for each in self._running if (each[0], each[1].id) != (client_id, request_id))

    def abort_all(self, client_id: int) -> None:
        self._running = deque(each for each in self._running if each[0] != client_id)

    def take_embedded(self) -> list[tuple[int, EmbeddingResult]]:
        return []

    def step(self) -> list[tuple[int, EngineDelta]]:
        if not self._running:
            return []
        self.record_running([request.fingerprint for _, request, _ in self._running])
        tokens = {left[0] for _, _, left in self._running}
        if CRASH in tokens:
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG_ONCE in tokens and not self._hang_file.exists():
            self._hang_file.touch()
            threading.Event().wait()
        held = self._hold_file.exists()
        time.sleep(STEP_SECONDS)
        self.steps += 1
        self._active = time.monotonic()
        deltas = []
        for _ in range(len(self._running)):
            client_id, request, left = self._running.popleft()
            if held and len(left) < len(request.prompt):  # it has begun
                self._running.append((client_id, request, left))
                continue
            token, *rest = left
            deltas.append((client_id, EngineDelta(request.id, 0, [token], finish=None if rest else "stop")))
            if rest:
                self._running.append((client_id, request, rest))
        return deltas

    def take_refused(self) -> list[object]:
        return []

    def stats(self) -> EngineStats:
        idle = 0.0 if self.busy else time.monotonic() - self._active
        return EngineStats(running=len(self._running), steps=self.steps, idle_seconds=idle)


def main() -> None:
    options = managed_process.attach_to_parent(WorkerOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    health = report_health(options)
    listeners = open_listeners(options)
    kind = Path(options.model).name.partition("-")[0]
    others = {path.name for path in Path(options.socket).parent.glob("*.sock")}
    others -= {Path(options.socket).name, "control.sock"}
    if kind == "slow":
        time.sleep(0.5)
    elif kind == "broken":
        managed_process.exit_with_reason(
            "its file is cut short", managed_process.EXIT_CANNOT_START, options.reason_file
        )
    elif kind == "huge" or (kind == "crowded" and others):
        managed_process.exit_with_reason("it needs 9 GiB", managed_process.EXIT_NO_MEMORY, options.reason_file)
    elif kind == "doomed":
        os.kill(os.getpid(), signal.SIGKILL)
    core = StubCore(Path(options.socket).parent)
    worker = WorkerServer(core, protocol.Ready(INFO), listeners, health)  # type: ignore[arg-type]

    def stop(*_: object) -> None:
        worker.stopping = True
        worker.wake()

    signal.signal(signal.SIGTERM, stop)
    worker.run()


if __name__ == "__main__":
    main()
