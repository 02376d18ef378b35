"""Running the lines of batches: each is a request to the handler of its endpoint, without a connection.

Keys, models, limits on fields, usage and errors are therefore those of any request. What differs: the request runs in
the background of the engine, has no deadline but that of its batch, and is neither counted by the rate limits nor
written to the access log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.types import Message, Scope

from syringa import logs
from syringa.api.batches import LINE_ENDPOINT
from syringa.api.error_formats import error_envelope
from syringa.errors import OUT_OF_MEMORY_CODE, SyringaError, WorkerLost
from syringa.http.context import RequestContext, set_request_context
from syringa.http.routing import Endpoint, Handler
from syringa.service.batches.run import LineRequest, LineResponse
from syringa.service.usage.accounting import RequestAccounting
from syringa.store import FinishedResponse
from syringa.types import in_background

logger = logging.getLogger("syringa.http")

_UNAVAILABLE = 503
_IGNORED = b"x-syringa-ignored"


class BatchLineExecutor:
    """Runs lines with the handlers of an app."""

    def __init__(self, endpoints: Mapping[str, tuple[Endpoint, Handler]]) -> None:
        """`endpoints`: by path."""
        self._endpoints = endpoints

    async def __call__(self, line: LineRequest) -> LineResponse:
        """Run a line and return its response. Raises nothing but `CancelledError`, which aborts the request."""
        logs.request_id.set(line.request_id)
        in_background.set(True)
        endpoint, handler = self._endpoints[line.endpoint]
        accounting = RequestAccounting([], line.caller, LINE_ENDPOINT, line.request_id)
        accounting.background = True
        exchange = _Exchange(line.body)
        context = RequestContext(line.request_id, dict(exchange.headers), endpoint, None)
        context.caller, context.accounting = line.caller, accounting
        finished: list[FinishedResponse] = []
        context.finished_responses = finished
        scope: Scope = {
            "type": "http",
            "method": endpoint.method,
            "path": endpoint.path,
            "query_string": b"",
            "headers": exchange.headers,
        }
        set_request_context(scope, context)
        retry_after, suspect = None, False
        try:
            response = await handler(Request(scope, exchange.receive))
            await response(scope, exchange.receive, exchange.send)
        except Exception as error:
            if not isinstance(error, SyringaError):
                logger.error("a line of a batch failed (request %s)", line.request_id, exc_info=error)
            accounting.fail(error)
            exchange.fail(error)
            if isinstance(error, SyringaError) and error.status == _UNAVAILABLE:
                retry_after = error.retry_after or 1.0
                suspect = isinstance(error, WorkerLost) or error.code == OUT_OF_MEMORY_CODE
        finally:
            accounting.close()
        stored = finished[-1] if finished else None
        return LineResponse(exchange.status, exchange.body, accounting, retry_after, suspect, exchange.ignored, stored)


class _Exchange:
    """The ASGI messages of a request that has no connection: the body is there, and its client never disconnects."""

    def __init__(self, body: bytes) -> None:
        self.headers = [(b"content-type", b"application/json")]
        self.status = 500
        self.ignored = ""
        self._body: bytes | None = body
        self._parts: list[bytes] = []

    @property
    def body(self) -> bytes:
        return b"".join(self._parts)

    async def receive(self) -> Message:
        body, self._body = self._body, None
        if body is None:
            await asyncio.Event().wait()  # until it is cancelled
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.ignored = dict(message["headers"]).get(_IGNORED, b"").decode("latin-1")
        else:
            self._parts.append(message.get("body", b""))

    def fail(self, error: Exception) -> None:
        self.status = error.status if isinstance(error, SyringaError) else 500
        self._parts = [msgspec.json.encode(error_envelope(error))]
