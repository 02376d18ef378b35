"""Checks of `Host`, `Origin` and content type, against requests that a web page makes through a browser.

A server without API keys trusts everything that reaches its loopback address, and so does a browser that runs beside
it. A page of another site can have the browser send requests there. It can even read the responses if its own host name
resolves to the loopback address (DNS rebinding). Such requests are recognized by their headers `Host` and `Origin`,
which a page cannot choose.
"""

from __future__ import annotations

import functools
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from syringa.config import Config, is_address, is_loopback
from syringa.errors import Forbidden, UnsupportedMediaType
from syringa.http.context import request_context
from syringa.service.app_state import AppState

_ANY = "*"


class HostMiddleware:
    """Checks `Host`, `Origin` and `Content-Type` while no API keys are required, or where `allowed_hosts` is set.

    With keys, `Origin` is checked where Ollama's endpoints get a body that is not declared as JSON.
    """

    def __init__(self, app: ASGIApp, app_state: AppState, config: Config) -> None:
        self._app, self._app_state = app, app_state
        self._always = bool(config.allowed_hosts)
        self._hosts = {normalize_host(each) for each in (*config.allowed_hosts, config.host)}
        self._origins = frozenset(config.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._always or not self._app_state.keys.required:
            self._check(scope)
        else:
            self._check_undeclared(scope)
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        context = request_context(scope)
        headers = context.headers
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None:  # HTTP/1.0 has none, and browsers do not use it
            self._check_host(host.decode("latin-1"), any_address=context.endpoint.monitoring)
        if origin is not None:
            self._check_origin(origin.decode("latin-1"), (host or b"").decode("latin-1"))
        # Some clients of Ollama send none. A page of another site can do so too, but not without an `Origin`.
        needs_type = context.endpoint.error_format != "ollama"
        if needs_type and scope.get("method") == "POST" and _has_body(headers) and not headers.get(b"content-type"):
            message = "The body has no content type: send it as `Content-Type: application/json`."
            raise UnsupportedMediaType(message, code="content_type_missing")

    def _check_undeclared(self, scope: Scope) -> None:
        """Check the origin of a body that a browser sends without asking the server first."""
        context = request_context(scope)
        origin = context.headers.get(b"origin")
        if origin is None or context.endpoint.error_format != "ollama" or not _has_body(context.headers):
            return
        if b"json" not in context.headers.get(b"content-type", b"").lower():
            self._check_origin(origin.decode("latin-1"), context.headers.get(b"host", b"").decode("latin-1"))

    def _check_host(self, host: str, *, any_address: bool) -> None:
        """Raise `Forbidden` for a name under which the server is not known.

        `any_address`: accept every IP address, which health checks send: rebinding takes a name.
        """
        name = host_name("//" + host)
        if _ANY in self._hosts or self._is_known(name) or (any_address and name is not None and is_address(name)):
            return
        message = (
            f"The server does not respond to requests for the host {host!r:.200}: "
            "use its loopback address, or allow the name with --allowed-hosts."
        )
        raise Forbidden(message, code="host_not_allowed")

    def _check_origin(self, origin: str, host: str) -> None:
        name = host_name(origin)
        is_own_page = self._is_known(name) or (name is not None and name == host_name("//" + host))
        if not is_own_page and _ANY not in self._origins and origin not in self._origins:
            message = f"Pages of {origin!r:.200} may not use this server: allow them with --cors-origins."
            raise Forbidden(message, code="origin_not_allowed")

    def _is_known(self, name: str | None) -> bool:
        return name is not None and (name in self._hosts or is_loopback(name))


@functools.lru_cache(1024)
def host_name(url: str) -> str | None:
    """Return the normalized host of a URL, without its port; None if there is none, or it is malformed."""
    try:
        found = urlsplit(url).hostname
    except ValueError:
        return None
    return normalize_host(found) if found else None


def normalize_host(host: str) -> str:
    return host.strip("[]").rstrip(".").lower()


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-length", b"0").strip() != b"0" or b"transfer-encoding" in headers
