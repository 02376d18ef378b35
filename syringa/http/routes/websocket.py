"""`/v1/responses` over a WebSocket: many responses over one connection, one after the other.

The client sends `response.create` with the body of a request, and is sent the events that a stream would have. The last
response stays in the connection's memory with all that came before it, so it can be gone on from without being stored.

Open Responses forbids the fields of HTTP here. OpenAI only says that they are not used, and its clients may send
`stream: true`; and `generate: false`, for a response that says nothing and is only there to be gone on from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from syringa.api.decoding import convert, decode_object
from syringa.api.responses import ResponseRequest
from syringa.config import Config
from syringa.errors import Forbidden, InvalidRequest, PayloadTooLarge, SyringaError
from syringa.events import Event
from syringa.http import dependencies
from syringa.http.middleware.access_log import account_line, log_body
from syringa.http.middleware.errors import envelope
from syringa.http.routes.response_run import Items, Turn, Turns
from syringa.http.streaming.framing import encode
from syringa.service.app_state import Work
from syringa.service.usage.account import Account

logger = logging.getLogger("syringa.http")

CREATE = "response.create"
_FORBIDDEN = ("background",)  # has no meaning here
_FORBIDDEN_OPEN = ("stream", "stream_options", *_FORBIDDEN)
_GOING_AWAY = 1001
_MAX_UNSENT = 1000  # messages to a client that does not read; until it does, it is not read from either
_NOTHING = "."
_GRACE = 1.0  # the seconds after which a response that waits for the engine is told of


class _Asked(NamedTuple):
    """What a message asks for."""

    body: ResponseRequest
    ignored: list[str]
    generates: bool


class ResponseSocket:
    """The ASGI app of the path: accepts connections and serves each until it ends."""

    def __init__(self, turns: Turns, work: Work) -> None:
        self._turns, self._work = turns, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        _check_origin(socket, self._turns.config)
        open_mode = dependencies.open_mode(socket, self._turns.config)
        await socket.accept()
        connection = _Connection(socket, self._turns, self._work, open_mode)
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):  # what sending to who is gone raises
            await connection.serve()


def _check_origin(socket: WebSocket, config: Config) -> None:
    """A page of any site may open a WebSocket, and no preflight asks us first: so its origin has to be allowed."""
    origin = socket.headers.get("origin")
    allowed = config.cors_origins
    if origin is None or "*" in allowed or origin in allowed:
        return
    if urlsplit(origin).netloc.lower() != socket.headers.get("host", "").lower():
        raise Forbidden(f"Pages of {origin} may not connect: allow them with --cors-origins.")


class _Connection:
    def __init__(self, socket: WebSocket, turns: Turns, work: Work, open_mode: bool) -> None:
        self._socket, self._turns, self._work, self._open_mode = socket, turns, work, open_mode
        self._config = turns.config
        self._asked = 0
        self._memory: dict[str, Items] = {}  # of the last response alone: each has all that came before
        self._turn: asyncio.Task[None] | None = None
        self._out: asyncio.Queue[str | None] = asyncio.Queue()

    async def serve(self) -> None:
        sending = asyncio.create_task(self._send_all())
        self._work.leaving.add(self._leave)
        try:
            while (text := await self._receive()) is not None:
                self._take(text)
                if self._out.qsize() > _MAX_UNSENT:
                    await self._let_it_read(sending)
        finally:
            self._work.leaving.discard(self._leave)
            if self._turn is not None:
                self._turn.cancel()
                await asyncio.gather(self._turn, return_exceptions=True)
            self._out.put_nowait(None)
            await asyncio.gather(sending, return_exceptions=True)

    def _leave(self) -> None:
        """The server ends: so does this, when what runs on it has been sent."""
        if not self._is_busy():
            self._out.put_nowait(None)

    async def _let_it_read(self, sending: asyncio.Task[None]) -> None:
        all_sent = asyncio.create_task(self._out.join())
        await asyncio.wait((sending, all_sent), return_when=asyncio.FIRST_COMPLETED)
        all_sent.cancel()

    async def _receive(self) -> str | None:
        """The next message; None where the connection is to end."""
        while True:
            try:
                async with asyncio.timeout(self._config.websocket_idle or None):
                    message = await self._socket.receive()
            except TimeoutError:
                if self._is_busy():
                    continue
                await self._socket.close(_GOING_AWAY, "nothing was asked for a long time")
                return None
            if message["type"] == "websocket.disconnect":
                return None
            text: str | None = message.get("text")
            if text is None:
                text = message["bytes"].decode("utf-8", "replace")
            if len(text) > self._config.max_body_bytes:
                limit = self._config.max_body_bytes
                self._refuse(PayloadTooLarge(f"The message is larger than {limit} bytes, the limit of this server."))
                continue
            return text

    def _take(self, text: str) -> None:
        try:
            asked = _read(text, self._open_mode)
            if self._is_busy():
                raise InvalidRequest(
                    "A response is running on this connection, which has room for one; wait for its end.",
                    code="response_already_in_flight",
                )
        except SyringaError as error:
            self._refuse(error)
            return
        self._turn = asyncio.create_task(self._answer(asked))

    def _is_busy(self) -> bool:
        return self._turn is not None and not self._turn.done()

    async def _answer(self, asked: _Asked) -> None:
        try:
            account = self._account()
        except SyringaError as error:  # the key was revoked, or has expired
            self._refuse(error)
            return
        admission = None
        try:
            admission = self._work.limiter.enter(account.caller)
            turn = await self._prepare(asked, account)
            dependencies.heed(self._config, asked.ignored)
            await self._turns.begin(turn)
            await (self._stream(turn) if asked.generates else self._skip(turn))
        except asyncio.CancelledError:
            account.cancel()
            raise
        except Exception as error:
            account.fail(error)
            if not isinstance(error, SyringaError):
                logger.error("a WebSocket's response failed", exc_info=error)
            self._refuse(error)
        finally:
            if admission is not None:
                admission.leave()
            account.close()
            account_line(account)
            if self._work.draining:
                self._out.put_nowait(None)

    async def _prepare(self, asked: _Asked, account: Account) -> Turn:
        body = asked.body
        empty = not asked.generates and not body.input and body.previous_response_id is None
        if empty:  # a prompt has to have something in it, if only to see whether the rest of the request is right
            body = msgspec.structs.replace(body, input=_NOTHING)
        turn = await self._turns.prepare(body, asked.ignored, account, open_mode=self._open_mode, memory=self._memory)
        if empty:
            turn.input.clear()
        return turn

    async def _skip(self, turn: Turn) -> None:
        """Nothing is generated: the response is there to be gone on from."""
        self._put(turn.writer.begin())
        self._close(turn, await turn.skip())

    def _account(self) -> Account:
        """Each message is a request of its own, by whoever the key belongs to now."""
        state = self._socket.scope["state"]
        caller = self._work.keys.find(state["given"].get(b"authorization"))
        self._asked += 1
        return self._work.books.open(caller, self._socket.url.path, f"{state['request_id']}-{self._asked}")

    async def _stream(self, turn: Turn) -> None:
        """Errors before the first event are raised, later ones told in the stream."""
        begun = False
        write = turn.writer.write

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._put(turn.writer.begin())

        def emit(events: Sequence[Event]) -> None:
            begin()
            for event in events:
                self._put(write(event))

        waiting = asyncio.get_running_loop().call_later(_GRACE, begin)
        try:
            closing = await turn.run(emit)
        except Exception as error:
            if not begun:
                raise
            if not isinstance(error, SyringaError):
                logger.error("a WebSocket's response failed", exc_info=error)
            self._put(turn.failure)
            return
        finally:
            waiting.cancel()
        begin()
        self._close(turn, closing)

    def _close(self, turn: Turn, closing: Sequence[Any]) -> None:
        self._memory = {turn.writer.id: [*turn.history, *turn.input, *turn.writer.output]}
        self._put(closing)

    def _put(self, events: Sequence[Any]) -> None:
        for event in events:
            self._out.put_nowait(encode(event).decode())

    def _refuse(self, error: Exception) -> None:
        told = envelope(error).error
        status = error.status if isinstance(error, SyringaError) else 500
        body = {"type": told.type, "code": told.code or "invalid_request", "message": told.message, "param": told.param}
        self._out.put_nowait(encode({"type": "error", "status": status, "error": body}).decode())

    async def _send_all(self) -> None:
        """In order, and apart from what is generated: a client that reads slowly holds up nothing but itself."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            while (text := await self._out.get()) is not None:
                await self._socket.send_text(text)
                self._out.task_done()
            if self._work.draining:
                await self._socket.close(_GOING_AWAY, "the server is being stopped")


def _read(text: str, open_mode: bool) -> _Asked:
    raw = text.encode("utf-8", "replace")
    log_body(raw)
    fields = decode_object(raw)
    kind = fields.pop("type", None)
    if kind != CREATE:
        raise InvalidRequest(f"type: expected {CREATE}, not {kind!r}.", param="type", code="unknown_event_type")
    for name in _FORBIDDEN_OPEN if open_mode else _FORBIDDEN:
        if fields.get(name) is not None:
            raise InvalidRequest(f"{name}: has no meaning over a WebSocket.", param=name)
    if fields.get("stream") is False:
        raise InvalidRequest("stream: over a WebSocket every response is streamed.", param="stream")
    generates = fields.pop("generate", None)
    if not isinstance(generates, bool | None) or (generates is False and open_mode):
        raise InvalidRequest("generate: expected true.", param="generate")
    ignored: list[str] = []
    body = convert(fields, ResponseRequest, ignored=ignored)
    return _Asked(body if open_mode else msgspec.structs.replace(body, stream=True), ignored, generates is not False)
