"""Endpoints and the router that resolves requests to them.

The router calls handlers directly: Starlette's `Route` wraps `send`, and thereby every token of a stream.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.convertors import Convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from syringa.api.error_formats import ErrorFormat
from syringa.api.openapi.operations import Operation
from syringa.http.context import request_context

if TYPE_CHECKING:
    from syringa.http.endpoints import Handlers

WEBSOCKET = "WEBSOCKET"  # the method of a WebSocket endpoint

Handler = Callable[[Request], Awaitable[Response]]


class Access(enum.Enum):
    """The credentials an endpoint requires. Where no API keys are configured, only `ADMIN` is restricted."""

    PUBLIC = "public"
    METRICS = "metrics"  # an API key, unless `public_metrics` is set
    API_KEY = "api_key"
    ADMIN = "admin"  # an administrator's API key


@dataclass(frozen=True, eq=False)
class Endpoint:
    """One method on one path: the only declaration of an endpoint (see `syringa.http.endpoints`)."""

    method: str
    path: str
    handler: Callable[[Handlers], Handler | ASGIApp]  # an ASGI app for a WebSocket
    operation: Operation | None  # None: not part of the OpenAPI document
    access: Access = Access.API_KEY
    metered: bool = False  # generates tokens: requests are accounted for, and counted in the metrics
    upload: bool = False  # takes a file, whose size has a limit of its own
    monitoring: bool = False  # remains available during shutdown, and is logged at DEBUG level
    error_format: ErrorFormat = "openai"  # the API whose error bodies it returns
    shared: bool = False  # Anthropic's API has the path, too: the client's headers decide on the format

    @property
    def metrics_label(self) -> str:
        """The value of the label `endpoint`; empty for endpoints that the metrics do not count."""
        return self.path if self.metered else ""


class Router:
    """Resolves requests to endpoints, and calls their handlers.

    Paths without parameters are looked up in a dictionary; the others are matched in the order of the table.
    """

    def __init__(self, endpoints: Sequence[Endpoint], handlers: Handlers, root_path: str = "") -> None:
        """`root_path`: the path of the API on a proxy. Paths are found with it and without."""
        self._prefix = f"{root_path}/" if root_path else ""
        self.endpoints = tuple(endpoints)
        self._apps: dict[Endpoint, ASGIApp] = {}
        self._exact: dict[tuple[str, str], Endpoint] = {}
        by_path: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            handler: Any = endpoint.handler(handlers)
            self._apps[endpoint] = handler if endpoint.method == WEBSOCKET else _handler_app(handler)
            by_path.setdefault(endpoint.path, []).append(endpoint)
            if "{" not in endpoint.path:
                for method in _methods(endpoint):
                    self._exact[endpoint.path, method] = endpoint
        self._paths = [_Path(path, group) for path, group in by_path.items()]
        self._apps |= {path.method_not_allowed: _rejecting_app(405, path.allow) for path in self._paths}
        not_found = _rejecting_app(404)
        self._not_found = Endpoint("", "", lambda _: not_found, None, shared=True)
        self._apps[self._not_found] = not_found
        self._not_found_below = {
            prefix: self._not_found
            if format == self._not_found.error_format
            else replace(self._not_found, error_format=format, shared=False)
            for prefix, format in _formats_below(endpoints).items()
        }
        self._apps |= dict.fromkeys(self._not_found_below.values(), not_found)

    def resolve(self, scope: Scope) -> Endpoint:
        """Return the endpoint of a request, and store its path parameters in the scope.

        An unknown path or method resolves to an endpoint that responds with 404 or 405.
        """
        path: str = scope["path"]
        method = WEBSOCKET if scope["type"] == "websocket" else scope["method"]
        if self._prefix and path.startswith(self._prefix):
            stripped = path[len(self._prefix) - 1 :]
            endpoint = self._exact.get((stripped, method)) or self._match(stripped, method, scope)
            if endpoint is not self._not_found:
                return endpoint
        return self._exact.get((path, method)) or self._match(path, method, scope)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._apps[request_context(scope).endpoint](scope, receive, send)

    def _match(self, path: str, method: str, scope: Scope) -> Endpoint:
        rejecting = self._not_found
        for entry in self._paths:
            match = entry.pattern.match(path)
            if match is None:
                continue
            if (endpoint := entry.endpoints.get(method)) is not None:
                parameters = {name: entry.convertors[name].convert(text) for name, text in match.groupdict().items()}
                scope["path_params"] = parameters
                return endpoint
            if rejecting is self._not_found:
                rejecting = entry.method_not_allowed
        if rejecting is self._not_found:
            below = (each for prefix, each in self._not_found_below.items() if path.startswith(prefix))
            return next(below, rejecting)
        return rejecting


class _Path:
    """The endpoints of one path."""

    pattern: re.Pattern[str]
    convertors: Mapping[str, Convertor[Any]]

    def __init__(self, path: str, endpoints: Sequence[Endpoint]) -> None:
        self.pattern, _, self.convertors = compile_path(path)
        self.endpoints = {method: endpoint for endpoint in endpoints for method in _methods(endpoint)}
        self.allow = ", ".join(sorted(method for method in self.endpoints if method != WEBSOCKET))
        self.method_not_allowed = replace(endpoints[0], method="", operation=None, metered=False)


def _formats_below(endpoints: Sequence[Endpoint]) -> dict[str, ErrorFormat]:
    """Return the formats of errors at unknown paths, by how these begin, the longest beginning first.

    Such a path is one of the API that has all paths in the same folder, or an endpoint above it.
    """
    folders: dict[str, set[ErrorFormat]] = {}
    for endpoint in endpoints:
        for folder in (endpoint.path.rpartition("/")[0] + "/", f"{endpoint.path}/"):
            folders.setdefault(folder, set()).add(endpoint.error_format)
    single = {folder: formats.pop() for folder, formats in folders.items() if len(formats) == 1}
    return dict(sorted(single.items(), key=lambda entry: -len(entry[0])))


def _methods(endpoint: Endpoint) -> tuple[str, ...]:
    return ("GET", "HEAD") if endpoint.method == "GET" else (endpoint.method,)


def _handler_app(handler: Handler) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handler(Request(scope, receive))
        await response(scope, receive, send)

    return app


def _rejecting_app(status: int, allow: str = "") -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            raise HTTPException(404)
        raise HTTPException(status, headers={"Allow": allow} if allow else None)

    return app
