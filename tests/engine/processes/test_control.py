from __future__ import annotations

import errno
import math
import os
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.interface import ReplicaState
from syringa.engine.processes import control
from syringa.engine.processes.control import (
    MAX_UNSENT_BYTES,
    AcquireModel,
    KeepModel,
    MessageConnection,
    ReleaseModel,
    SupervisorRequest,
    WorkerState,
    merge_requests,
    worker_key,
)
from syringa.engine.worker.options import WorkerOptions

OPTIONS = WorkerOptions(socket="", model="a")


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as selector:
        yield selector


@pytest.fixture
def pair(selector: selectors.BaseSelector) -> Iterator[tuple[MessageConnection[SupervisorRequest], socket.socket]]:
    here, there = socket.socketpair()
    connection = MessageConnection(here, control.supervisor_decoder(), selector)
    with there:
        yield connection, there
        connection.close()


class BusyListener:
    """A listening socket whose `accept` fails as often as the test says."""

    def __init__(self, *errors: int) -> None:
        self.errors = list(errors)
        self.accepted: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, str]:
        if self.errors:
            number = self.errors.pop(0)
            raise OSError(number, os.strerror(number))
        self.accepted.append(socket.socket(socket.AF_UNIX))
        return self.accepted[-1], ""


def test_shortage_of_descriptors_delays_a_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "ACCEPT_PAUSE_SECONDS", 0.0)
    listener: Any = BusyListener(errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.EAGAIN)
    acceptor = control.Acceptor(listener)
    assert [acceptor.accept() for _ in range(4)] == [None] * 4
    accepted = acceptor.accept()
    assert accepted is listener.accepted[0]
    accepted.close()
    assert [each.getMessage() for each in caplog.records] == [
        "supervisor cannot accept a connection: error='Too many open files'"
    ]
    listener.errors = [errno.EBADF]
    with pytest.raises(OSError, match="Bad file descriptor"):
        acceptor.accept()


def test_worker_key_depends_on_options_except_socket() -> None:
    assert worker_key(OPTIONS) == worker_key(msgspec.structs.replace(OPTIONS, socket="/some/where"))
    assert worker_key(OPTIONS) != worker_key(msgspec.structs.replace(OPTIONS, dtype="fp32"))


def test_models_with_the_same_worker_keep_it_as_long_as_either_wants_it() -> None:
    preloaded = AcquireModel(OPTIONS, 0.0, True, name="a", min_replicas=2, max_replicas=2)
    idle = AcquireModel(OPTIONS, 60.0, name="b", max_replicas=3, pools=["night"])
    assert merge_requests(preloaded, idle) == AcquireModel(OPTIONS, 0.0, True, name="a", min_replicas=2, max_replicas=3)
    longer = AcquireModel(OPTIONS, 90.0, name="c", pools=["night", "day"])
    merged = merge_requests(idle, longer)
    assert (merged.idle_timeout, merged.restart, merged.pools) == (90.0, False, ["night", "day"])


def test_worker_options_combine_spec_and_config() -> None:
    spec = ModelSpec(id="x", path="p", dtype="bf16", threads=3, kv_cache_gb=1.5, max_model_len=7, kv_cache_tokens=9)
    options = WorkerOptions.from_config(spec, Config(dtype="fp32", max_queue=5, step_tokens=6, model="other"), "s")
    assert (options.socket, options.model, options.dtype, options.threads) == ("s", "p", "bf16", 3)
    assert (options.kv_cache_gb, options.max_model_len, options.kv_cache_tokens) == (1.5, 7, 9)
    assert (options.max_queue, options.step_tokens) == (5, 6)


def test_connection_reassembles_messages(pair: tuple[MessageConnection[SupervisorRequest], socket.socket]) -> None:
    connection, there = pair
    sent = [AcquireModel(OPTIONS, 2.5, True), ReleaseModel("k"), KeepModel("k", 0.5)]
    data = b"".join(map(protocol.frame, sent))
    there.sendall(data[:10])
    assert connection.receive() == []
    there.sendall(data[10:])
    assert connection.receive() == sent
    assert connection.open
    replica = ReplicaState("m-1", "draining", "unix:path", fingerprint="f", grace=math.inf)
    state = WorkerState("k", "loaded", "why", 1, 2, [replica], 60.0)
    connection.send(state)
    assert list(control.api_decoder().feed(there.recv(1000))) == [state]


def test_connection_closes_on_malformed_message(
    pair: tuple[MessageConnection[SupervisorRequest], socket.socket], selector: selectors.BaseSelector
) -> None:
    connection, there = pair
    there.sendall(b"\x03\0\0\0\xff\xff\xff")
    assert connection.receive() == []
    assert not connection.open
    assert not selector.get_map()
    connection.send(WorkerState("k", "cold"))
    connection.close()


def test_connection_closes_when_peer_does_not_read(
    pair: tuple[MessageConnection[SupervisorRequest], socket.socket],
) -> None:
    connection, _ = pair
    message = WorkerState("k", "cold", reason="x" * 100_000)
    for _ in range(2 * MAX_UNSENT_BYTES // 100_000):
        connection.send(message)
    assert not connection.open


def test_worker_options_have_address_and_certificates_if_workers_have_a_host(tmp_path: Path) -> None:
    spec = ModelSpec(id="a", path="p")
    options = WorkerOptions.from_config(spec, Config(worker_host="::1", cluster_dir=str(tmp_path)))
    assert options.listen == "tcp:[::1]:0"
    assert options.tls == ClusterFolder(tmp_path).files("server")
    plain = WorkerOptions.from_config(spec, Config())
    assert (plain.listen, plain.tls) == ("", None)
    assert worker_key(options) == worker_key(plain)
