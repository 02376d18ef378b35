"""A supervisor in a thread of the test process, with stub workers, and the engines of one API server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from syringa.config import Config, ModelSpec, complete_spec
from syringa.engine.client import model_replicas
from syringa.engine.client.engines import ModelEngines
from syringa.engine.interface import Engine
from syringa.engine.processes import worker_process
from syringa.engine.processes.supervisor import Supervisor
from syringa.fleet.cluster_records import ClusterRecords
from syringa.types import EngineDelta, EngineRequest, ModelInfo, SamplingParams, StopConditions
from tests.engine.processes import stub_worker

REPORT_SECONDS = 10.0  # for the supervisor to report the end of a worker: a stall of seconds changes no outcome


class SupervisorHarness:
    def __init__(self, supervisor: Supervisor, engines: ModelEngines, folder: Path) -> None:
        self.supervisor, self.engines, self.folder = supervisor, engines, folder
        self.ready: list[ModelInfo | None] = []
        self.status: list[int] = []

    def processes(self) -> dict[str, int]:
        """Return the process ids of running workers by model."""
        while True:
            with contextlib.suppress(
                RuntimeError, AttributeError
            ):  # the supervisor's thread has changed them meanwhile
                return self.supervisor.workers.processes()

    def hold(self) -> AbstractContextManager[None]:
        """Let no request end that begins meanwhile at a stub worker."""
        return stub_worker.hold(self.folder)

    def sockets(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name not in ("control.sock", "limits"))


def specs(*names: str, config: Config) -> list[ModelSpec]:
    """Return specs of stub models, which behave as their names say. The first is the default model."""
    made = [ModelSpec(id=name, path=name) for name in names]
    return [complete_spec(spec, config, default=index == 0) for index, spec in enumerate(made)]


@contextlib.asynccontextmanager
async def run_supervisor(
    monkeypatch: pytest.MonkeyPatch,
    models: Sequence[ModelSpec],
    config: Config,
    worker: str = "tests.engine.processes.stub_worker",
    records: ClusterRecords | None = None,
) -> AsyncIterator[SupervisorHarness]:
    """`worker`: the module that is run as a worker. On a cluster, the test runs the bridge."""
    monkeypatch.setattr(worker_process, "WORKER_MODULE", worker)
    monkeypatch.setattr(model_replicas, "REPORT_SECONDS", REPORT_SECONDS)
    with tempfile.TemporaryDirectory(prefix="syringa-test-") as folder, socket.socket() as listener:
        supervisor = Supervisor(config, models[0], listener, folder, records=records)
        supervisor.api_servers, supervisor.services = [], []
        engines = ModelEngines(str(Path(folder) / "control.sock"), config)
        engines.set_specs(models)
        made = SupervisorHarness(supervisor, engines, Path(folder))
        thread = threading.Thread(target=lambda: made.status.append(supervisor.run(made.ready.append)))
        await engines.start()  # before the supervisor runs: it may end at once, if the model cannot be loaded
        thread.start()
        try:
            yield made
        finally:
            await engines.close()
            supervisor.stopping = True
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()
            assert made.processes() == {}


def request(name: str, tokens: int = 3, prompt: list[int] | None = None) -> EngineRequest:
    sampling, stopping = SamplingParams(seed=1), StopConditions(max_tokens=tokens)
    return EngineRequest(id=name, prompt=prompt or list(range(1, tokens + 1)), sampling=sampling, stopping=stopping)


async def answer(
    engine: Engine,
    name: str = "r",
    tokens: int = 3,
    begun: asyncio.Event | None = None,
    prompt: list[int] | None = None,
) -> list[int]:
    """Return the tokens of a request, whose prompt is 1, 2, … by default."""
    got: list[int] = []

    def take(delta: EngineDelta) -> bool:
        got.extend(delta.tokens)
        if begun is not None:
            begun.set()
        return delta.finish is not None

    await engine.submit(request(name, tokens, prompt), take)
    return got


async def until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        await asyncio.sleep(0.02)
