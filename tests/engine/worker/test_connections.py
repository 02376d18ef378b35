from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from syringa.cluster.tls import client_context
from syringa.engine.client import protocol
from syringa.engine.client.transport import Listener, Stream, listen
from syringa.engine.worker.connections import ClientConnection, ConnectionThread
from tests.cluster.certificates import Certificates
from tests.engine.worker.serving import HANG_SECONDS, wait_until

HEARTBEAT = protocol.frame(protocol.Heartbeat())


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def pair() -> Iterator[tuple[ClientConnection, socket.socket]]:
    """A worker's end of a connection, and the client's."""
    own, peer = socket.socketpair()
    own.setblocking(False)
    peer.settimeout(HANG_SECONDS)
    connection = ClientConnection(1, own)
    yield connection, peer
    connection.close()
    peer.close()


def fill(connection: ClientConnection) -> None:
    """Send until the peer's buffer is full."""
    while not connection.unsent:
        connection.send(b"x" * 65536)


def test_heartbeat_is_sent_at_once(pair: tuple[ClientConnection, socket.socket]) -> None:
    connection, peer = pair
    assert not connection.beat()
    assert peer.recv(100) == HEARTBEAT


def test_heartbeats_do_not_pile_up_for_a_client_that_does_not_read(
    pair: tuple[ClientConnection, socket.socket],
) -> None:
    connection, _ = pair
    fill(connection)
    unsent = bytes(connection.unsent)
    for _ in range(10):
        assert not connection.beat()
    assert connection.unsent == unsent


def test_heartbeat_that_does_not_fit_is_left_to_the_step_loop_once(
    pair: tuple[ClientConnection, socket.socket],
) -> None:
    connection, peer = pair
    fill(connection)
    connection.unsent.clear()
    assert connection.beat()
    assert not connection.beat()
    assert connection.unsent == HEARTBEAT
    while peer.recv(1 << 20, socket.MSG_DONTWAIT).endswith(b"x"):
        connection.send()
    assert not connection.unsent


def test_heartbeat_of_a_closed_or_broken_connection_is_ignored(
    pair: tuple[ClientConnection, socket.socket],
) -> None:
    connection, peer = pair
    peer.close()
    connection.beat()
    connection.close()
    assert not connection.beat()


class Accepting:
    """A connection thread with the clock of the test."""

    def __init__(self, listener: Listener, **options: Any) -> None:
        self.now = 1000.0
        self.streams: list[Stream] = []
        self.beats = 0
        self.address: Any = listener.socket.getsockname()
        self.thread = ConnectionThread(
            [listener], self.streams.append, self._beat, interval=0.01, clock=lambda: self.now, **options
        )

    def _beat(self) -> None:
        self.beats += 1

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self.address)
        connection.settimeout(HANG_SECONDS)
        return connection


@contextlib.contextmanager
def accepting(certificates: Certificates, **options: Any) -> Iterator[Accepting]:
    accepting = Accepting(listen("tcp:127.0.0.1:0", certificates.server), **options)
    accepting.thread.start()
    yield accepting
    accepting.thread.stop()
    for stream in accepting.streams:
        stream.close()


def ended(connection: socket.socket) -> bool:
    """Wait for the end of a connection, and return whether nothing was received."""
    try:
        return connection.recv(100) == b""
    except ConnectionError:
        return True


def test_client_that_does_not_begin_its_handshake_does_not_hold_up_others(certificates: Certificates) -> None:
    context = client_context(certificates.client)
    with (
        accepting(certificates) as accepted,
        accepted.connect(),
        context.wrap_socket(accepted.connect(), server_hostname="127.0.0.1"),
    ):
        wait_until(lambda: accepted.streams)


def test_handshake_ends_after_its_time_limit(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "syringa")
    with accepting(certificates, handshake_seconds=10.0) as accepted, accepted.connect() as half_open:
        half_open.send(b"\x16\x03\x01\x02")  # the beginning of a ClientHello
        wait_until(lambda: accepted.thread._handshakes)
        beats = accepted.beats
        accepted.now += 9.9
        wait_until(lambda: accepted.beats > beats)
        assert accepted.thread._handshakes
        accepted.now += 0.2
        assert ended(half_open)
    assert "did not complete the handshake in time" in caplog.text
    assert not accepted.streams


def test_oldest_handshake_gives_way_when_there_are_too_many(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "syringa")
    with accepting(certificates, max_handshakes=2) as accepted, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(accepted.connect()) for _ in range(3)]
        assert ended(connections[0])
        wait_until(lambda: len(accepted.thread._handshakes) == 2)
    assert "too many connections without a completed handshake" in caplog.text


def test_unix_connections_are_handed_over_without_a_handshake(tmp_path: Path) -> None:
    accepted = Accepting(listen(f"unix:{tmp_path}/a.sock"))
    accepted.thread.start()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(accepted.address)
        wait_until(lambda: accepted.streams)
        accepted.streams[0].send(b"hello")
        assert client.recv(10) == b"hello"
    accepted.thread.stop()
    accepted.streams[0].close()
    assert accepted.thread not in threading.enumerate()


def test_renewed_certificates_are_used_for_new_connections(
    certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "syringa")

    def serial(accepted: Accepting) -> object:
        with client_context(certificates.client).wrap_socket(accepted.connect(), server_hostname="127.0.0.1") as tls:
            certificate = tls.getpeercert()
            assert certificate is not None
            return certificate["serialNumber"]

    with accepting(certificates) as accepted:
        first = serial(accepted)
        assert serial(accepted) == first
        certificates.files("server", {"server"})
        second = serial(accepted)
        assert second != first
        Path(certificates.server.certificate).write_text("not a certificate")
        assert serial(accepted) == second
    assert "renewed certificates are not used" in caplog.text


def test_tcp_connections_have_no_send_delay_and_notice_dead_peers(certificates: Certificates) -> None:
    with accepting(certificates) as accepted:
        context = client_context(certificates.client)
        with context.wrap_socket(accepted.connect(), server_hostname="127.0.0.1"):
            wait_until(lambda: accepted.streams)
            with socket.socket(fileno=os.dup(accepted.streams[0].fileno())) as connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def test_tls_1_2_is_refused(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "syringa")
    context = client_context(certificates.client)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with accepting(certificates) as accepted, accepted.connect() as plain:
        with pytest.raises(ssl.SSLError, match="PROTOCOL_VERSION"):
            context.wrap_socket(plain, server_hostname="127.0.0.1")
        wait_until(lambda: "does not use TLS 1.3" in caplog.text)
    assert not accepted.streams
