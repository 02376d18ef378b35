"""WebSocket connections: uvicorn's protocol, with limits on what a hostile client can cost.

- Small frames are limited by number: a client that sends more is disconnected with 1008.
- The fragments of a message are joined as they arrive; text that is not UTF-8 closes the connection with 1007.
- Handshakes that fail are answered in the error envelope.
- When connections run out, it may be closed in favor of another one, with 1013 (see `connection_pool`).

What is used of uvicorn's internals is checked by tests/http/server/test_uvicorn_contract.py.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
from uvicorn.protocols.utils import get_local_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from syringa.api.fields.common import ErrorBody, ErrorEnvelope
from syringa.http.context import CONNECTION
from syringa.http.server.connection_pool import ConnectionPool
from syringa.http.server.limits import WriteTimeout
from syringa.http.server.read_scheduler import ReadScheduler, SlicedReader

SMALL_FRAME_BYTES = 128
SMALL_FRAME_BURST = 5000  # small frames that may arrive at once
SMALL_FRAMES_PER_SECOND = 1000
LINGER_SECONDS = 2.0  # after a close: an immediate one could discard the last frame while the client is still sending
_INVALID_DATA, _POLICY_VIOLATION, _TRY_AGAIN_LATER = 1007, 1008, 1013
_TOO_MANY_CONNECTIONS = "too many connections: an idle one of the organization with the most was closed"
_TOO_MANY_FRAMES = "too many small frames: send a message in one frame"


class FrameLimit:
    """The small frames that a connection may send: a token bucket."""

    def __init__(self, now: float) -> None:
        self._left, self._updated_at = float(SMALL_FRAME_BURST), now

    def take(self, frames: int, now: float) -> bool:
        """Count frames. Return False if there were too many."""
        refilled = self._left + (now - self._updated_at) * SMALL_FRAMES_PER_SECOND
        self._left, self._updated_at = min(refilled, SMALL_FRAME_BURST) - frames, now
        return self._left >= 0


class WebSocketConnection(WriteTimeout, SlicedReader, WebSocketsSansIOProtocol):
    """A WebSocket connection. During shutdown, its handler closes it."""

    def __init__(self, pool: ConnectionPool, reads: ReadScheduler, **uvicorn_arguments: Any) -> None:
        """`pool`: the HTTP connection that is upgraded passes its place in it on."""
        super().__init__(**uvicorn_arguments)
        self._pool, self._reads = pool, reads
        self._frame_limit = FrameLimit(self.loop.time())
        self.conn = _ServerProtocol(max_size=self.config.ws_max_size, logger=self.logger)

    @property
    def idle(self) -> bool:
        """Whether it may be closed in favor of another connection while it waits for a message."""
        return self.handshake_complete

    def evict(self) -> None:
        """Close the connection in favor of another one."""
        if self.conn.state is State.OPEN:
            self.conn.fail(_TRY_AGAIN_LATER, _TOO_MANY_CONNECTIONS)
            self.close_sent = True
            self.stop_keepalive()
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()

    def claim(self, organization: str | None) -> None:
        self._pool.claim(self, organization)

    def local_port(self) -> int | None:
        _, port = get_local_addr(self.transport) or ("", None)
        return port

    def set_busy(self, busy: bool) -> None:
        (self._pool.begin if busy else self._pool.end)(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.remove(self)
        super().connection_lost(exc)

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:
            extensions = cast(dict[str, Any], self.scope["extensions"])
            extensions[CONNECTION] = self

    def shutdown(self) -> None:
        pass

    def abandon_response(self) -> None:
        pass

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated:
            super().data_received(data)
        else:
            self._receive_handshake(data)

    def _receive_handshake(self, head: bytes) -> None:
        self.conn.receive_data(head)
        self.handle_events()
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # A head that the WebSocket library cannot parse does not reach the app, which would close the connection.
            response = self.conn.data_to_send()
            if not any(response):
                response = [self.conn.reject(400, "The handshake is not valid HTTP/1.1.").serialize()]
            self.transport.write(b"".join(response))
            self.transport.close()

    def parse_slice(self, data: bytes | memoryview) -> int:
        conn = self.conn
        conn.receive_data(bytes(data))
        frames = [event for event in conn.events if isinstance(event, Frame)]
        small = sum(len(frame.data) < SMALL_FRAME_BYTES for frame in frames)
        if small and not self._frame_limit.take(small, self.loop.time()):
            self._close_flooding_client()
        elif conn.parser_exc is not None:
            self.handle_parser_exception()
        else:
            self.handle_events()
        return len(frames)

    def is_read_paused(self) -> bool:
        return self.read_paused

    async def receive(self) -> Any:
        message = await super().receive()
        if self.has_unparsed_data:  # comes first, but uvicorn may have resumed reading
            self.transport.pause_reading()
        return message

    def handle_cont(self, event: Frame) -> None:
        fragments: list[Any] = self.frames
        if not isinstance(fragments[0], bytearray):
            fragments[0] = bytearray(fragments[0])
        fragments[0] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not _is_utf8(self.frames[0]):  # uvicorn's would log it as an error
            self.frames = []
            if not self.close_sent:
                self.conn.send_close(_INVALID_DATA)
                self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    def handle_parser_exception(self) -> None:
        """Close the connection with the code that was sent, after the client had time to read it."""
        closing = self.conn.close_sent
        assert closing is not None
        self.queue.put_nowait({"type": "websocket.disconnect", "code": closing.code, "reason": closing.reason})
        self.close_sent = True
        self.stop_keepalive()
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.write_eof()
        self.discard_input()
        self.read_paused = False
        self.resume_socket()
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _close_flooding_client(self) -> None:
        if self.conn.state is State.OPEN:
            self.conn.events_received()  # not handled
            self.conn.fail(_POLICY_VIOLATION, _TOO_MANY_FRAMES)
            self.handle_parser_exception()
        else:  # the handshake is incomplete, or the client goes on after it was told that the connection is closed
            self.transport.abort()


def _is_utf8(data: bytes | bytearray) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class _ServerProtocol(ServerProtocol):
    """Rejects handshakes in the error envelope."""

    def reject(self, status: Any, text: str) -> Response:
        response = super().reject(status, text)
        code = response.status_code
        message = " ".join(text.split()) or "The WebSocket handshake was rejected."
        kind = "server_error" if code >= 500 else "invalid_request_error"
        response.body = msgspec.json.encode(ErrorEnvelope(ErrorBody(message, kind, None, "handshake_failed")))
        del response.headers["Content-Length"], response.headers["Content-Type"]
        response.headers["Content-Length"] = str(len(response.body))
        response.headers["Content-Type"] = "application/json"
        return response
