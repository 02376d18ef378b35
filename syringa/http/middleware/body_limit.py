"""The limit on the size of request bodies."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from syringa.errors import PayloadTooLarge
from syringa.http.context import request_context


class BodyLimitMiddleware:
    """Rejects a body over the limit: by its `content-length`, or as soon as more bytes have arrived.

    WebSocket messages are measured by their handler.
    """

    def __init__(self, app: ASGIApp, limit: int, upload_limit: int) -> None:
        """`upload_limit`: that of endpoints that take a file."""
        self._app = app
        self._limits = {False: limit, True: upload_limit}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = request_context(scope)
        content_length, limit = context.headers.get(b"content-length", b""), self._limits[context.endpoint.upload]
        if content_length.isdigit() and int(content_length) > limit:
            raise _too_large(limit)
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
            return message

        await self._app(scope, receive_limited, send)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {limit} bytes, the limit of this server.")
