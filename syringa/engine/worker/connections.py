"""The connections of a worker's clients, and the thread that accepts them and writes heartbeats.

The thread works beside the step loop: neither a client that is slow to prove who it is nor a long step holds up the
other. The step loop gets connections of verified clients only.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from syringa.cluster.tls import describe_tls_error
from syringa.engine.client import protocol
from syringa.engine.client.transport import Listener, Stream, TlsStream

logger = logging.getLogger("syringa.worker")

HANDSHAKE_SECONDS = 10.0
MAX_HANDSHAKES = 64  # at the same time; then the oldest gives way
ACCEPT_RETRY_SECONDS = 0.1  # after an error such as too many open files

_HEARTBEAT = protocol.frame(protocol.Heartbeat())


class ClientConnection:
    """The connection of an API process. The step loop and the heartbeat thread share it, so a lock guards the stream.

    Both hold the lock for non-blocking calls only.
    """

    def __init__(self, client_id: int, stream: Stream) -> None:
        self.client_id = client_id
        self.stream = stream
        self.decoder = protocol.worker_decoder()
        self.inbox: list[protocol.ToWorker | msgspec.MsgspecError] = []  # received during a step, and not handled yet
        self.unsent = bytearray()
        self._lock = threading.Lock()
        self._closed = False

    def send(self, data: bytes = b"") -> None:
        """Send as much as possible of what is unsent and of `data`; the rest stays unsent. Raises `OSError`."""
        with self._lock:
            self.unsent += data
            self._flush()

    def receive(self, size: int) -> bytes:
        """Return what has arrived; nothing at the end. Raises `OSError`, and `BlockingIOError` if nothing has."""
        with self._lock:
            return self.stream.recv(size)

    def beat(self) -> bool:
        """Send a heartbeat. Return whether a part of it is left for the step loop to send.

        Nothing is sent while data is on its way: it tells the client as much.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._closed or self.unsent:
                return False
            self.unsent += _HEARTBEAT
            with contextlib.suppress(OSError):  # the step loop notices when it reads
                self._flush()
            return bool(self.unsent)
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.stream.close()

    def _flush(self) -> None:
        if self.unsent:
            with contextlib.suppress(BlockingIOError):
                del self.unsent[: self.stream.send(self.unsent)]


class _Handshake:
    """A TLS connection whose client is not verified yet."""

    def __init__(self, stream: TlsStream, peer: str, deadline: float) -> None:
        self.stream, self.peer, self.deadline = stream, peer, deadline


class ConnectionThread(threading.Thread):
    """Accepts clients, and calls `on_heartbeat` at regular intervals."""

    def __init__(
        self,
        listeners: Sequence[Listener],
        on_connection: Callable[[Stream], None],
        on_heartbeat: Callable[[], None],
        *,
        interval: float = protocol.HEARTBEAT_SECONDS,
        handshake_seconds: float = HANDSHAKE_SECONDS,
        max_handshakes: int = MAX_HANDSHAKES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Both callbacks run in this thread. `on_connection` takes over the stream of a verified client."""
        super().__init__(daemon=True, name="connections")
        self._on_connection, self._on_heartbeat, self._clock = on_connection, on_heartbeat, clock
        self._interval, self._handshake_seconds, self._max_handshakes = interval, handshake_seconds, max_handshakes
        self._listeners = listeners
        self._handshakes: dict[int, _Handshake] = {}  # by file descriptor, the oldest first
        self._stopped = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        for listener in listeners:
            self._selector.register(listener.socket, selectors.EVENT_READ, listener)

    def run(self) -> None:
        beat_at = self._clock()
        while not self._stopped:
            now = self._clock()
            if now >= beat_at:
                self._on_heartbeat()
                beat_at = now + self._interval
            self._expire(now)
            next_at = min([beat_at, *(each.deadline for each in self._handshakes.values())])
            for key, _ in self._selector.select(max(next_at - now, 0.0)):
                match key.data:
                    case Listener() as listener:
                        self._accept(listener)
                    case _Handshake() as handshake if handshake.stream.fileno() in self._handshakes:
                        self._continue(handshake)

    def stop(self) -> None:
        """End the thread and close the listeners, and the connections that were not handed over."""
        self._stopped = True
        self._wake_writer.send(b"!")
        if self.is_alive():
            self.join()
        for handshake in self._handshakes.values():
            handshake.stream.close()
        self._selector.close()
        for listener in self._listeners:
            listener.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _accept(self, listener: Listener) -> None:
        try:
            stream, peer = listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone already
            return
        except OSError as error:
            logger.error("worker: a connection cannot be accepted: reason=%r", error.strerror)
            time.sleep(ACCEPT_RETRY_SECONDS)
            return
        if not isinstance(stream, TlsStream):
            self._on_connection(stream)
            return
        handshake = _Handshake(stream, peer, self._clock() + self._handshake_seconds)
        self._handshakes[stream.fileno()] = handshake
        self._selector.register(stream, selectors.EVENT_READ, handshake)
        if len(self._handshakes) > self._max_handshakes:
            oldest = next(iter(self._handshakes.values()))
            self._refuse(oldest, "too many connections without a completed handshake")

    def _continue(self, handshake: _Handshake) -> None:
        stream = handshake.stream
        try:
            stream.handshake()
        except BlockingIOError:
            events = selectors.EVENT_WRITE if stream.wants_write else selectors.EVENT_READ
            self._selector.modify(stream, events, handshake)
        except OSError as error:
            self._refuse(handshake, describe_tls_error(error))
        else:
            self._remove(handshake)
            self._on_connection(stream)

    def _expire(self, now: float) -> None:
        for handshake in [each for each in self._handshakes.values() if now >= each.deadline]:
            self._refuse(handshake, "it did not complete the handshake in time")

    def _refuse(self, handshake: _Handshake, reason: str) -> None:
        logger.warning("worker: connection refused: peer=%s reason=%r", handshake.peer, reason)
        self._remove(handshake)
        handshake.stream.close()

    def _remove(self, handshake: _Handshake) -> None:
        del self._handshakes[handshake.stream.fileno()]
        self._selector.unregister(handshake.stream)
