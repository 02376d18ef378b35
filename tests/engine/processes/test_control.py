from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import msgspec
import pytest

from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.processes import control
from syringa.engine.processes.control import Drop, Link, State, ToSupervisor, Want, key_of
from syringa.engine.worker.server import WorkerOptions

OPTIONS = WorkerOptions(socket="", model="a")


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def ends(selector: selectors.BaseSelector) -> Iterator[tuple[Link[ToSupervisor], socket.socket]]:
    here, there = socket.socketpair()
    link = Link(here, control.supervisor_frames(), selector)
    with there:
        yield link, there
        link.close()


def test_a_worker_is_known_by_its_options() -> None:
    assert key_of(OPTIONS) == key_of(msgspec.structs.replace(OPTIONS, socket="/some/where"))
    assert key_of(OPTIONS) != key_of(msgspec.structs.replace(OPTIONS, dtype="fp32"))


def test_options_of_a_model() -> None:
    spec = ModelSpec(id="x", path="p", dtype="bf16", threads=3, kv_cache_gb=1.5, max_model_len=7, kv_cache_tokens=9)
    options = WorkerOptions.of(spec, Config(dtype="fp32", max_queue=5, step_tokens=6, model="other"), "s")
    assert (options.socket, options.model, options.dtype, options.threads) == ("s", "p", "bf16", 3)
    assert (options.kv_cache_gb, options.max_model_len, options.kv_cache_tokens) == (1.5, 7, 9)
    assert (options.max_queue, options.step_tokens) == (5, 6)


def test_messages_arrive_whole(ends: tuple[Link[ToSupervisor], socket.socket]) -> None:
    link, there = ends
    sent = [Want(OPTIONS, 2.5, True), Drop("k")]
    data = b"".join(map(protocol.frame, sent))
    there.sendall(data[:10])
    assert link.receive() == []
    there.sendall(data[10:])
    assert link.receive() == sent
    assert link.open
    state = State("k", "loaded", "path", "why")
    link.send(state)
    assert list(control.api_frames().feed(there.recv(1000))) == [state]


def test_an_end_and_nonsense_close_it(
    ends: tuple[Link[ToSupervisor], socket.socket], selector: selectors.BaseSelector
) -> None:
    link, there = ends
    there.sendall(b"\x03\0\0\0\xff\xff\xff")
    assert link.receive() == []
    assert not link.open
    assert not selector.get_map()
    link.send(State("k", "cold"))
    link.close()


def test_who_does_not_read_is_not_waited_for(ends: tuple[Link[ToSupervisor], socket.socket]) -> None:
    link, _ = ends
    for _ in range(5000):
        link.send(State("k", "cold", reason="x" * 1000))
    assert not link.open
