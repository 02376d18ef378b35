"""The state of one request, shared by the middleware, the handlers and the access log."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from starlette.types import Scope

from syringa.api.error_formats import ErrorFormat
from syringa.service.auth.keys import Caller
from syringa.service.usage.accounting import RequestAccounting
from syringa.store import FinishedResponse

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

    def local_port(self) -> int | None:
        """Return the port to which the client has connected; None if it is not known."""
        ...

    def set_busy(self, busy: bool) -> None:
        """Record whether a WebSocket is responding. An HTTP connection knows by itself."""
        ...

    def expect_upload(self) -> None:
        """Let the body of the current HTTP request take as long as it arrives with some speed."""
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
    finished_responses: list[FinishedResponse] | None = None  # collected here instead of stored, for a line of a batch

    @property
    def speaks_anthropic(self) -> bool:
        """Whether a client uses Anthropic's API: by the version that it sends, or by where it has its key."""
        headers = self.headers
        return b"anthropic-version" in headers or (b"x-api-key" in headers and b"authorization" not in headers)

    @property
    def error_format(self) -> ErrorFormat:
        """The API in whose format errors are: that of the endpoint, or of the client where two APIs have the path."""
        return "anthropic" if self.endpoint.shared and self.speaks_anthropic else self.endpoint.error_format


def request_context(scope: Scope) -> RequestContext:
    context: RequestContext = scope["state"][_KEY]
    return context


def set_request_context(scope: Scope, context: RequestContext) -> None:
    scope.setdefault("state", {})[_KEY] = context


def find_request_context(scope: Scope) -> RequestContext | None:
    """Return the context of a request, or None if the app has not begun it."""
    context: RequestContext | None = scope["state"].get(_KEY)
    return context


def set_response_status(scope: Scope, status: int) -> None:
    """Record the status of a response that the server sent instead of the app, if the app has begun the request."""
    if (context := find_request_context(scope)) is not None:
        context.status = status
