"""HTTP connections: uvicorn's protocol, with limits on what a slow, broken or hostile client can cost.

- A request has to arrive completely within `read_timeout` seconds of its first byte, and a new connection has to send
  one within that time (408). Time during which the server does not read does not count. An upload may take longer, as
  long as it goes on.
- Received data is parsed in slices, so that a flood of tiny chunks or headers delays no other connection (see
  `read_scheduler`).
- The head of a request may have 64 KiB (431) and its target 8 KiB (414). The framing of a chunked body may be a few
  times as long as the body. Trailers are ignored: they would pass for headers.
- Requests that a proxy might understand differently are rejected (400): those without exactly one Host, and what the
  parser refuses, such as ambiguous lengths. Transfer codings other than `chunked` are not implemented (501).
- After a response that did not wait for a long body, what the client still sends is discarded for two seconds.
- A client that reads nothing for a minute is disconnected (see `limits`).
- The number of connections is limited by the open files of the process. Above the limit, connections of the
  organization with the most are closed, or new ones get a 503 (see `connection_pool`).

Rejections are sent in the error envelope, after the responses to earlier requests. There is one timer per connection,
and no work per write.

What is used of uvicorn's internals is checked by tests/http/server/test_uvicorn_contract.py.
"""

from __future__ import annotations

import asyncio
import math
import re
import urllib.parse
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.protocols.utils import get_local_addr

from syringa.errors import EngineOverloaded, RequestError, SyringaError
from syringa.http.context import CONNECTION, REQUEST_CYCLE, find_request_context, set_response_status
from syringa.http.middleware.errors import error_response
from syringa.http.server.connection_pool import too_many_connections
from syringa.http.server.limits import ConnectionLimits, WriteTimeout
from syringa.http.server.read_scheduler import ReadScheduler, SlicedReader
from syringa.http.server.request_cycle import RequestCycle, date_header
from syringa.http.server.websocket_connection import WebSocketConnection

MAX_HEAD_BYTES = 64 << 10
MAX_TARGET_BYTES = 8 << 10
MAX_HANDSHAKE_HEADERS, MAX_HANDSHAKE_LINE = 120, 8000  # limits of the WebSocket library, which parses the head again
MAX_FRAMING_RATIO = 8  # bytes of framing for each byte of a body: chunks of one byte have 5
MAX_PIPELINED = 32
MAX_SKIPPED_BYTES = 1 << 20  # of a body: after an early response to a longer one, the connection is closed
MIN_UPLOAD_RATE = 1024  # bytes per second
_OVERFLOW_READ_SECONDS = 1.0  # for a connection over the limit to send its request
_LINGER_SECONDS = 2.0  # after an early response: an immediate close could discard it while the client is still sending
_REQUEST_WORK = 16  # of the parser, for each request (see `read_scheduler`)
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")


class RejectedRequest(RequestError):
    """A request that is rejected before it reaches the app."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message, code=code)
        self.status = status


class _FlowControl(FlowControl):
    """Resumes reading only after the data that was received before is parsed."""

    def __init__(self, transport: asyncio.Transport, reader: SlicedReader) -> None:
        super().__init__(transport)
        self._reader = reader

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._reader.resume_socket()


class HttpConnection(WriteTimeout, SlicedReader, HttpToolsProtocol):
    """An HTTP connection."""

    def __init__(self, limits: ConnectionLimits, reads: ReadScheduler, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._limits, self._reads = limits, reads
        self._running: RequestCycle | None = None  # being responded to; `cycle` is the latest that was received
        self._in_head = True  # the head of the current request is incomplete
        self._complete = False  # all requests that were begun are complete
        self._request_bytes = self._body_bytes = 0  # of the current request
        self._can_skip_body = True  # that of the current request, if it is not read by the app
        self._upload_bytes: int | None = None  # of an upload, when the read timer was started; None: it is none
        self._work = 0  # events of the parser in the current slice
        self._upgrading = False
        self._rejection: SyringaError | None = None  # of the latest request, sent after the earlier responses
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether it is only kept alive for another request."""
        received_more = self._discarding or self.has_unparsed_data
        return self._complete and not received_more and not self._is_responding()

    def evict(self) -> None:
        """Close the connection in favor of another one. A response that has not started becomes a 503."""
        running = self._running
        if running is None or running.response_complete:
            self.transport.close()
        elif running.response_started:
            self.transport.abort()
        else:
            set_response_status(cast(Scope, running.scope), EngineOverloaded.status)
            running.disconnect()
            self._send_rejection(too_many_connections(), cast(Scope, running.scope))

    def claim(self, organization: str | None) -> None:
        try:
            self._limits.pool.claim(self, organization)
        except EngineOverloaded:
            if self._running is not None:
                self._running.keep_alive = False
            raise

    def local_port(self) -> int | None:
        _, port = get_local_addr(self.transport) or ("", None)
        return port

    def set_busy(self, busy: bool) -> None:
        pass

    def expect_upload(self) -> None:
        self._upload_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # Like uvicorn's, without the addresses of both ends: they are not used, and cost as much as parsing a request.
        self.connections.add(self)
        self.transport, self.flow, self.scheme = transport, _FlowControl(transport, self), "http"
        pool = self._limits.pool
        if not pool.add(self):
            transport.abort()
            return
        self._start_read_timer(_OVERFLOW_READ_SECONDS if pool.is_over(self) else self._limits.read_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.pool.remove(self)
        self._cancel_timer()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnect()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Begin the shutdown: finish the current response, and close an idle connection.

        A connection without a request yet stays open, to respond with 503.
        """
        if self._is_responding():
            self.cycle.keep_alive = False
        elif self.idle:
            self.transport.close()

    def abandon_response(self) -> None:
        """At the end of the shutdown: send nothing more of a response that has started."""
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            running.abandon()

    def is_read_paused(self) -> bool:
        return self.flow.read_paused

    def parse_slice(self, data: bytes | memoryview) -> int:
        self._work = 0
        self._request_bytes = len(data) if self._complete else self._request_bytes + len(data)
        try:
            self._feed_parser(data)
            if not self._complete and self._request_bytes > MAX_HEAD_BYTES:
                self._check_framing()
        except SyringaError as error:
            self._reject(error)
        except httptools.HttpParserError as error:
            cause = error.__context__  # an error that one of the parser's callbacks raised
            if not isinstance(cause, SyringaError):
                cause = RejectedRequest(400, "malformed_request", "The request is not valid HTTP/1.1.")
            self._reject(cause)
        else:
            if self._complete:
                self._cancel_timer()
            elif self._timer is None:
                self._start_read_timer(self._limits.read_timeout)
        return self._work

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head, self._complete, self._body_bytes = True, False, 0
        self._upload_bytes = None
        self._work += _REQUEST_WORK

    def on_header(self, name: bytes, value: bytes) -> None:
        self._work += 1
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        self._upgrading = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._upgrading:
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return
        self._complete_scope()
        self._in_head = False
        previous = self.cycle
        keep_alive = self.parser.should_keep_alive() and self.scope["http_version"] != "1.0"
        self.cycle = cycle = self._create_cycle(keep_alive and not self._limits.draining)
        if previous is None or previous.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def _complete_scope(self) -> None:
        scope, url = self.scope, httptools.parse_url(self.url)
        if (version := self.parser.get_http_version()) != "1.1":
            scope["http_version"] = version
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["raw_path"] = url.path
        path = url.path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["query_string"] = url.query or b""

    def _create_cycle(self, keep_alive: bool) -> RequestCycle:
        cycle = RequestCycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],  # the cycle adds its own
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )
        cycle.can_skip_body = self._can_skip_body
        self.scope["extensions"] = {REQUEST_CYCLE: cast(Any, cycle), CONNECTION: cast(Any, self)}
        return cycle

    def on_body(self, body: bytes) -> None:
        self._work += 1
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrading:  # otherwise the parser has not looked for a body
            self._complete, self._request_bytes = True, 0
            super().on_message_complete()
            if not self.pipeline:
                # After a long body, reading is paused, and the end of the connection would not be noticed.
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._limits.pool.end(self)
        if self._running is not None and not self._running.keep_alive and not self.transport.is_closing():
            self._linger()
            return
        super().on_response_complete()
        if self._rejection is not None and not self._is_responding() and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._send_rejection(self._rejection)

    # Limits

    def _check_head(self) -> None:
        if len(self.url) > MAX_TARGET_BYTES:
            message = f"The request's target is longer than {MAX_TARGET_BYTES} bytes."
            raise RejectedRequest(414, "target_too_long", message)
        if not self.url.isascii():
            message = "The request's target has characters that must be escaped."
            raise RejectedRequest(400, "malformed_request", message)
        if self._request_bytes > MAX_HEAD_BYTES and _size(self.headers) > MAX_HEAD_BYTES:
            raise _head_too_large()
        if len(self.pipeline) >= MAX_PIPELINED:
            message = "Too many requests were sent without waiting for a response."
            raise RejectedRequest(400, "too_many_pipelined", message)
        self._check_framing_headers()
        if self.parser.should_upgrade() and self._should_upgrade():
            longest = max(len(name) + len(value) for name, value in self.headers)
            if len(self.headers) > MAX_HANDSHAKE_HEADERS or longest > MAX_HANDSHAKE_LINE:
                raise _head_too_large()

    def _check_framing_headers(self) -> None:
        """Check what decides where a request ends and to whom it is addressed. Lengths were checked by the parser."""
        hosts, codings, self._can_skip_body = [], [], True
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value)
            elif name == b"transfer-encoding":
                codings.append(value)
            elif name == b"content-length":
                self._can_skip_body = int(value) <= MAX_SKIPPED_BYTES
        is_old = self.parser.get_http_version() == "1.0"
        if len(hosts) > 1 or not (hosts or is_old) or not all(map(_HOST.fullmatch, hosts)):
            raise RejectedRequest(400, "malformed_request", "A request needs exactly one valid Host header.")
        if codings:
            self._can_skip_body = False
            coding = b", ".join(codings).strip().lower()
            if is_old or not coding.endswith(b"chunked"):
                raise RejectedRequest(400, "malformed_request", "A Transfer-Encoding must end with chunked.")
            if coding != b"chunked":
                message = "The only Transfer-Encoding that is supported is chunked."
                raise RejectedRequest(501, "unsupported_transfer_encoding", message)

    def _check_framing(self) -> None:
        framing_bytes = self._request_bytes - self._body_bytes
        if self._in_head or framing_bytes > 2 * MAX_HEAD_BYTES + MAX_FRAMING_RATIO * self._body_bytes:
            raise _head_too_large()

    def _start_read_timer(self, seconds: float) -> None:
        if seconds < math.inf:
            self._timer = self.loop.call_later(seconds, self._read_timed_out)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _read_timed_out(self) -> None:
        self._timer = None
        unread = self.flow.read_paused or self.has_unparsed_data  # the rest may have been sent
        if unread or self._is_uploading():
            self._start_read_timer(self._limits.read_timeout)
            return
        late = RejectedRequest(408, "request_timeout", "The request did not arrive in time.")
        self._reject(too_many_connections() if self._limits.pool.is_over(self) else late)

    def _is_uploading(self) -> bool:
        """Return whether enough of an upload has arrived since the timer was started."""
        before = self._upload_bytes
        if before is None:
            return False
        self._upload_bytes = self._body_bytes
        return self._body_bytes - before >= MIN_UPLOAD_RATE * self._limits.read_timeout

    def _is_responding(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        self._limits.pool.begin(self)
        super()._start_asgi_task(cycle, app)

    # Upgrades

    def _feed_parser(self, data: bytes | memoryview) -> None:
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as upgrade:
            end_of_head = upgrade.args[0]
        self._upgrade(bytes(data[end_of_head:]))

    def _upgrade(self, rest: bytes) -> None:
        self._upgrading = False
        if self._should_upgrade():
            if self._is_responding():
                message = "A WebSocket cannot begin before the previous response has ended."
                raise RejectedRequest(400, "malformed_request", message)
            self.discard_unparsed_data()
            self.handle_websocket_upgrade()
            self._limits.pool.replace(self, cast(WebSocketConnection, self.transport.get_protocol()))
            self._complete = True  # the WebSocket protocol has taken over
            return
        # An upgrade to another protocol (HTTP/2, for instance) may be ignored, and is: without its upgrade headers,
        # the request is parsed again as an ordinary one.
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(each for each in value.split(b",") if each.strip().lower() != b"upgrade")
            if name != b"upgrade" and value:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed_parser(b"".join([*head, b"\r\n", rest]))

    # Rejections

    def _reject(self, error: SyringaError) -> None:
        """End the connection, after an error response unless one has started: now, or after earlier responses."""
        self.discard_input()
        self._cancel_timer()
        has_cycle = not self._in_head and not self._complete
        scope = None
        if self._is_responding():
            running = cast(RequestCycle, self._running)
            if not has_cycle or running is not self.cycle:
                if has_cycle:
                    self.pipeline.popleft()  # the rejected request itself
                self._rejection = error
                return
            if running.response_started:
                running.keep_alive = False
                return
            scope = cast(Scope, running.scope)
            set_response_status(scope, error.status)
            running.disconnect()
        elif has_cycle:
            self.transport.close()  # the response did not wait for the rest of the request
            return
        self._send_rejection(error, scope)

    def _send_rejection(self, error: SyringaError, scope: Scope | None = None) -> None:
        """Send an error and close the connection. `scope`: the request that it answers, if it has been read."""
        context = None if scope is None else find_request_context(scope)
        if context is None:
            response = error_response(error)
        else:
            response = error_response(error, context.error_format, context.request_id)
        head = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
        for name, value in (*date_header(), *response.raw_headers):
            head += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self._linger()

    def _linger(self) -> None:
        """Close the connection for writing, and close it completely after the client had time to finish sending."""
        self.discard_input()
        self._cancel_timer()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)


def _size(headers: list[tuple[bytes, bytes]]) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers)


def _head_too_large() -> RejectedRequest:
    message = f"The request's headers are longer than {MAX_HEAD_BYTES} bytes."
    return RejectedRequest(431, "headers_too_large", message)
