"""How a server ends: nobody new is let in, what runs gets its time, and what is left is told.

1. New requests get 503 `server_ending`, on a listener that stays open, so that a client sees an answer and not a broken
   connection. `/health` goes on, `/ready` says no. Idle connections are closed, idle WebSockets with 1001.
2. Streams, bodies, WebSockets and background responses that run have `drain_timeout` seconds.
3. What still runs then fails with an error that says why, where a client can read it. So does, a moment later, what is
   still being sent to us.
4. The listener closes, and every connection.

A second signal goes to the third step at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.server import ServerState

from syringa.errors import EngineUnavailable
from syringa.service.app_state import Work

if TYPE_CHECKING:
    from syringa.http.dispatch import Desk
    from syringa.http.server.connection import Connection
    from syringa.http.server.limits import Shared
    from syringa.http.server.websocket_protocol import SocketConnection

logger = logging.getLogger("syringa.http")

ENDING = "The server is being stopped: send the request again shortly."
TOLD_SECONDS = 1.0  # that those who are told get to write it down and pass it on
FLUSH_SECONDS = 1.0  # that clients get to read the rest
_TICK = 0.05
# What watches the server, and has to be able to see it end.
_STAYS = frozenset({"/health", "/ready", "/metrics", "/status"})


class Closing:
    """The layer that lets nobody in any more once the server drains. It belongs inside `Edge`, which answers."""

    def __init__(self, app: ASGIApp, work: Work) -> None:
        self._app, self._work = app, work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._work.draining and scope.get("path") not in _STAYS:
            raise EngineUnavailable(ENDING, code="server_ending")
        await self._app(scope, receive, send)


class Drain:
    """The end of one server."""

    def __init__(self, state: ServerState, shared: Shared, work: Work, desk: Desk, seconds: float) -> None:
        self._state, self._shared, self._work, self._desk = state, shared, work, desk
        self._seconds = seconds
        self.hurried = False

    async def run(self, listeners: Iterable[asyncio.AbstractServer]) -> None:
        """Returns when nothing is left: at most `seconds`, twice `TOLD_SECONDS` and `FLUSH_SECONDS` later."""
        state, work, seconds = self._state, self._work, self._seconds
        logger.info("the server ends: %d requests have %g seconds to finish", len(state.tasks), seconds)
        work.draining = self._shared.draining = True
        for leave in list(work.leaving):
            leave()
        for each in list(state.connections):
            each.shutdown()
        background = asyncio.create_task(work.drain(seconds + TOLD_SECONDS))

        def is_done() -> bool:
            return not state.tasks and background.done()

        if not await self._until(is_done, seconds):
            logger.warning("%d requests did not finish in time: they are told so", len(state.tasks))
            self.hurried = False
            self._desk.end()
            await self._until(is_done, TOLD_SECONDS)
        for listener in listeners:
            listener.close()
        await self._close(background)

    async def _close(self, background: asyncio.Task[None]) -> None:
        connections = cast("set[Connection | SocketConnection]", self._state.connections)
        for each in list(connections):
            each.give_up()
        left = [background, *self._state.tasks]
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=TOLD_SECONDS)
        for each in list(connections):
            each.transport.close()
        await self._until(lambda: not connections, FLUSH_SECONDS)
        for each in list(connections):
            each.transport.abort()

    async def _until(self, is_done: Callable[[], bool], seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not is_done():
            if self.hurried or loop.time() >= end:
                return False
            await asyncio.sleep(_TICK)
        return True
