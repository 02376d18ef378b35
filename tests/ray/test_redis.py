"""The check of the Redis that keeps the state of Ray's head."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from syringa.errors import ConfigError
from syringa.ray import redis
from syringa.ray.redis import check_redis


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the server may get no time for seconds on a busy machine."""
    monkeypatch.setattr(redis, "CONNECT_SECONDS", 120.0)


@contextlib.contextmanager
def server(*replies: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """Accept one connection, and send these bytes. Yield the address, and what was received."""
    received: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            received.append(connection.recv(1000))
            connection.sendall(b"".join(replies))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}", received
        thread.join()


def test_redis_is_asked_with_the_password() -> None:
    with server(b"+OK\r\n", b"+PONG\r\n") as (address, received):
        check_redis(address, "hübsch")
    assert received == ["*2\r\n$4\r\nAUTH\r\n$7\r\nhübsch\r\n*1\r\n$4\r\nPING\r\n".encode()]
    with server(b"+PONG\r\n") as (address, received):
        check_redis(address)
    assert received == [b"*1\r\n$4\r\nPING\r\n"]


@pytest.mark.parametrize(
    ("password", "replies", "problem"),
    [
        ("", [b"-NOAUTH Authentication required.\r\n"], "it requires a password: set RAY_REDIS_PASSWORD"),
        ("x", [b"-WRONGPASS invalid\r\n", b"-NOAUTH\r\n"], "it refuses the password in RAY_REDIS_PASSWORD: WRONGPASS"),
        ("x", [b"-ERR AUTH without\r\n", b"+PONG\r\n"], "it refuses the password in RAY_REDIS_PASSWORD: ERR AUTH"),
        ("", [b"-DENIED protected mode\r\n"], "it refuses this machine: DENIED protected mode"),
        ("", [b"HTTP/1.1 400 Bad Request\r\n"], "it does not answer as a Redis"),
        ("", [], "it does not answer as a Redis"),
    ],
)
def test_redis_that_cannot_be_used_is_refused(password: str, replies: list[bytes], problem: str) -> None:
    with server(*replies) as (address, _), pytest.raises(ConfigError) as caught:
        check_redis(address, password)
    assert caught.value.message.startswith(f"--redis {address}: {problem}")


@pytest.mark.parametrize("address", ["redis", "redis:", ":6379", "redis:x"])
def test_address_of_redis_needs_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        check_redis(address)
