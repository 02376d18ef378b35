"""The limit on the size of request bodies."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from syringa.errors import PayloadTooLarge
from syringa.http.context import request_context


class BodyLimitMiddleware:
    """Rejects a body over the limit: by its `content-length`, or as soon as more bytes have arrived.

    WebSocket messages are measured by their handler.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = request_context(scope).headers.get(b"content-length", b"")
        if content_length.isdigit() and int(content_length) > self._limit:
            raise self._too_large()
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body is larger than {self._limit} bytes, the limit of this server.")
