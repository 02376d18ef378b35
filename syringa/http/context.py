"""The state of one request, shared by the middleware, the handlers and the access log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

from syringa.service.auth.keys import Caller
from syringa.service.usage.accounting import RequestAccounting

if TYPE_CHECKING:
    from syringa.http.routing import Endpoint
    from syringa.http.server.request_cycle import RequestCycle

_KEY = "syringa.request"
# The ASGI extensions in which Syringa's own server offers its request cycle and its connection.
REQUEST_CYCLE, CONNECTION = "syringa.request_cycle", "syringa.connection"


class ClaimableConnection(Protocol):
    """The connection that a request came over (see `syringa.http.server.connection_pool`)."""

    def claim(self, organization: str | None) -> None:
        """Assign the connection to an organization. Raises `EngineOverloaded` if there are too many connections."""
        ...

    def set_busy(self, busy: bool) -> None:
        """Record whether a WebSocket is responding. An HTTP connection knows by itself."""
        ...


@dataclass(slots=True)
class RequestContext:
    """Created by `ErrorMiddleware`, and completed by the layers inside it."""

    request_id: str
    headers: dict[bytes, bytes]  # of the request; the last value where a header is repeated
    endpoint: Endpoint
    cycle: RequestCycle | None  # None on other ASGI servers
    response_headers: list[tuple[bytes, bytes]] = field(default_factory=list)  # added to every response
    status: int = 0  # of the response; 0 until it has started
    caller: Caller | None = None  # None for public endpoints
    accounting: RequestAccounting | None = None  # None for endpoints that are not metered
    connection: ClaimableConnection | None = None  # None on other ASGI servers


def request_context(scope: Scope) -> RequestContext:
    context: RequestContext = scope["state"][_KEY]
    return context


def set_request_context(scope: Scope, context: RequestContext) -> None:
    scope.setdefault("state", {})[_KEY] = context


def set_response_status(scope: Scope, status: int) -> None:
    """Record the status of a response that the server sent instead of the app, if the app has begun the request."""
    context: RequestContext | None = scope["state"].get(_KEY)
    if context is not None:
        context.status = status
