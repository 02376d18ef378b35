"""Authentication, rate limiting and usage accounting middleware."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from syringa.config import is_loopback
from syringa.errors import Forbidden, SyringaError, Unauthorized
from syringa.http.context import RequestContext, request_context
from syringa.http.dispatch import TIMEOUT_HEADER, parse_timeout
from syringa.http.middleware.errors import shutdown_error
from syringa.http.middleware.hosts import host_name
from syringa.http.routing import Access
from syringa.service.app_state import AppState
from syringa.service.auth.key_cache import ApiKeyCache, UnknownKey
from syringa.service.auth.keys import Caller


class AuthMiddleware:
    """Identifies the caller, enforces access and rate limits, and opens and closes the accounting of metered requests.

    Every POST counts against the rate limits, except on the admin endpoints; reads are free. The messages of a
    WebSocket are limited and accounted for one by one, by its handler.
    """

    def __init__(self, app: ASGIApp, app_state: AppState, public_metrics: bool = False) -> None:
        self._app, self._app_state = app, app_state
        self._public = {Access.PUBLIC, Access.METRICS} if public_metrics else {Access.PUBLIC}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = request_context(scope)
        endpoint = context.endpoint
        connection = context.connection
        if endpoint.access in self._public:
            if connection is not None:
                connection.claim(None)
            await self._app(scope, receive, send)
            return
        is_post = scope.get("method") == "POST"
        try:
            caller = context.caller = await self._authenticate(read_credentials(context.headers, self._app_state.keys))
        except SyringaError as error:
            if is_post and endpoint.metered:
                self._app_state.count_refused(endpoint.metrics_label, error.status)
            raise
        if connection is not None:
            connection.claim(caller.organization)
        if endpoint.access is Access.ADMIN:
            check_admin(caller, Headers(scope=scope))
            await self._app(scope, receive, send)
        elif not is_post:
            await self._app(scope, receive, send)
        elif endpoint.metered:
            await self._account(context, caller, scope, receive, send)
        else:
            await self._limit(context, caller, scope, receive, send)

    async def _authenticate(self, header: bytes | None) -> Caller:
        try:
            return self._app_state.keys.authenticate(header)
        except UnknownKey:
            return await self._app_state.keys.authenticate_new(header)

    async def _account(
        self, context: RequestContext, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        label = context.endpoint.metrics_label
        accounting = context.accounting = self._app_state.start_accounting(caller, label, context.request_id)
        try:
            accounting.timeout = parse_timeout(context.headers.get(TIMEOUT_HEADER.encode()))
            accounting.admission = self._app_state.limiter.acquire(caller)
            context.response_headers = accounting.admission.headers
            await self._app(scope, receive, send)
        except ClientDisconnect:  # before its body was complete
            accounting.cancel()
            raise
        except asyncio.CancelledError:  # by the server, at the end of its shutdown
            accounting.fail(shutdown_error())
            raise
        except Exception as error:
            accounting.fail(error)
            raise
        finally:
            if not accounting.detached:  # a background response keeps its admission until it ends
                accounting.close()

    async def _limit(self, context: RequestContext, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        admission = self._app_state.limiter.acquire(caller)
        context.response_headers = admission.headers
        try:
            await self._app(scope, receive, send)
        finally:
            admission.release()


def read_credentials(headers: Mapping[bytes, bytes], keys: ApiKeyCache) -> bytes | None:
    """Return the `Authorization` header of a request; a key in `X-Api-Key` counts as a Bearer token.

    Raises `Unauthorized` for two different keys where one is required. The key that is meant would depend on the order
    in which headers are read.
    """
    authorization = headers.get(b"authorization")
    key = headers.get(b"x-api-key", b"").strip()
    if not key or not keys.required:
        return authorization
    scheme, _, other = (authorization or b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and other.strip() != key:
        raise Unauthorized("The Authorization and X-Api-Key headers have different API keys: send one of them.")
    return b"Bearer " + key


def check_admin(caller: Caller, headers: Headers) -> None:
    """Raise `Forbidden` unless the caller may administer the server.

    Where no API keys are configured, only programs on this machine may: otherwise a page of another site could make a
    visitor's browser administer a server that runs beside it.
    """
    if not caller.admin:
        raise Forbidden("An administrator's key is needed: make one with `syringa keys create --admin`.")
    if caller.key:
        return
    cross_site = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if cross_site or not _is_local(headers.get("origin", "http://localhost")):
        raise Forbidden("Pages of other sites may not manage this server.")
    if not _is_local("//" + headers.get("host", "")):  # DNS rebinding: another site's name may resolve to this machine
        raise Forbidden("Without keys, the server is managed from its own machine alone: use its loopback address.")


def _is_local(url: str) -> bool:
    host = host_name(url)
    return host is not None and is_loopback(host)
