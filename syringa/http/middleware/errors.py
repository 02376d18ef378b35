"""What happens around every request: CORS, an id, errors in one envelope, the gate, and a limit on bodies.

Plain ASGI throughout. A layer that wraps `send` costs every token of a stream a call, so only one does, and a stream
goes round it once it has begun (`unwrapped`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from syringa import logs
from syringa.api.decoding import ErrorBody, ErrorEnvelope
from syringa.config import Config
from syringa.errors import EngineUnavailable, PayloadTooLarge, RateLimited, SyringaError
from syringa.http.middleware.access_log import access_line
from syringa.http.middleware.auth import Gate
from syringa.http.server.drain import ENDING, Closing
from syringa.ids import fresh_id
from syringa.service.app_state import Work

logger = logging.getLogger("syringa.http")

# What begins an answer: to a request, to a handshake that is refused, to one that is not.
_STARTS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_SANE_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SHOWN = [
    "x-request-id",
    "x-syringa-ignored",
    "retry-after",
    *(f"x-ratelimit-{each}-{of}" for each in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
]


def middleware(config: Config, work: Work) -> list[Middleware]:
    """The layers of the app, from the outside in."""
    layers = []
    if config.cors_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.cors_origins),
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=_SHOWN,
            )
        )
    return [
        *layers,
        Middleware(Edge),
        Middleware(Closing, work=work),
        Middleware(Gate, work=work, public_metrics=config.public_metrics),
        Middleware(BodyLimit, limit=config.max_body_bytes),
    ]


def envelope(error: Exception) -> ErrorEnvelope:
    """What a client may know of an error. One that we did not foresee keeps its details to the log."""
    if isinstance(error, SyringaError):
        return ErrorEnvelope(ErrorBody(error.message, error.type, error.param, error.code))
    return ErrorEnvelope(ErrorBody("An internal error occurred.", "server_error", None, "internal_error"))


def error_response(error: Exception) -> Response:
    headers = {}
    if isinstance(error, SyringaError):
        if error.retry_after is not None:
            headers["retry-after"] = str(math.ceil(error.retry_after))
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
    status = error.status if isinstance(error, SyringaError) else 500
    response = Response(msgspec.json.encode(envelope(error)), status, headers, media_type="application/json")
    if isinstance(error, RateLimited):
        response.raw_headers += error.headers
    return response


def _refusal(error: HTTPException, scope: Scope) -> Response:
    """Starlette's own refusals, an unknown path or method, in our envelope."""
    said = {
        404: f"There is nothing at {scope['path']}.",
        405: f"{scope['path']} does not answer {scope.get('method')}.",
    }.get(error.status_code, error.detail)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    body = ErrorEnvelope(ErrorBody(said, kind, None, None))
    return Response(msgspec.json.encode(body), error.status_code, error.headers, media_type="application/json")


def unwrapped(scope: Scope, send: Send) -> Send:
    """`send` without what `Edge` does around it, which is nothing once a response has begun."""
    found: Send = scope["state"].get("send", send)
    return found


class Edge:
    """Names each request in `x-request-id`, with the client's own id if it sent a sane one, and renders whatever is
    raised below, as long as nothing has been sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        given = dict(scope["headers"])
        request_id = given.get(b"x-request-id", b"")
        if not _SANE_ID.fullmatch(request_id):
            request_id = fresh_id().encode()
        # The router raises its refusals where an app is named, and answers in plain text otherwise.
        scope["app"] = self
        state = scope.setdefault("state", {})
        state.update(request_id=request_id.decode(), send=send, given=given, added=[], status=0)
        logs.request_id.set(state["request_id"])
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] in _STARTS:
                started = True
                state["status"] = message.get("status", 101)
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id), *state["added"]]
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:
            if started:
                raise
            if isinstance(error, ClientDisconnect):
                return  # in the middle of its own body: there is nobody to answer
            # To a WebSocket, this is the answer to its handshake.
            await _rendered(error, scope)(scope, receive, named)
        except asyncio.CancelledError:
            # Nobody does this but a server that ends. Whatever has begun by now, nobody reads.
            if not started:
                await error_response(EngineUnavailable(ENDING, code="server_ending"))(scope, receive, named)
        finally:
            access_line(scope, began)


def _rendered(error: Exception, scope: Scope) -> Response:
    if isinstance(error, HTTPException):
        return _refusal(error, scope)
    if not isinstance(error, SyringaError):
        name = scope["state"]["request_id"]
        how = scope.get("method", "WebSocket")
        logger.error("%s %s failed (request %s)", how, scope["path"], name, exc_info=error)
    return error_response(error)


class BodyLimit:
    """Refuses a body over the limit: by its stated length, or as soon as it has grown past it. A WebSocket has no body;
    its frames are measured where they are read."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stated = scope["state"]["given"].get(b"content-length", b"")
        if stated.isdigit() and int(stated) > self._limit:
            raise self._too_large()
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body is larger than {self._limit} bytes, the limit of this server.")
