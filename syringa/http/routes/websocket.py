"""The Responses API over a WebSocket: many responses over one connection, one after the other.

The client sends `response.create` with the body of a request, and receives the events of a stream. The connection
remembers the last response with its history, so that it can be continued without being stored. As Open Responses
requires, it forgets a response whose continuation failed.

Open Responses forbids the fields of HTTP requests here. OpenAI ignores them: its clients may send `stream: true`, and
`generate: false` for a response without output that only serves to be continued.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from syringa.api.decoding import convert, decode_object
from syringa.api.error_formats import error_envelope
from syringa.api.responses import ResponseRequest
from syringa.config import Config
from syringa.errors import Forbidden, InvalidRequest, PayloadTooLarge, SyringaError
from syringa.events import Event
from syringa.http import dependencies
from syringa.http.context import request_context
from syringa.http.memory import release_memory_soon
from syringa.http.middleware.access_log import log_request_body, log_response
from syringa.http.middleware.auth import read_credentials
from syringa.http.routes.response_run import ResponseRun, ResponseRuns
from syringa.http.streaming.sse import encode
from syringa.service.app_state import AppState
from syringa.service.usage.accounting import RequestAccounting

logger = logging.getLogger("syringa.http")

CREATE = "response.create"
_FORBIDDEN = ("background",)
_FORBIDDEN_OPEN = ("stream", "stream_options", *_FORBIDDEN)
_GOING_AWAY, _POLICY_VIOLATION = 1001, 1008  # close codes
_MAX_UNSENT = 1000  # messages; beyond that, no more messages are received until the client reads
_EMPTY_INPUT = "."
_GRACE_SECONDS = 1.0  # after which `response.created` is sent, even if the engine has not begun


class _CreateMessage(NamedTuple):
    """A `response.create` message."""

    body: ResponseRequest
    ignored: list[str]
    generates: bool


class _InvalidMessage(Exception):
    """A message that was refused, and the id of the response that it would have continued."""

    def __init__(self, error: SyringaError, previous_response_id: Any) -> None:
        super().__init__(error.message)
        self.error, self.previous_response_id = error, previous_response_id


class ResponsesWebSocket:
    """The ASGI app that accepts WebSocket connections and serves each until it ends."""

    def __init__(self, runs: ResponseRuns, app_state: AppState) -> None:
        self._runs, self._app_state = runs, app_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        _check_origin(socket, self._runs.config)
        open_mode = dependencies.open_mode(socket, self._runs.config)
        await socket.accept()
        connection = _Connection(socket, self._runs, self._app_state, open_mode)
        with contextlib.suppress(
            WebSocketDisconnect, RuntimeError, OSError
        ):  # raised by a send to a disconnected client
            await connection.serve()


def _check_origin(socket: WebSocket, config: Config) -> None:
    """Raise `Forbidden` for pages of other sites: browsers send no CORS preflight for WebSockets."""
    origin = socket.headers.get("origin")
    allowed = config.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return
    if origin.lower().partition("://")[2] != socket.headers.get("host", "").lower():
        message = f"Pages of {origin!r:.200} may not connect: allow them with --cors-origins."
        raise Forbidden(message, code="origin_not_allowed")


class _Connection:
    """One WebSocket connection."""

    def __init__(self, socket: WebSocket, runs: ResponseRuns, app_state: AppState, open_mode: bool) -> None:
        self._socket, self._runs, self._app_state, self._open_mode = socket, runs, app_state, open_mode
        self._config = runs.config
        self._message_count = 0
        self._organization = dependencies.organization(socket)
        self._response_task: asyncio.Task[None] | None = None
        self._queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._close_reason: tuple[int, str] | None = None  # set when the server is to close the connection

    async def serve(self) -> None:
        sending = asyncio.create_task(self._send_queued())
        self._app_state.drain_callbacks.add(self._drain)
        caller = dependencies.caller(self._socket)
        try:
            with self._app_state.key_watch.watching(caller, self._end_key):
                while (text := await self._receive()) is not None:
                    await self._handle(text)
                    await asyncio.sleep(0)  # other connections take turns with a client that sends many messages
                    if self._queue.qsize() > _MAX_UNSENT:
                        await self._wait_for_reader(sending)
        finally:
            self._app_state.drain_callbacks.discard(self._drain)
            if self._response_task is not None:
                self._response_task.cancel()
                await asyncio.gather(self._response_task, return_exceptions=True)
            self._app_state.remembered.forget(self._organization, self)
            self._queue.put_nowait(None)
            await asyncio.gather(sending, return_exceptions=True)

    def _drain(self) -> None:
        """Close the connection because the server shuts down."""
        self._close(_GOING_AWAY, "server shutdown")

    def _end_key(self, error: Exception) -> None:
        """Close the connection because its API key is no longer valid. A running response fails with the same error."""
        if self._close_reason is None:
            if not self._is_busy():
                self._send_error(error)
            self._close(_POLICY_VIOLATION, str(error))

    def _close(self, code: int, reason: str) -> None:
        """Close the connection after the running response."""
        self._close_reason = (code, reason)
        if not self._is_busy():
            self._queue.put_nowait(None)

    async def _wait_for_reader(self, sending: asyncio.Task[None]) -> None:
        all_sent = asyncio.create_task(self._queue.join())
        await asyncio.wait((sending, all_sent), return_when=asyncio.FIRST_COMPLETED)
        all_sent.cancel()

    async def _receive(self) -> str | None:
        """Return the next message, or None if the connection is to be closed."""
        while True:
            try:
                async with asyncio.timeout(self._config.websocket_idle or None):
                    message = await self._socket.receive()
            except TimeoutError:
                if self._is_busy():
                    continue
                await self._socket.close(_GOING_AWAY, "idle timeout")
                return None
            if message["type"] == "websocket.disconnect":
                return None
            text: str | None = message.get("text")
            if text is None:
                text = message["bytes"].decode("utf-8", "replace")
            if len(text) > self._config.max_body_bytes:
                limit = self._config.max_body_bytes
                self._send_error(
                    PayloadTooLarge(f"The message is larger than {limit} bytes, the limit of this server.")
                )
                continue
            return text

    async def _handle(self, text: str) -> None:
        try:
            if len(text) <= dependencies.INLINE_BYTES:
                message = _parse(text, self._open_mode)
            else:
                release_memory_soon()
                message = await asyncio.to_thread(_parse, text, self._open_mode)
            if self._is_busy():
                raise InvalidRequest(
                    "A response is already running on this connection; wait until it has finished.",
                    code="response_already_in_flight",
                )
        except _InvalidMessage as invalid:
            if not self._is_busy():
                self._forget(invalid.previous_response_id)
            self._send_error(invalid.error)
            return
        except SyringaError as error:
            self._send_error(error)
            return
        self._set_busy(True)
        self._response_task = asyncio.create_task(self._respond(message))
        self._response_task.add_done_callback(lambda _: self._set_busy(False))

    def _set_busy(self, busy: bool) -> None:
        connection = request_context(self._socket.scope).connection
        if connection is not None:
            connection.set_busy(busy)

    def _is_busy(self) -> bool:
        return self._response_task is not None and not self._response_task.done()

    def _forget(self, response: Any) -> None:
        """Forget a response whose continuation failed. It can be continued only if it is stored."""
        remembered = self._app_state.remembered
        if isinstance(response, str) and response in remembered.get(self._organization, self):
            remembered.forget(self._organization, self)

    async def _respond(self, message: _CreateMessage) -> None:
        try:
            accounting = self._open_accounting()
        except SyringaError as error:  # the API key was revoked or has expired
            self._forget(message.body.previous_response_id)
            self._send_error(error)
            return
        try:
            accounting.admission = self._app_state.limiter.acquire(accounting.caller)
            run = await self._prepare(message, accounting)
            dependencies.ignored_fields_header(self._config, message.ignored)
            await self._runs.begin(run)
            await (self._stream(run) if message.generates else self._skip(run))
        except asyncio.CancelledError:
            accounting.cancel()
            raise
        except Exception as error:
            accounting.fail(error)
            if not isinstance(error, SyringaError):
                logger.error("websocket: response failed", exc_info=error)
            self._forget(message.body.previous_response_id)
            self._send_error(error)
        finally:
            accounting.close()
            log_response(accounting)
            if self._close_reason is not None:
                self._queue.put_nowait(None)

    async def _prepare(self, message: _CreateMessage, accounting: RequestAccounting) -> ResponseRun:
        body = message.body
        empty = not message.generates and not body.input and body.previous_response_id is None
        if empty:  # validation of the request requires a prompt
            body = msgspec.structs.replace(body, input=_EMPTY_INPUT)
        run = await self._runs.prepare(
            body,
            message.ignored,
            accounting,
            open_mode=self._open_mode,
            memory=self._app_state.remembered.get(self._organization, self),
        )
        if empty:
            run.input.clear()
        return run

    async def _skip(self, run: ResponseRun) -> None:
        """Create a response without output, which only serves to be continued."""
        self._send_events(run.writer.begin())
        self._finish(run, await run.skip())

    def _open_accounting(self) -> RequestAccounting:
        """Authenticate and account for each message as a request of its own."""
        context = request_context(self._socket.scope)
        keys = self._app_state.keys
        caller = keys.authenticate(read_credentials(context.headers, keys))
        self._message_count += 1
        request_id = f"{context.request_id}-{self._message_count}"
        return self._app_state.start_accounting(caller, context.endpoint.metrics_label, request_id)

    async def _stream(self, run: ResponseRun) -> None:
        """Stream a response. Errors before the first event are raised, later ones are sent as events."""
        begun = False
        write = run.writer.write

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._send_events(run.writer.begin())

        def emit(events: Sequence[Event]) -> None:
            begin()
            for event in events:
                self._send_events(write(event))

        timer = asyncio.get_running_loop().call_later(_GRACE_SECONDS, begin)
        try:
            closing = await run.run(emit)
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, SyringaError):
                logger.error("websocket: response failed", exc_info=error)
            self._forget(run.writer.response.previous_response_id)
            self._send_events(run.failure)
            return
        finally:
            timer.cancel()
        begin()
        self._finish(run, closing)

    def _finish(self, run: ResponseRun, closing: Sequence[Any]) -> None:
        self._app_state.remembered.put(self._organization, self, run.writer.id, run.remembered())
        self._send_events(closing)

    def _send_events(self, events: Sequence[Any]) -> None:
        for event in events:
            self._queue.put_nowait(encode(event).decode())

    def _send_error(self, error: Exception) -> None:
        details = error_envelope(error).error
        status = error.status if isinstance(error, SyringaError) else 500
        body = {
            "type": details.type,
            "code": details.code or "invalid_request",
            "message": details.message,
            "param": details.param,
        }
        self._queue.put_nowait(encode({"type": "error", "status": status, "error": body}).decode())

    async def _send_queued(self) -> None:
        """Send queued messages in a task of its own, so that a slow client does not block the generation."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            while (text := await self._queue.get()) is not None:
                await self._socket.send_text(text)
                self._queue.task_done()
            if self._close_reason is not None:
                await self._socket.close(*self._close_reason)


def _parse(text: str, open_mode: bool) -> _CreateMessage:
    raw = text.encode("utf-8", "replace")
    log_request_body(raw)
    fields = decode_object(raw)
    previous = fields.get("previous_response_id")
    try:
        return _read_message(fields, open_mode)
    except SyringaError as error:
        raise _InvalidMessage(error, previous) from None


def _read_message(fields: dict[str, Any], open_mode: bool) -> _CreateMessage:
    kind = fields.pop("type", None)
    if kind != CREATE:
        raise InvalidRequest(f"type: expected {CREATE}, not {kind!r:.100}.", param="type", code="unknown_event_type")
    for name in _FORBIDDEN_OPEN if open_mode else _FORBIDDEN:
        if fields.get(name) is not None:
            raise InvalidRequest(f"{name}: not supported over a WebSocket.", param=name)
    if fields.get("stream") is False:
        raise InvalidRequest("stream: over a WebSocket every response is streamed.", param="stream")
    generates = fields.pop("generate", None)
    if not isinstance(generates, bool | None) or (generates is False and open_mode):
        raise InvalidRequest("generate: expected true.", param="generate")
    ignored: list[str] = []
    body = convert(fields, ResponseRequest, ignored=ignored)
    return _CreateMessage(
        body if open_mode else msgspec.structs.replace(body, stream=True), ignored, generates is not False
    )
