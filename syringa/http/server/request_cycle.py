"""A request and its answer on a connection: uvicorn's, made for answers that come in many small parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_LARGE = 1 << 16  # from here on, joining costs more than it saves
_BODILESS = (204, 304)


_second, _date = 0, b""


def date_header() -> list[tuple[bytes, bytes]]:
    """As it is now: a clock that ticks for it would wake the process every second."""
    global _second, _date
    if (now := int(time.time())) != _second:
        _second, _date = now, formatdate(now, usegmt=True).encode()
    return [(b"date", _date)]


class Exchange(RequestResponseCycle):
    """The head waits for the first of the body, and goes out with it. `write` and `finish` send without waiting, for
    code that cannot. `left` is called when the client is gone before its answer was complete."""

    left: Callable[[], None] | None = None
    flowing = False  # whether chunks of its body can follow, for all we know
    _head: bytes | None = None
    _endless = False

    def leave(self) -> None:
        """The client is gone, or what it still sends does not matter any more."""
        self.stop()
        self.message_event.set()
        if self.left is not None:
            self.left()

    def stop(self) -> None:
        """Nothing more is sent."""
        self.disconnected, self.flowing = True, False

    def write(self, parts: list[bytes]) -> bool:
        """More of a body whose length is not known, each part a chunk of its own. False: the client has to read first,
        and `send` waits for that."""
        if self.flow.write_paused or not self.chunked_encoding:
            return False
        if not self.disconnected and not self.response_complete:
            if len(parts) == 1 and self._head is None:
                self.transport.write(b"%x\r\n%b\r\n" % (len(parts[0]), parts[0]))
            else:
                self._put(_chunks(parts))
        return True

    def finish(self, parts: list[bytes]) -> bool:
        """The same for the last of it."""
        if self.flow.write_paused or not self.chunked_encoding:
            return False
        if not self.disconnected:
            self._put(_chunks(parts) + b"0\r\n\r\n")
            self._complete()
        return True

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.start" and not self.response_started:
            self._begin(message["status"], message.get("headers", ()))
        elif kind == "http.response.body" and self.response_started and not self.response_complete:
            self._go_on(message.get("body", b""), more=message.get("more_body", False))
        else:
            raise RuntimeError(f"{kind} is not what comes next in an answer")

    def _begin(self, status: int, headers: Any) -> None:
        self.response_started = True
        if self.waiting_for_100_continue:
            # It was never told to go on: what comes next may be its body or another request.
            self.waiting_for_100_continue = self.keep_alive = False
        lines = [b"%b: %b\r\n" % header for header in (*date_header(), *headers)]
        for name, value in headers:
            if name == b"content-length":
                self.chunked_encoding, self.expected_content_length = False, int(value)
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.chunked_encoding is None:
            bodiless = self.scope["method"] == "HEAD" or status in _BODILESS
            # HTTP/1.0 knows no chunks: there, what comes is the body, up to the end of the connection.
            self._endless = not bodiless and self.scope["http_version"] == "1.0"
            self.chunked_encoding = not bodiless and not self._endless
            if self.chunked_encoding:
                lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            self.response_started = False
            raise RuntimeError("a header has a line's end in it")
        self._head = STATUS_LINE[status] + head + b"\r\n"

    def _go_on(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length, body = 0, b""
        elif self.chunked_encoding:
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
            if not more:
                body += b"0\r\n\r\n"
        elif not self._endless:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0 or (self.expected_content_length and not more):
                raise RuntimeError("a body is not as long as its head says")
        self._put(body)
        if not more:
            self._complete()

    def _put(self, data: bytes) -> None:
        head, self._head = self._head, None
        if head is not None:
            self.flowing = bool(self.chunked_encoding)
            if len(data) > _LARGE:
                self.transport.write(head)
            else:
                data = head + data
        if data:
            self.transport.write(data)

    def _complete(self) -> None:
        self.response_complete, self.flowing = True, False
        self.message_event.set()
        if not self.keep_alive and not self.more_body:  # else the connection sees to it
            self.transport.close()
        self.on_response()


def _chunks(parts: list[bytes]) -> bytes:
    return b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts])
