"""Paths and their handlers. Nothing stands between a handler's answer and the server: Starlette's own route wraps every
message that is sent, which for a stream is every token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

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


class Paths:
    """Finds the handler of a request: a path without parameters is looked up, others are compared one by one."""

    def __init__(self, routes: Sequence[routing.BaseRoute]) -> None:
        self._router = routing.Router(routes, redirect_slashes=False)
        self._plain: dict[tuple[str, str], ASGIApp] = {}
        for route in routes:
            if isinstance(route, Route) and "{" not in route.path:
                for method in route.methods or ():
                    self._plain.setdefault((route.path, method), route.app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._plain.get((scope["path"], scope.get("method", "")))
        await (found or self._router)(scope, receive, send)
