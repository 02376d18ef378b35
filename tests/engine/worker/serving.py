"""A worker's server in a thread of the test, with an engine that repeats prompts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

from syringa.engine.client import protocol
from syringa.engine.client.transport import Listener, listen
from syringa.engine.worker.engine import GeneratingEngine
from syringa.engine.worker.server import WorkerServer
from syringa.types import EngineDelta, EngineRequest, EngineStats, SamplingParams, StopConditions
from tests.cluster.certificates import Certificates
from tests.engine.processes.stub_worker import INFO

HANG_SECONDS = 240.0  # limit of every wait: a test that reaches it has failed


class EchoCore(GeneratingEngine):
    """Answer each request with its prompt, one token per step; a resumed one with what is left of it.

    Steps wait while `hold` is in force.
    """

    def __init__(self) -> None:
        self.preparing = ()
        self.requests: list[EngineRequest] = []
        self.disconnected: list[int] = []
        self.stepping = threading.Event()  # set while a step waits
        self._go_on = threading.Event()
        self._go_on.set()
        self._running: deque[tuple[int, EngineRequest, int]] = deque()

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Let no step end."""
        self._go_on.clear()
        try:
            yield
        finally:
            self._go_on.set()

    def attach(self, wake: Callable[[], None], record_running: Callable[[list[bytes]], None]) -> None:
        """Steps need no wake-up, and nothing watches them."""

    @property
    def next_step_delay(self) -> float | None:
        return 0.0 if self._running else None

    def submit(self, request: EngineRequest, client_id: int = 0) -> None:
        self.requests.append(request)
        self._running.append((client_id, request, len(request.resumed[0].tokens) if request.resumed else 0))

    def abort(self, request_id: str, choice: int | None = None, client_id: int = 0) -> None:
        self._running = deque(each for each in self._running if (each[0], each[1].id) != (client_id, request_id))

    def abort_all(self, client_id: int) -> None:
        self.disconnected.append(client_id)
        self._running = deque(each for each in self._running if each[0] != client_id)

    def step(self) -> list[tuple[int, EngineDelta]]:
        if self._running and not self._go_on.is_set():
            self.stepping.set()
            self._go_on.wait(HANG_SECONDS)
        deltas = []
        for _ in range(len(self._running)):
            client_id, request, at = self._running.popleft()
            last = at + 1 == len(request.prompt)
            deltas.append(
                (client_id, EngineDelta(request.id, 0, [request.prompt[at]], finish="stop" if last else None))
            )
            if not last:
                self._running.append((client_id, request, at + 1))
        return deltas

    def take_refused(self) -> list[object]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running))


@contextlib.contextmanager
def serving(*listeners: Listener, heartbeat_seconds: float = 0.02) -> Iterator[WorkerServer]:
    """Run a server with an `EchoCore`, with frequent heartbeats."""
    server = WorkerServer(EchoCore(), protocol.Ready(INFO), listeners, heartbeat_seconds=heartbeat_seconds)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.stopping = True
        server.wake()
        thread.join(HANG_SECONDS)
        assert not thread.is_alive()


@contextlib.contextmanager
def tls_serving(certificates: Certificates, heartbeat_seconds: float = 0.02) -> Iterator[tuple[WorkerServer, str]]:
    """Run a server on TCP with the certificate of the cluster. Yield it with its address."""
    listener = listen("tcp:127.0.0.1:0", certificates.server)
    with serving(listener, heartbeat_seconds=heartbeat_seconds) as server:
        yield server, str(listener.address)


def core_of(server: WorkerServer) -> EchoCore:
    return cast("EchoCore", server.core)


def request(prompt: list[int], name: str = "a", **fields: Any) -> EngineRequest:
    return EngineRequest(
        id=name, prompt=prompt, sampling=SamplingParams(seed=1), stopping=StopConditions(max_tokens=9), **fields
    )


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another thread or task does."""
    async with asyncio.timeout(HANG_SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
