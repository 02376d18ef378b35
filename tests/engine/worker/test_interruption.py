"""Steps of background requests that are given up for a request that arrives."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import Any

import pytest

from syringa.engine.client import protocol
from syringa.engine.client.transport import listen
from syringa.engine.execution.sync import SyncExecutor
from syringa.engine.scheduling.request_class import MIN_ALONE_TOKENS
from syringa.engine.worker.core import EngineCore
from syringa.engine.worker.engine import InterruptibleEngine
from syringa.engine.worker.server import WorkerServer
from tests.engine.conftest import Driver, request
from tests.engine.processes.stub_worker import INFO
from tests.engine.worker.serving import EchoCore, wait_until
from tests.engine.worker.serving import request as echo_request

PROMPTS = {"a": [3, 4, 5] * 9, "b": [6, 7] * 20, "c": [8] * 5}


class Interruption:
    """Is in force from a given call on, in the middle of a step."""

    def __init__(self) -> None:
        self.calls, self.after = 0, 1 << 30

    def __call__(self) -> bool:
        self.calls += 1
        return self.calls > self.after

    def begin(self, after: int) -> None:
        self.calls, self.after = 0, after

    def end(self) -> None:
        self.after = 1 << 30


def run(core: EngineCore, interruption: Interruption, *, interrupt: bool) -> dict[Any, list[int]]:
    driver = Driver(core)
    for name, prompt in PROMPTS.items():
        driver.submit(request(name, prompt, choices=2, max_tokens=6, seed=1, background=True))
    after = 0
    while core.busy:
        if interrupt:  # at each part of the model in turn
            interruption.begin(after % 3)
            core.scheduler.background_steps.protected = False
            before = {key: len(answer.tokens) for key, answer in driver.answers.items()}
            driver.step(1)
            assert {key: len(answer.tokens) for key, answer in driver.answers.items()} == before
            interruption.end()
            after += 1
        driver.step(1)
    return {key: answer.tokens for key, answer in driver.answers.items()}


def test_interrupted_steps_do_not_change_tokens(tiny_engine: Callable[..., EngineCore]) -> None:
    outputs = []
    for interrupt in (False, True):
        core, interruption = tiny_engine(), Interruption()
        core.interrupt_when(interruption)
        assert isinstance(core.executor, SyncExecutor)
        if core.executor.is_interrupted is None:
            pytest.skip("there are no compiled kernels for this CPU")
        outputs.append(run(core, interruption, interrupt=interrupt))
        assert core.pool.free + core.pool.cached == core.pool.total
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 6


def test_step_with_another_request_is_not_interrupted(tiny_engine: Callable[..., EngineCore]) -> None:
    core, interruption = tiny_engine(), Interruption()
    core.interrupt_when(interruption)
    interruption.begin(0)
    driver = Driver(core)
    driver.submit(request("a", PROMPTS["a"], max_tokens=2, background=True), request("b", PROMPTS["b"], max_tokens=2))
    driver.step(2)
    assert len(driver.answers["b", 0].tokens) == 2
    assert interruption.calls == 0


def test_interruption_makes_background_steps_shorter(tiny_engine: Callable[..., EngineCore]) -> None:
    core, interruption = tiny_engine(), Interruption()
    core.interrupt_when(interruption)
    if core.executor.is_interrupted is None:  # type: ignore[attr-defined]
        pytest.skip("there are no compiled kernels for this CPU")
    steps = core.scheduler.background_steps
    steps._alone.limit = 8 * MIN_ALONE_TOKENS
    core.submit(request("a", PROMPTS["a"], max_tokens=2, background=True))
    interruption.begin(0)
    for limit in (4, 2, 1, 1):
        assert core.step() == []
        assert steps._alone.limit == limit * MIN_ALONE_TOKENS
    assert core.step()  # the smallest one may be given up once: they must end at some time


class InterruptibleCore(EchoCore):
    """Asks in each step, until there is no reason to wait, whether it is interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.is_interrupted: Callable[[], bool] = lambda: False

    def interrupt_when(self, is_interrupted: Callable[[], bool]) -> None:
        self.is_interrupted = is_interrupted


def test_server_notices_urgent_requests_in_the_middle_of_a_step(tmp_path: Any) -> None:
    core = InterruptibleCore()
    assert isinstance(core, InterruptibleEngine)
    server = WorkerServer(core, protocol.Ready(INFO), [listen(f"unix:{tmp_path}/socket")])  # type: ignore[arg-type]
    server._connections.start()
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect(f"{tmp_path}/socket")
        wait_until(lambda: server._accepted)
        server.receive()
        assert not core.is_interrupted()
        background = protocol.frame(protocol.Submit(echo_request([1], "background", background=True)))
        client.sendall(background)
        wait_readable(server)
        assert not core.is_interrupted()
        urgent = protocol.frame(protocol.Submit(echo_request([2], "urgent")))
        client.sendall(urgent[:7])
        wait_readable(server)
        assert not core.is_interrupted()  # it is incomplete
        client.sendall(urgent[7:])
        wait_readable(server)
        assert core.is_interrupted()
        assert core.is_interrupted()  # until it is handled
        assert core.requests == []
        server.receive()
        assert [each.id for each in core.requests] == ["background", "urgent"]
        assert not core.is_interrupted()
        client.sendall(protocol.frame(protocol.Abort("urgent"))[:5] + b"\xff" * 40)
        client.close()
        wait_readable(server)
        assert not core.is_interrupted()  # what is malformed, and the end of the connection, wait for the step's end
        assert core.disconnected == []
        server.wake()  # it would wait: there is nothing to compute any more
        server.receive()
        assert core.disconnected == [1]
    finally:
        client.close()
        server._close()


def wait_readable(server: WorkerServer) -> None:
    """Wait until something has arrived from the client."""
    (connection,) = server.clients.values()
    with selectors.DefaultSelector() as selector:
        selector.register(connection.stream, selectors.EVENT_READ)
        assert selector.select(60)
