"""The Redis that keeps the state of Ray's head: whether it can be used, before Ray tries for a minute."""

from __future__ import annotations

import socket

from syringa.cluster.tls import describe_tls_error
from syringa.errors import ConfigError

PASSWORD_VARIABLE = "RAY_REDIS_PASSWORD"
CONNECT_SECONDS = 5.0


def check_redis(address: str, password: str = "") -> None:
    """Raise `ConfigError` unless a Redis at HOST:PORT accepts the password; none if it is empty."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--redis {address!r}: expected HOST:PORT")
    commands = ([["AUTH", password]] if password else []) + [["PING"]]
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS) as connection:
            connection.sendall(b"".join(map(_encode, commands)))
            with connection.makefile("rb") as replies:
                answers = [replies.readline(1000).decode(errors="replace").strip() for _ in commands]
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--redis {address}: cannot be reached: {describe_tls_error(error)}") from None
    if problem := _problem(answers):
        raise ConfigError(f"--redis {address}: {problem}")


def _encode(command: list[str]) -> bytes:
    parts = [each.encode() for each in command]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _problem(answers: list[str]) -> str:
    """Return in words what is wrong, by the answers to AUTH, if that was sent, and PING."""
    *authentication, pong = answers
    if authentication and authentication[0].startswith("-"):
        return f"it refuses the password in {PASSWORD_VARIABLE}: {authentication[0][1:]}"
    if pong == "+PONG":
        return ""
    if pong.startswith("-NOAUTH"):
        return f"it requires a password: set {PASSWORD_VARIABLE}"
    return f"it refuses this machine: {pong[1:]}" if pong.startswith("-") else "it does not answer as a Redis"
