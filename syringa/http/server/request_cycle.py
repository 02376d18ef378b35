"""One request and its response on an HTTP connection.

Extends uvicorn's cycle for responses that consist of many small parts: a stream writes without a coroutine per part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_MAX_JOINED_BYTES = 1 << 16  # joining the head with a larger body would cost more than a second write
_BODILESS_STATUSES = (204, 304)

_date_second, _date = 0, b""


def date_header() -> list[tuple[bytes, bytes]]:
    """Return the `date` header. It is formatted on demand: a timer would wake the process every second."""
    global _date_second, _date
    if (now := int(time.time())) != _date_second:
        _date_second, _date = now, formatdate(now, usegmt=True).encode()
    return [(b"date", _date)]


class RequestCycle(RequestResponseCycle):
    """Sends the head together with the first part of the body. `write` and `finish` send without waiting."""

    on_disconnect: Callable[[], None] | None = None  # called if the client disconnects before the response is complete
    can_skip_body = True  # the rest of an unread body is short; otherwise an early response ends the connection
    _head: bytes | None = None
    _until_close = False  # the end of the connection ends the body

    def disconnect(self) -> None:
        """Record that the client disconnected, or that the rest of its request is not read."""
        self.abandon()
        self.message_event.set()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def abandon(self) -> None:
        """Send nothing more of the response."""
        self.disconnected = True

    def write(self, parts: list[bytes]) -> bool:
        """Write more of a chunked body, each part as a chunk. Return False if `send` would have to wait for the client
        to read."""
        if self.flow.write_paused or not self.chunked_encoding:
            return False
        if not self.disconnected and not self.response_complete:
            if len(parts) == 1 and self._head is None:
                self.transport.write(b"%x\r\n%b\r\n" % (len(parts[0]), parts[0]))
            else:
                self._write_with_head(_chunks(parts))
        return True

    def finish(self, parts: list[bytes]) -> bool:
        """Like `write`, and complete the response."""
        if self.flow.write_paused or not self.chunked_encoding:
            return False
        if not self.disconnected:
            self._write_with_head(_chunks(parts) + b"0\r\n\r\n")
            self._complete()
        return True

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"unexpected ASGI message {kind}: a response is one start and then its body")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        if self.waiting_for_100_continue:
            # The client was not told to continue: what it sends next may be the body or another request.
            self.waiting_for_100_continue = self.keep_alive = False
        if self.more_body and not self.can_skip_body:
            self.keep_alive = False
        lines = [b"%b: %b\r\n" % header for header in (*date_header(), *headers)]
        for name, value in headers:
            if name == b"content-length":
                self.chunked_encoding, self.expected_content_length = False, int(value)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None:
            bodiless = self.scope["method"] == "HEAD" or status in _BODILESS_STATUSES
            self._until_close = not bodiless and self.scope["http_version"] == "1.0"  # which has no chunks
            self.chunked_encoding = not bodiless and not self._until_close
            if self.chunked_encoding:
                lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            self.response_started = False
            raise RuntimeError("a response header contains a line break")
        self._head = STATUS_LINE[status] + head + b"\r\n"

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length, body = 0, b""
        elif self.chunked_encoding:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                body += b"0\r\n\r\n"
        elif not self._until_close:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (self.expected_content_length and not more):
                raise RuntimeError("the length of the response body differs from its content-length")
        self._write_with_head(body)
        if not more:
            self._complete()

    def _write_with_head(self, data: bytes) -> None:
        head, self._head = self._head, None
        if head is not None:
            if len(data) > _MAX_JOINED_BYTES:
                self.transport.write(head)
            else:
                data = head + data
        if data:
            self.transport.write(data)

    def _complete(self) -> None:
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive and not self.more_body:  # with more to receive, the connection lingers before it closes
            self.transport.close()
        self.on_response()


def _chunks(parts: list[bytes]) -> bytes:
    return b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts])
