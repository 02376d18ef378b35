"""Request ids and error responses.

`ErrorMiddleware` is the only layer that wraps `send`. A stream's body does not pass through it on Syringa's own server:
once the response has started, the stream writes to the request cycle (see `syringa.http.streaming.writer`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from syringa import logs
from syringa.api.error_formats import ErrorFormat, convert_error, error_body
from syringa.api.fields.common import ErrorBody, ErrorEnvelope
from syringa.errors import EngineUnavailable, RateLimited, SyringaError
from syringa.http.context import CONNECTION, REQUEST_CYCLE, RequestContext, request_context, set_request_context
from syringa.http.middleware.access_log import log_request
from syringa.http.routing import Endpoint
from syringa.ids import random_id

logger = logging.getLogger("syringa.http")

# The first message of a response to a request, to a rejected handshake, and to an accepted one.
_STARTS = frozenset({"http.response.start", "websocket.http.response.start", "websocket.accept"})
_VALID_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def error_response(error: Exception, format: ErrorFormat = "openai", request_id: str = "") -> Response:
    """Return the response to a request that failed, in the error format of an API."""
    headers = {}
    if isinstance(error, SyringaError):
        if error.retry_after is not None:
            headers["retry-after"] = str(math.ceil(error.retry_after))
        if error.status == 401:
            headers["www-authenticate"] = "Bearer"
    status = error.status if isinstance(error, SyringaError) else 500
    body = msgspec.json.encode(error_body(error, format, request_id))
    response = Response(body, status, headers, media_type="application/json")
    if isinstance(error, RateLimited):
        response.raw_headers += error.headers
    return response


def shutdown_error() -> EngineUnavailable:
    """Return the error of requests that arrive during shutdown or do not finish in time."""
    return EngineUnavailable("The server is being stopped: send the request again shortly.", code="server_ending")


class ErrorMiddleware:
    """Creates the `RequestContext`, adds `x-request-id` to the response, and renders every error that is raised before
    the response has started. A valid `x-request-id` of the client is adopted."""

    def __init__(self, app: ASGIApp, resolve: Callable[[Scope], Endpoint]) -> None:
        """`resolve` returns the endpoint of a request."""
        self._app, self._resolve = app, resolve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            raise RuntimeError(f"the ASGI protocol {scope['type']!r} is not supported")
        started_at = time.perf_counter()
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        if not _VALID_REQUEST_ID.fullmatch(request_id):
            request_id = random_id().encode()
        extensions = scope.get("extensions", {})
        context = RequestContext(
            request_id.decode(),
            headers,
            self._resolve(scope),
            extensions.get(REQUEST_CYCLE),
            connection=extensions.get(CONNECTION),
        )
        set_request_context(scope, context)
        logs.request_id.set(context.request_id)
        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] in _STARTS:
                started = True
                context.status = message.get("status", 101)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id),
                    *([(b"request-id", request_id)] if context.error_format == "anthropic" else ()),
                    *context.response_headers,
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        except Exception as error:
            if started:
                raise
            if isinstance(error, ClientDisconnect):
                return  # the client disconnected while sending its body
            # For a WebSocket, this is the response to its handshake.
            await _render(error, scope)(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            # Only the server cancels requests, at the end of its shutdown. A started response cannot be changed.
            if not started:
                await _render(shutdown_error(), scope)(scope, receive, send_with_headers)
        finally:
            log_request(scope, time.perf_counter() - started_at)


def _render(error: Exception, scope: Scope) -> Response:
    if isinstance(error, HTTPException):
        return _render_http_exception(error, scope)
    context = request_context(scope)
    if not isinstance(error, SyringaError):
        method = scope.get("method", "WebSocket")
        logger.error("%s %s failed (request %s)", method, scope["path"], context.request_id, exc_info=error)
    return error_response(error, context.error_format, context.request_id)


def _render_http_exception(error: HTTPException, scope: Scope) -> Response:
    """Render the router's 404 and 405 in the error envelope."""
    what = "no WebSocket endpoint" if scope["type"] == "websocket" else "nothing"
    message = {
        404: f"There is {what} at {scope['path']}.",
        405: f"{scope['path']} does not accept {scope.get('method')}.",
    }.get(error.status_code, error.detail)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    context, envelope = request_context(scope), ErrorEnvelope(ErrorBody(message, kind, None, None))
    body = convert_error(envelope, error.status_code, context.error_format, context.request_id)
    return Response(msgspec.json.encode(body), error.status_code, error.headers, media_type="application/json")
