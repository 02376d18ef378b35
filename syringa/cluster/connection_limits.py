"""Limits of the cluster's server: on connections, so that none holds up others, and on attempts with wrong tokens."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

MAX_ANONYMOUS = 64  # connections of clients that have not proved to be nodes
MAX_CONNECTIONS = 1024
MAX_PER_NODE = 16
ANONYMOUS_SECONDS = 20.0  # for a handshake, a request and its response

MAX_FAILURES = 10  # of an address, in FAILURE_SECONDS
FAILURE_SECONDS = 60.0
MAX_ADDRESSES = 4096  # that are remembered


class _Connection:
    def __init__(self, peer: str, deadline: float) -> None:
        self.peer, self.deadline = peer, deadline
        self.node = ""  # empty: not verified


class ConnectionTable:
    """The open connections of a server. Threads that serve them block; others are ended by closing their sockets."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_anonymous: int = MAX_ANONYMOUS,
        max_connections: int = MAX_CONNECTIONS,
        max_per_node: int = MAX_PER_NODE,
        anonymous_seconds: float = ANONYMOUS_SECONDS,
    ) -> None:
        self._clock, self._seconds = clock, anonymous_seconds
        self._max_anonymous, self._max_connections, self._max_per_node = max_anonymous, max_connections, max_per_node
        self._lock = threading.Lock()
        self._open: dict[socket.socket, _Connection] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: socket.socket, peer: str) -> bool:
        """Add a new connection; return False if there are too many. Among anonymous ones, another gives way."""
        with self._lock:
            anonymous = [(each, entry.peer) for each, entry in self._open.items() if not entry.node]
            if len(anonymous) >= self._max_anonymous:
                # The oldest of the address that has the most: a flood displaces itself.
                busiest = Counter(each for _, each in anonymous).most_common(1)[0][0]
                self._end(next(each for each, owner in anonymous if owner == busiest))
            if len(self._open) >= self._max_connections + self._max_anonymous:
                return False
            self._open[connection] = _Connection(peer, self._clock() + self._seconds)
            return True

    def replace(self, connection: socket.socket, wrapped: socket.socket) -> bool:
        """Go on with the TLS connection that has taken over the file descriptor of a connection.

        Return False if the connection was ended meanwhile. It had no descriptor by which to end it: close the other.
        """
        with self._lock:
            if (entry := self._open.pop(connection, None)) is None:
                return False
            self._open[wrapped] = entry
            return True

    def verify(self, connection: socket.socket, node: str) -> bool:
        """Record that the client is a node, which has no deadline. Return False if the node has too many."""
        with self._lock:
            entry = self._open.get(connection)
            if entry is None or sum(each.node == node for each in self._open.values()) >= self._max_per_node:
                return False
            entry.node = node
            return True

    def remove(self, connection: socket.socket) -> None:
        with self._lock:
            self._open.pop(connection, None)

    def expire(self) -> None:
        """End anonymous connections that have lasted too long."""
        with self._lock:
            now = self._clock()
            for connection, entry in list(self._open.items()):
                if not entry.node and now >= entry.deadline:
                    self._end(connection)

    def end_all(self) -> None:
        with self._lock:
            for connection in list(self._open):
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        """Forget a connection, and make the thread that serves it fail, which closes the socket."""
        del self._open[connection]
        with contextlib.suppress(OSError):
            # Not the method of an SSL socket: it would let the other thread go on without TLS for a moment.
            socket.socket.shutdown(connection, socket.SHUT_RDWR)


class FailureLimiter:
    """Counts failures by address; one with too many has to wait."""

    def __init__(self, clock: Callable[[], float], limit: int = MAX_FAILURES, seconds: float = FAILURE_SECONDS) -> None:
        self._clock, self._limit, self._seconds = clock, limit, seconds
        self._lock = threading.Lock()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_seconds(self, address: str) -> float:
        """Return after how many seconds an address may try again; 0: at once."""
        with self._lock:
            failures = self._failures.get(_network(address))
            if failures is None or len(failures) < self._limit:
                return 0.0
            return max(failures[0] + self._seconds - self._clock(), 0.0)

    def record(self, address: str) -> None:
        with self._lock:
            key = _network(address)
            self._failures.setdefault(key, deque(maxlen=self._limit)).append(self._clock())
            self._failures.move_to_end(key)
            if len(self._failures) > MAX_ADDRESSES:
                self._failures.popitem(last=False)


def _network(address: str) -> str:
    """Return what a client cannot change at will: its IPv4 address, or the first half of its IPv6 address."""
    parsed = ipaddress.ip_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)
