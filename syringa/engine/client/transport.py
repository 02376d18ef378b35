"""Connections between model workers and their clients: Unix sockets, and TCP with mutual TLS.

An address is "unix:PATH" or "tcp:HOST:PORT", with an IPv6 address in brackets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from syringa.cluster.tls import TlsFiles, check_role, client_context, server_context
from syringa.engine.client import protocol
from syringa.errors import ConfigError

logger = logging.getLogger("syringa.transport")

P = TypeVar("P", bound=asyncio.BaseProtocol)

CONNECT_SECONDS = 10.0  # for a connection to another machine, with its handshake
RECORD_BYTES = 1 << 14  # the largest TLS record
BACKLOG = 64
# A peer that is gone without a word is noticed by the kernel after about 30 seconds.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}


class Address(NamedTuple):
    """Where a worker listens: the path of a Unix socket, or host and port."""

    kind: Literal["unix", "tcp"]
    host: str  # of "unix", the path
    port: int = 0

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.host}"
        return f"tcp:[{self.host}]:{self.port}" if ":" in self.host else f"tcp:{self.host}:{self.port}"


def parse_address(text: str) -> Address:
    """Return the parts of an address. Raises `ConfigError`."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest and "\0" not in rest:
        return Address("unix", rest)
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if kind != "tcp" or not host or not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"the address {text!r}: expected unix:PATH or tcp:HOST:PORT")
    return Address("tcp", host, int(port))


class Stream(Protocol):
    """What workers need of a non-blocking connection: that of `socket.socket`."""

    def fileno(self) -> int: ...
    def send(self, data: bytes | bytearray, /) -> int: ...
    def recv(self, size: int, /) -> bytes: ...
    def close(self) -> None: ...


class TlsStream:
    """The server's end of a non-blocking TLS connection. Its methods raise `BlockingIOError` where a socket's do.

    Only one thread may use it at a time.
    """

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        """`connection`, which this takes over, is connected and non-blocking."""
        self.wants_write = False  # whether `handshake` waits until the socket can be written
        self._tls = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def fileno(self) -> int:
        return self._tls.fileno()

    def handshake(self) -> None:
        """Continue the handshake. It is over, and the client is verified as an API server, when this does not raise."""
        try:
            self._tls.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as blocked:
            self.wants_write = isinstance(blocked, ssl.SSLWantWriteError)
            raise BlockingIOError from None
        check_role(self._tls.getpeercert(), "client")

    def send(self, data: bytes | bytearray) -> int:
        """Send what the kernel accepts. After `BlockingIOError`, the next call must begin with the same bytes."""
        sent = 0
        while sent < len(data):
            try:
                sent += self._tls.send(data[sent : sent + RECORD_BYTES])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                break
        if not sent:
            raise BlockingIOError
        return sent

    def recv(self, size: int) -> bytes:
        """Return about `size` bytes, and whatever OpenSSL has decrypted: the selector does not know of it."""
        chunks: list[bytes] = []
        received = 0
        while received < size or self._tls.pending():
            try:
                chunk = self._tls.recv(RECORD_BYTES)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if not chunks:
                    raise BlockingIOError from None
                break
            chunks.append(chunk)
            received += len(chunk)
            if len(chunk) < RECORD_BYTES and not self._tls.pending():
                break  # the end of a message, mostly
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def close(self) -> None:
        self._tls.close()


class Listener:
    """A listening socket of a worker, with TLS on TCP."""

    def __init__(self, listening: socket.socket, tls: TlsFiles | None = None, host: str = "") -> None:
        """`host`: the name by which clients reach it, which its certificate has. Raises `ConfigError` for `tls`."""
        self.socket = listening
        self._host = host
        self._files = tls
        self._context: ssl.SSLContext | None = None
        self._modified: tuple[int, ...] = ()
        if tls is not None:
            self._context, self._modified = server_context(tls), tls.modified()

    @property
    def address(self) -> Address:
        """The address, with the port that the system chose if none was given."""
        name = self.socket.getsockname()
        if self.socket.family == socket.AF_UNIX:
            return Address("unix", name)
        return Address("tcp", self._host or name[0], name[1])

    def accept(self) -> tuple[socket.socket | TlsStream, str]:
        """Return a new connection and the peer's address for logs. A TLS connection has to complete its handshake.

        Raises `OSError`, of which `ConnectionError` if the peer has gone again.
        """
        connection, peer = self.socket.accept()
        connection.setblocking(False)
        if self._files is None:
            return connection, "local"
        self._reload(self._files)
        assert self._context is not None
        try:
            set_tcp_options(connection)
            return TlsStream(connection, self._context), f"{peer[0]}:{peer[1]}"
        except OSError:
            connection.close()
            raise ConnectionAbortedError from None

    def close(self) -> None:
        self.socket.close()

    def _reload(self, files: TlsFiles) -> None:
        """Read certificates again that were renewed. Unusable ones are reported, and the old ones stay."""
        with contextlib.suppress(OSError):
            modified = files.modified()
            if modified != self._modified:
                self._modified = modified
                try:
                    self._context = server_context(files)
                    logger.info("worker: certificates read again: file=%s", files.certificate)
                except ConfigError as error:
                    logger.error("worker: renewed certificates are not used: reason=%r", error.message)


def listen(address: str, tls: TlsFiles | None = None) -> Listener:
    """Listen at an address; port 0: one that is free. Raises `ConfigError`, also for TCP without TLS."""
    place = parse_address(address)
    try:
        if place.kind == "unix":
            return Listener(protocol.listen(place.host))
        if tls is None:
            raise ConfigError(f"cannot listen at {address}: a worker uses TCP only with the certificates of a cluster")
        family, _, _, _, name = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(name)
            listening.listen(BACKLOG)
            listening.setblocking(False)
            return Listener(listening, tls, place.host)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise ConfigError(f"cannot listen at {address}: {error.strerror}") from None


async def connect(address: Address, tls: TlsFiles | None, factory: Callable[[], P]) -> tuple[Any, P]:
    """Connect a protocol to a worker and return it with its transport.

    Raises `OSError`, of which `ssl.SSLError` is one, and `ConfigError`. A worker that refuses the certificate of this
    process says so after this returns: the protocol's `connection_lost` gets the reason.
    """
    loop = asyncio.get_running_loop()
    if address.kind == "unix":
        return await loop.create_unix_connection(factory, address.host)
    if tls is None:
        raise ConfigError(f"cannot connect to {address}: this needs the certificates of a cluster")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connected = await loop.create_connection(
                factory, address.host, address.port, ssl=client_context(tls), server_hostname=address.host
            )
    except TimeoutError:
        raise TimeoutError(f"no answer within {CONNECT_SECONDS:g} seconds") from None
    with contextlib.suppress(OSError):  # it may have ended already
        set_tcp_options(transport.get_extra_info("socket"))
    return transport, connected


def set_tcp_options(connection: socket.socket) -> None:
    """Send small messages at once, and notice peers that are gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:  # they differ between systems
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
