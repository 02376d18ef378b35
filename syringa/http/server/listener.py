"""The listening socket of the server. Imports little: `syringa serve` binds it before it starts any process."""

from __future__ import annotations

import contextlib
import errno
import socket

from syringa.config import Config
from syringa.errors import StartupError
from syringa.store.url import locate


def check(config: Config) -> None:
    """Raise `StartupError` for settings that would otherwise fail at the first request."""
    locate(config.database)


def listen(config: Config) -> socket.socket:
    """Return the listening socket, bound before anything slow starts. Raises `StartupError` if the port is taken."""
    return _listen(config, config.port, "--port")


def listen_for_ollama(config: Config) -> socket.socket | None:
    """Return the listening socket of `ollama_port`; None if there is no such port. Raises like `listen`."""
    return _listen(config, config.ollama_port, "--ollama-port") if config.ollama_port >= 0 else None


def _listen(config: Config, port: int, flag: str) -> socket.socket:
    where = f"{config.host}:{port}"
    try:
        found = socket.getaddrinfo(config.host.strip("[]"), port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {where}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _enable_dead_peer_detection(listener)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(
                f"port {port} on {config.host} is in use: stop what listens there, or choose another with {flag}"
            ) from None
        if error.errno == errno.EACCES:
            raise StartupError(f"no permission to listen on {where}: choose a port above 1023 with {flag}") from None
        raise StartupError(f"cannot listen on {where}: {error.strerror}") from None
    listener.set_inheritable(True)
    return listener


def _enable_dead_peer_detection(listener: socket.socket) -> None:
    """Make the kernel close connections whose client has vanished or does not read, after a minute or two.

    Connections inherit these options from the listener.
    """
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 120_000}
    for name, value in options.items():
        with contextlib.suppress(AttributeError, OSError):  # not available on every system
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
