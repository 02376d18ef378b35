from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from syringa.cluster.connection_limits import ConnectionTable, FailureLimiter

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Connections: the server's ends, and the clients'."""
    opened = [socket.socketpair() for _ in range(5)]
    yield opened
    for pair in opened:
        for each in pair:
            each.close()


def is_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False


def test_table_ends_the_oldest_connection_of_the_busiest_address(pairs: list[Pair]) -> None:
    table = ConnectionTable(lambda: 0.0, max_anonymous=3, max_connections=1, max_per_node=1)
    owned = [pair[0] for pair in pairs]
    for connection, peer in zip(owned[:3], ["10.0.0.1", "10.0.0.2", "10.0.0.2"], strict=True):
        assert table.add(connection, peer)
    assert table.verify(owned[0], "node")  # a node is not displaced
    assert not table.verify(owned[1], "node")  # it has as many connections as it may
    assert table.add(owned[3], "10.0.0.3")
    assert table.add(owned[4], "10.0.0.4")
    assert len(table) == 4
    assert [is_ended(pair[1]) for pair in pairs] == [False, True, False, False, False]


def test_table_is_full_when_nodes_have_all_connections(pairs: list[Pair]) -> None:
    table = ConnectionTable(lambda: 0.0, max_anonymous=1, max_connections=1)
    for index in range(2):
        assert table.add(pairs[index][0], "10.0.0.1")
        assert table.verify(pairs[index][0], "node")
    assert not table.add(pairs[2][0], "10.0.0.1")
    table.remove(pairs[0][0])
    assert table.add(pairs[2][0], "10.0.0.1")


def test_failures_are_counted_by_network_and_forgotten() -> None:
    now = 0.0
    limiter = FailureLimiter(lambda: now, limit=2, seconds=60.0)
    for address in ("10.0.0.1", "10.0.0.1", "2001:db8::1", "2001:db8::2"):
        assert limiter.wait_seconds(address) == 0.0
        limiter.record(address)
        now += 1.0
    assert limiter.wait_seconds("10.0.0.1") == 56.0
    assert limiter.wait_seconds("2001:db8::3") > 0
    assert limiter.wait_seconds("10.0.0.2") == 0.0
    now += 60.0
    assert limiter.wait_seconds("10.0.0.1") == 0.0


def test_table_ends_anonymous_connections_after_their_time(pairs: list[Pair]) -> None:
    now = 0.0
    table = ConnectionTable(lambda: now, anonymous_seconds=20.0)
    for server, _ in pairs[:2]:
        assert table.add(server, "10.0.0.1")
    assert table.verify(pairs[0][0], "node")
    now = 19.9
    table.expire()
    assert len(table) == 2
    now = 20.0
    table.expire()
    assert [is_ended(client) for _, client in pairs[:2]] == [False, True]
    assert not table.verify(pairs[1][0], "node")  # too late
    table.end_all()
    assert is_ended(pairs[0][1])
