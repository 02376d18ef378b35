"""A path and its handler. Nothing stands between the handler's answer and the server: Starlette's own route wraps every
message that is sent, which for a stream is every token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette import routing
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Handler = Callable[[Request], Awaitable[Response]]


class Route(routing.Route):
    def __init__(self, path: str, endpoint: Handler, *, methods: list[str] | None = None) -> None:
        super().__init__(path, endpoint, methods=methods or ["GET"])
        self.app = _answering(endpoint)


def _answering(handle: Handler) -> ASGIApp:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handle(Request(scope, receive))
        await response(scope, receive, send)

    return answer
