"""A supervisor in a thread of the test, with workers that have no models, and the fleet of one API process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from syringa.config import Config, ModelSpec, filled_spec
from syringa.engine.client.engines import LocalFleet
from syringa.engine.interface import Engine
from syringa.engine.processes import manager
from syringa.engine.processes.supervisor import Supervisor
from syringa.types import EngineDelta, EngineRequest, ModelInfo, Sampling, Stopping


class Running:
    def __init__(self, supervisor: Supervisor, fleet: LocalFleet, folder: Path) -> None:
        self.supervisor, self.fleet, self.folder = supervisor, fleet, folder
        self.ready: list[ModelInfo | None] = []
        self.status: list[int] = []

    def processes(self) -> dict[str, int]:
        """The process of each model that has one."""
        found = list(self.supervisor.workers._all.values())
        return {each.options.model: each.process.pid for each in found if each.process is not None}

    def sockets(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name not in ("control.sock", "limits"))


def specs(*names: str, config: Config) -> list[ModelSpec]:
    """Models that do what their names say; the first is the default one."""
    made = [ModelSpec(id=name, path=name) for name in names]
    return [filled_spec(spec, config, default=index == 0) for index, spec in enumerate(made)]


@contextlib.asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, models: Sequence[ModelSpec], config: Config
) -> AsyncIterator[Running]:
    monkeypatch.setattr(manager, "WORKER_MODULE", "tests.engine.processes.stub_worker")
    with tempfile.TemporaryDirectory(prefix="syringa-test-") as folder, socket.socket() as listener:
        supervisor = Supervisor(config, models[0], listener, folder)
        supervisor.apis = []
        fleet = LocalFleet(str(Path(folder) / "control.sock"), config)
        fleet.set_specs(models)
        made = Running(supervisor, fleet, Path(folder))
        thread = threading.Thread(target=lambda: made.status.append(supervisor.run(made.ready.append)))
        thread.start()
        await fleet.start()
        try:
            yield made
        finally:
            await fleet.close()
            supervisor.ending = True
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive()
            assert made.processes() == {}


def request(name: str, tokens: int = 3) -> EngineRequest:
    sampling, stopping = Sampling(seed=1), Stopping(max_tokens=tokens)
    return EngineRequest(id=name, prompt=list(range(1, tokens + 1)), sampling=sampling, stopping=stopping)


async def answer(engine: Engine, name: str = "r", tokens: int = 3, begun: asyncio.Event | None = None) -> list[int]:
    """What the engine answers a request with."""
    got: list[int] = []

    def take(delta: EngineDelta) -> bool:
        got.extend(delta.tokens)
        if begun is not None:
            begun.set()
        return delta.finish is not None

    await engine.submit(request(name, tokens), take)
    return got


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not come true in time"
        await asyncio.sleep(0.02)
