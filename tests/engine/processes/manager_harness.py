"""A worker manager whose clock, memory and processes are controlled by the test."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

from syringa.config import Config
from syringa.engine.client import protocol
from syringa.engine.loading.model_size import ModelSize
from syringa.engine.processes.control import AcquireModel, SupervisorReport, WorkerState, worker_key
from syringa.engine.processes.health import HealthPage
from syringa.engine.processes.manager import WorkerManager
from syringa.engine.processes.nvml import GpuMemory
from syringa.engine.worker.options import WorkerOptions
from syringa.types import EngineStats
from tests.engine.processes.stub_worker import INFO

GB = 1 << 30


class FakeProcess:
    """A worker process and its socket, controlled by the test."""

    pid = -1

    def __init__(self, options: WorkerOptions, clock: Callable[[], float]) -> None:
        self.options = options
        self.health = HealthPage(options.health_fd, clock)
        self.stdin = None
        self.status: int | None = None
        self.signals: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(options.socket)
        self._listener.listen()
        self._frames = protocol.worker_decoder()
        self._connection: socket.socket | None = None

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.signals.append("TERM")

    def kill(self) -> None:
        self.signals.append("KILL")

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def send(self, message: protocol.FromWorker) -> None:
        if self._connection is None:
            self._connection, _ = self._listener.accept()
            self._connection.setblocking(False)
        self._connection.sendall(protocol.frame(message))

    def received(self) -> list[protocol.ToWorker]:
        assert self._connection is not None
        try:
            return list(self._frames.feed(self._connection.recv(1 << 16)))
        except BlockingIOError:
            return []

    def end(self, status: int = 0) -> None:
        self.status = status
        for each in (self._connection, self._listener):
            if each is not None:
                each.close()


harnesses: list[ManagerHarness] = []  # of the current test, closed by the fixture


class ManagerHarness:
    """A worker manager with the clock, memory and processes of the test."""

    def __init__(self, folder: str, **settings: Any) -> None:
        harnesses.append(self)
        self.now, self.free = 1000.0, 100 * GB
        self.gpu: GpuMemory | None = None  # the only one
        self.gpus: list[GpuMemory] = []  # several
        self.reports: list[SupervisorReport] = []
        self.processes: list[FakeProcess] = []
        self.selector = selectors.DefaultSelector()
        self.workers = WorkerManager(
            folder, Config(**settings), self.selector, self.reports.append,
            spawn=self._spawn, clock=lambda: self.now, free=lambda: self.free,
            gpus=lambda: self.gpus or ([self.gpu] if self.gpu else []),
        )  # fmt: skip

    @property
    def published(self) -> list[WorkerState]:
        return [report for report in self.reports if isinstance(report, WorkerState)]

    def close(self) -> None:
        for process in self.processes:
            process.end()
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()

    def _spawn(self, options: WorkerOptions) -> Any:
        self.processes.append(FakeProcess(options, lambda: self.now))
        return self.processes[-1]

    def advance(self, seconds: float) -> None:
        """Let time pass at once, like a supervisor that was suspended."""
        self.now += seconds
        self.workers.tick()

    def run_for(self, seconds: float, *beating: FakeProcess) -> None:
        """Let time pass in ticks, with heartbeats of these processes."""
        for _ in range(round(2 * seconds)):
            for process in beating:
                process.health.beat()
            self.advance(0.5)

    def acquire(
        self,
        name: str,
        idle_timeout: float = 0.0,
        *,
        restart: bool = False,
        opportunistic: bool = False,
        replicas: tuple[int, int] = (1, 1),
    ) -> str:
        options = WorkerOptions(socket="", model=name)
        low, high = replicas
        self.workers.acquire(
            AcquireModel(options, idle_timeout, restart, opportunistic, min_replicas=low, max_replicas=high)
        )
        self.workers.tick()
        self.workers.tick()  # connect
        return worker_key(options)

    def load(self, name: str, idle_timeout: float = 0.0, *, restart: bool = False) -> FakeProcess:
        self.acquire(name, idle_timeout, restart=restart)
        process = self.processes[-1]
        process.send(protocol.Ready(INFO))
        self.stats(process, steps=1)
        return process

    def stats(self, process: FakeProcess, **values: Any) -> None:
        process.send(protocol.StatsReply(EngineStats(**values)))
        self.workers.tick()

    def state(self, name: str) -> WorkerState | None:
        key = worker_key(WorkerOptions(socket="", model=name))
        states = [each for each in self.workers.reports() if isinstance(each, WorkerState)]
        return next((state for state in states if state.key == key), None)

    def status(self, name: str) -> str:
        state = self.state(name)
        return state.status if state else "unknown"

    def replicas(self, name: str) -> dict[str, str]:
        """Return the status of each replica of a model, by id."""
        state = self.state(name)
        return {each.id: each.status for each in state.replicas} if state else {}


def model_size(weights: int) -> ModelSize:
    """Return the sizes of a model with so many weights and no KV cache."""
    sizes = {"int8": weights, "bf16": 2 * weights, "fp32": 4 * weights}
    return ModelSize(
        name="m", architecture="M", format="GGUF", parameters=weights, native=True, weights=sizes, max_model_len=16
    )


def retire_message(process: FakeProcess) -> protocol.Retire | None:
    return next((each for each in process.received() if isinstance(each, protocol.Retire)), None)
