"""The gate: who may come in, how often, and that every answer is in the books."""

from __future__ import annotations

import asyncio
import math

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from syringa.errors import EngineUnavailable, InvalidRequest, SyringaError
from syringa.http.server.drain import ENDING
from syringa.service.app_state import Work
from syringa.service.auth.caller import Caller

PUBLIC_PATHS = frozenset({"/health", "/ready", "/status", "/openapi.json", "/docs"})
# What generates something: each of these requests has an entry in the books.
METERED_PATHS = frozenset(
    {
        "/v1/completions",
        "/api/v2/completions",
        "/v1/chat/completions",
        "/api/v2/chat/completions",
        "/v1/responses",
        "/v1/responses/compact",
    }
)
ADMIN_PREFIX = "/admin/"
TIMEOUT_HEADER = "x-syringa-timeout"


class Gate:
    """Finds the caller, holds it to its limits, and opens and closes the request's account.

    Every POST counts as a request, but for an administrator's: reading what is there is free. What a WebSocket asks for
    is counted message by message, where it is read.
    """

    def __init__(self, app: ASGIApp, work: Work, public_metrics: bool = False) -> None:
        self._app, self._work = app, work
        self._public = PUBLIC_PATHS | ({"/metrics"} if public_metrics else set())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] not in ("http", "websocket") or path in self._public:
            await self._app(scope, receive, send)
            return
        state = scope["state"]
        headers = state["given"]
        try:
            caller = state["caller"] = self._work.keys.find(headers.get(b"authorization"))
        except SyringaError as error:
            if scope.get("method") == "POST":
                self._work.metrics.turn_away(path, error.status)
            raise
        if scope.get("method") != "POST" or path.startswith(ADMIN_PREFIX):
            await self._app(scope, receive, send)
            return
        if path not in METERED_PATHS:
            await self._admitted(caller, scope, receive, send)
            return
        account = state["account"] = self._work.books.open(caller, path, state["request_id"])
        try:
            account.timeout = read_timeout(headers.get(TIMEOUT_HEADER.encode()))
            await self._admitted(caller, scope, receive, send)
        except ClientDisconnect:  # before all of its body was here
            account.cancel()
            raise
        except asyncio.CancelledError:  # by a server that ends
            account.fail(EngineUnavailable(ENDING, code="server_ending"))
            raise
        except Exception as error:
            account.fail(error)
            raise
        finally:
            if not account.later:
                account.close()

    async def _admitted(self, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        admission = self._work.limiter.enter(caller)
        scope["state"]["added"] = admission.headers
        try:
            await self._app(scope, receive, send)
        finally:
            admission.leave()


def read_timeout(given: bytes | None) -> float | None:
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        shown = given[:40].decode("latin-1")
        raise InvalidRequest(f"{TIMEOUT_HEADER}: expected seconds above 0, not {shown!r}.", param=TIMEOUT_HEADER)
    return seconds
