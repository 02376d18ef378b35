"""A client's connection: uvicorn's own, with bounds on what one that is slow, broken or hostile may cost.

- A request has to be there, whole, `read_timeout` seconds after its first byte, and a connection that sends nothing is
  not kept for longer either: 408. Time in which we do not read does not count.
- Its head may have 64 KiB (431) and its target 8 KiB (414); what frames its body may be no more than a few times as
  long as the body. Trailers are not read: they would pass for headers.
- A client that has read nothing of what waits for it for a minute is dropped.
- A process has room for as many connections as it may open files. Above that, idle ones are closed, and new ones are
  answered with 503, or where even that is too many, closed.

Whatever is refused here is answered in our envelope, once what was asked before it has been answered. All of it is
timed once for each connection; nothing is added to a write.
"""

from __future__ import annotations

import asyncio
import math
import urllib.parse
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from syringa.errors import SyringaError
from syringa.http.middleware.errors import error_response
from syringa.http.server.limits import SPARE, Shared, Watched
from syringa.http.server.rejections import MAX_HEAD, Refused, size_of, too_large, too_many
from syringa.http.server.request_cycle import Exchange, date_header

MAX_TARGET = 8 << 10
MAX_SOCKET_HEADERS, MAX_SOCKET_LINE = 120, 8000  # of a WebSocket's handshake, which another parser reads again
MAX_FRAMING = 8  # bytes around a byte of a body: chunks of one byte each have 5
MAX_PIPELINED = 32
_SURPLUS_SECONDS = 1.0  # that a connection too many has to say what it wants
_SLOW_SECONDS = 10.0  # that one gets that has begun to
_LINGER_SECONDS = 1.0  # after an early answer: closing at once would take it back from a client that is still sending


class Connection(Watched, HttpToolsProtocol):
    def __init__(self, shared: Shared, **given: Any) -> None:
        super().__init__(**given)
        self._shared = shared
        self._running: Exchange | None = None  # what is answered; `cycle` is what was asked last
        self._in_head = True  # whether the head of what is being sent is not there yet
        self._complete = False  # whether all that was begun is there
        self._fed = self._body = 0  # bytes of the current request, and of its body
        self._made = self.loop.time()
        self._upgrading = False
        self._surplus = False  # whether it came when there was no room
        self._deaf = False  # what still comes does not matter any more
        self._verdict: SyringaError | None = None  # on what came last, to be told when the rest is answered
        self._late: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether it is kept for a next request only."""
        return self._complete and not self._deaf and not self._is_answering()

    @property
    def unused(self) -> bool:
        """Whether it may go where room is short: it is idle, or takes its time with the first thing it has to say."""
        patience = _SLOW_SECONDS if self._fed else _SURPLUS_SECONDS
        return self.idle or (self._in_head and self._running is None and self.loop.time() - self._made > patience)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # As uvicorn does, but for the addresses of both ends: nobody asks for them, and finding them out costs as much
        # as reading the request.
        self.connections.add(self)
        self.transport, self.flow, self.scheme = transport, FlowControl(transport), "http"
        shared = self._shared
        if (surplus := len(self.connections) - shared.limit) > 0:
            self._surplus = True
            shared.make_room(self.connections)
            if surplus > SPARE:
                transport.abort()
                return
        self._await_request(_SURPLUS_SECONDS if self._surplus else shared.read_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.leave()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server begins to end. What runs is finished; what was never used may still be told that it is too late
        for it; what nobody uses is closed."""
        if self._is_answering():
            self.cycle.keep_alive = False
        elif self.idle:
            self.transport.close()

    def give_up(self) -> None:
        """The server has ended: an answer that has begun by now stays as it is, which is nobody's mistake."""
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            running.stop()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._fed = len(data) if self._complete else self._fed + len(data)
        try:
            self._feed(data)
            if not self._complete and self._fed > MAX_HEAD:
                self._measure()
        except SyringaError as error:
            self._refuse(error)
        except httptools.HttpParserError as error:
            why = error.__context__
            if not isinstance(why, SyringaError):
                why = Refused(400, "malformed_request", "This is not HTTP as this server understands it.")
            self._refuse(why)
        else:
            if self._complete:
                self._disarm()
            elif self._late is None:
                self._await_request(self._shared.read_timeout)

    # What the parser calls.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head, self._complete, self._body = True, False, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_head()
        self._upgrading = self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"
        if self._upgrading:
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return
        self._describe()
        self._in_head = False
        before = self.cycle
        keep = self.parser.should_keep_alive() and self.scope["http_version"] != "1.0" and not self._shared.draining
        self.cycle = exchange = self._exchange(keep)
        if before is None or before.response_complete:
            self._start_asgi_task(exchange, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def _describe(self) -> None:
        """Completes what an app is told of the request."""
        scope, url = self.scope, httptools.parse_url(self.url)
        if (version := self.parser.get_http_version()) != "1.1":
            scope["http_version"] = version
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["raw_path"] = url.path
        path = url.path.decode("ascii")
        scope["path"] = urllib.parse.unquote(path) if "%" in path else path
        scope["query_string"] = url.query or b""

    def _exchange(self, keep_alive: bool) -> Exchange:
        made = Exchange(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=[],  # it has its own
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=keep_alive,
            on_response=self.on_response_complete,
        )
        self.scope["state"]["exchange"] = made
        return made

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._upgrading:  # else the parser thinks so, and has not looked for a body
            self._complete, self._fed = True, 0
            super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._running is not None and not self._running.keep_alive and not self.transport.is_closing():
            self._linger()
            return
        super().on_response_complete()
        if self._verdict is not None and not self._is_answering() and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._say(self._verdict)

    # What is not allowed.

    def _check_head(self) -> None:
        if self._surplus:
            if len(self.connections) > self._shared.limit:
                raise too_many()
            self._surplus = False
        if len(self.url) > MAX_TARGET:
            raise Refused(414, "target_too_long", f"The request's target is longer than {MAX_TARGET} bytes.")
        if not self.url.isascii():
            raise Refused(400, "malformed_request", "The request's target has characters that must be escaped.")
        if self._fed > MAX_HEAD and size_of(self.headers) > MAX_HEAD:
            raise too_large()
        if len(self.pipeline) >= MAX_PIPELINED:
            raise Refused(400, "too_many_pipelined", "Too many requests were sent without waiting for an answer.")
        if self.parser.should_upgrade() and self._should_upgrade():
            longest = max(len(name) + len(value) for name, value in self.headers)
            if len(self.headers) > MAX_SOCKET_HEADERS or longest > MAX_SOCKET_LINE:
                raise too_large()

    def _measure(self) -> None:
        if self._in_head or self._fed - self._body > 2 * MAX_HEAD + MAX_FRAMING * self._body:
            raise too_large()

    def _await_request(self, seconds: float) -> None:
        if seconds < math.inf:
            self._late = self.loop.call_later(seconds, self._too_late)

    def _disarm(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if self.flow.read_paused:
            self._await_request(self._shared.read_timeout)  # it may well have been sent: we do not look
            return
        late = Refused(408, "request_timeout", "The request did not arrive in time.")
        self._refuse(too_many() if self._surplus else late)

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
            return
        except httptools.HttpParserUpgrade as seen:
            end = seen.args[0]
        self._upgrade(data[end:])

    def _upgrade(self, rest: bytes) -> None:
        self._upgrading = False
        if self._should_upgrade():
            if self._is_answering():
                raise Refused(400, "malformed_request", "A WebSocket cannot begin before the last answer has ended.")
            self.handle_websocket_upgrade()
            self._complete = True  # another protocol has taken over
            return
        # An offer to speak something else, HTTP/2 for instance, which we may overlook, and do: what is left is an
        # ordinary request, which is read again as such.
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(each for each in value.split(b",") if each.strip().lower() != b"upgrade")
            if name != b"upgrade" and value:
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"".join([*head, b"\r\n", rest]))

    def _refuse(self, error: SyringaError) -> None:
        """Ends the connection, with an answer if there was none yet: now, or when this request's turn has come."""
        self._deaf = True
        self._disarm()
        has_cycle = not self._in_head and not self._complete
        if self._is_answering():
            running = cast(Exchange, self._running)
            if not has_cycle or running is not self.cycle:
                if has_cycle:
                    self.pipeline.popleft()  # this is the one
                self._verdict = error
                return
            if running.response_started:
                running.keep_alive = False
                return
            running.scope["state"]["status"] = error.status
            running.leave()
        elif has_cycle:
            self.transport.close()  # its answer did not wait for the rest of it
            return
        self._say(error)

    def _say(self, error: SyringaError) -> None:
        response = error_response(error)
        head = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
        for name, value in (*date_header(), *response.raw_headers):
            head += [name, b": ", value, b"\r\n"]
        self.transport.write(b"".join([*head, b"\r\n", bytes(response.body)]))
        self._linger()

    def _linger(self) -> None:
        """Ends the connection, but hears the client out for a moment."""
        self._deaf = True
        self._disarm()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._late = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
