"""Graceful shutdown.

1. New requests get a 503 `server_ending`, on a listener that stays open, so that clients get a response and not a
   broken connection. Monitoring endpoints remain available; `/ready` fails. Idle connections are closed, idle
   WebSockets with the code 1001.
2. Running streams, bodies, WebSockets and background responses have `drain_timeout` seconds to finish.
3. What is still running then fails with an error that the client can read; so do, a moment later, requests that are
   still being received.
4. The listener and all connections are closed.

A second signal skips to step 3.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from syringa.http.context import request_context
from syringa.http.middleware.errors import shutdown_error
from syringa.service.app_state import AppState

if TYPE_CHECKING:
    from syringa.http.dispatch import GenerationDispatcher
    from syringa.http.server.connection import HttpConnection
    from syringa.http.server.limits import ConnectionLimits
    from syringa.http.server.websocket_connection import WebSocketConnection

logger = logging.getLogger("syringa.http")

ABORT_SECONDS = 1.0  # for aborted requests to store and send their errors
FLUSH_SECONDS = 1.0  # for clients to read the rest
_POLL_SECONDS = 0.05


class DrainMiddleware:
    """Rejects requests while the server drains, except those of monitoring endpoints."""

    def __init__(self, app: ASGIApp, app_state: AppState) -> None:
        self._app, self._app_state = app, app_state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app_state.draining and not request_context(scope).endpoint.monitoring:
            raise shutdown_error()
        await self._app(scope, receive, send)


class GracefulShutdown:
    """Drains and closes one server."""

    def __init__(
        self,
        state: ServerState,
        limits: ConnectionLimits,
        app_state: AppState,
        dispatcher: GenerationDispatcher,
        drain_timeout: float,
    ) -> None:
        self._state, self._limits, self._app_state, self._dispatcher = state, limits, app_state, dispatcher
        self._drain_timeout = drain_timeout
        self.hurry = False  # set to skip the current wait

    async def run(self, listeners: Iterable[asyncio.AbstractServer]) -> None:
        """Drain and close everything, in at most `drain_timeout` + 2 * `ABORT_SECONDS` + `FLUSH_SECONDS` seconds."""
        state, app_state, timeout = self._state, self._app_state, self._drain_timeout
        logger.info("shutdown: draining: requests=%d timeout=%g", len(state.tasks), timeout)
        app_state.draining = self._limits.draining = True
        for callback in list(app_state.drain_callbacks):
            callback()
        for connection in list(state.connections):
            connection.shutdown()
        background = asyncio.create_task(app_state.drain(timeout + ABORT_SECONDS))

        def is_done() -> bool:
            return not state.tasks and background.done()

        if not await self._wait_until(is_done, timeout):
            logger.warning("shutdown: aborting requests that did not finish in time: requests=%d", len(state.tasks))
            self.hurry = False
            self._dispatcher.stop()
            await self._wait_until(is_done, ABORT_SECONDS)
        for listener in listeners:
            listener.close()
        await self._close(background)

    async def _close(self, background: asyncio.Task[None]) -> None:
        connections = cast("set[HttpConnection | WebSocketConnection]", self._state.connections)
        for connection in list(connections):
            connection.abandon_response()
        remaining = [background, *self._state.tasks]
        for task in remaining:
            task.cancel()
        await asyncio.wait(remaining, timeout=ABORT_SECONDS)
        for connection in list(connections):
            connection.transport.close()
        await self._wait_until(lambda: not connections, FLUSH_SECONDS)
        for connection in list(connections):
            connection.transport.abort()

    async def _wait_until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not is_done():
            if self.hurry or loop.time() >= deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True
