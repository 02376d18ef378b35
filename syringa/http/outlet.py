"""A response's body on its way out, from code that cannot wait."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any

from starlette.types import Send

# What a write to a connection that is gone raises; uvloop has the latter for a transport that has closed.
_BROKEN = (OSError, RuntimeError)


class ClientGone(Exception):
    """The connection broke while we were writing to it."""


class Outlet:
    """Sends a stream's parts in order. ASGI's `send` is a coroutine, but it has to wait only for a client that reads
    too slowly: it is run on the spot, and where it stops in the middle, a task finishes it and sends what came since.

    Every method raises `ClientGone` when the connection is known to be broken.
    """

    def __init__(self, send: Send, straight: Send, headers: list[tuple[bytes, bytes]]) -> None:
        """`straight` is `send` for all but the beginning."""
        self.begun = False
        self._send, self._straight, self._headers = send, straight, headers
        self._waiting: deque[bytes] = deque()
        self._task: asyncio.Task[None] | None = None

    def put(self, body: bytes) -> None:
        if self._task is not None:
            if not self._task.done():
                self._waiting.append(body)
                return
            self._task.result()
            self._task = None
        if self.begun:
            self._run(self._straight({"type": "http.response.body", "body": body, "more_body": True}))
        else:
            self.begun = True
            self._run(self._begin(body))

    async def end(self, body: bytes) -> None:
        """Sends the last part."""
        if not self.begun:
            self.put(b"")
        if self._task is not None:
            await self._task
        try:
            await self._straight({"type": "http.response.body", "body": body, "more_body": False})
        except _BROKEN as error:
            raise ClientGone from error

    def close(self) -> None:
        """Nothing more is sent."""
        if self._task is not None and not self._task.cancel() and not self._task.cancelled():
            self._task.exception()  # nobody is left to hear of it

    async def _begin(self, body: bytes) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._straight({"type": "http.response.body", "body": body, "more_body": True})

    def _run(self, sending: Awaitable[None]) -> None:
        assert isinstance(sending, Coroutine)
        try:
            stopped_at = sending.send(None)
        except StopIteration:
            return
        except _BROKEN as error:
            raise ClientGone from error
        self._task = asyncio.create_task(self._catch_up(_Rest(sending, stopped_at)))

    async def _catch_up(self, rest: _Rest) -> None:
        try:
            await rest
            while self._waiting:
                body = self._waiting.popleft()
                await self._straight({"type": "http.response.body", "body": body, "more_body": True})
        except _BROKEN as error:
            raise ClientGone from error


class _Rest:
    """A coroutine that was started by hand, to be awaited from where it stopped."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], stopped_at: Any) -> None:
        self._coroutine, self._stopped_at = coroutine, stopped_at

    def __await__(self) -> Generator[Any, Any, None]:
        waited = self._stopped_at
        try:
            while True:
                try:
                    result = yield waited
                except BaseException as error:
                    waited = self._coroutine.throw(error)
                else:
                    waited = self._coroutine.send(result)
        except StopIteration:
            return
