"""Writing the body of a streamed response from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator, Sequence
from typing import Any

from starlette.types import Send

from syringa.flush_queue import flush_queue
from syringa.http.server.request_cycle import RequestCycle

CONNECTION_ERRORS = (OSError, RuntimeError)
"""What a write to a closed connection raises; uvloop raises the latter for a transport that has been closed."""

MAX_BUFFERED_BYTES = 8 << 20  # for one client that does not read


class ClientDisconnected(Exception):
    """The client closed the connection, or does not read, before its response was complete."""


class StreamWriter:
    """Writes the parts of a stream in order.

    The parts that all streams write in one iteration of the event loop, usually those of one engine step, are sent
    together at its end: first all the work, then all the system calls. Each part is one ASGI message, or, with a
    request cycle, one chunk of a single write.

    ASGI's `send` waits only for a client that reads too slowly. It is therefore run in place, and only if it suspends,
    a task completes it and sends what was written meanwhile. A write to a broken connection raises
    `ClientDisconnected`.
    """

    __slots__ = (
        "_broken",
        "_buffered",
        "_cycle",
        "_flushes",
        "_head_sent",
        "_headers",
        "_parts",
        "_send_body",
        "_send_head",
        "_task",
        "active",
        "started",
    )

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]], cycle: RequestCycle | None = None) -> None:
        """With a `cycle`, the body bypasses `send` and the middleware around it, which only the head has to pass."""
        self.started = False  # something was written: the response can no longer become an error response
        self.active = False  # something was written since this was last reset
        self._send_head, self._headers, self._cycle = send, headers, cycle
        self._send_body = send if cycle is None else cycle.send
        self._flushes = flush_queue()
        self._parts: list[bytes] = []
        self._head_sent = False
        self._broken = False
        self._buffered = 0  # bytes written since the client stopped reading
        self._task: asyncio.Task[None] | None = None

    def write(self, part: bytes) -> None:
        if self._broken:
            raise ClientDisconnected
        self.started = self.active = True
        self._parts.append(part)
        if self._task is not None:
            self._buffered += len(part)
            if self._buffered > MAX_BUFFERED_BYTES:
                self._broken = True  # the client may be alive, but does not read
                raise ClientDisconnected
        elif len(self._parts) == 1:
            self._flushes.schedule(self.flush)

    @property
    def is_blocked(self) -> bool:
        """Whether the client has to read before more can be sent."""
        return self._task is not None

    def try_finish(self, parts: Sequence[bytes]) -> bool:
        """Send all pending and the given last parts, if that is possible without waiting."""
        if self._broken:
            raise ClientDisconnected
        if not self._head_sent or self._task is not None or self._cycle is None:
            return False
        try:
            done = self._cycle.finish([*self._parts, *parts])
        except CONNECTION_ERRORS as error:
            raise ClientDisconnected from error
        if done:
            self._parts.clear()
        return done

    async def finish(self, parts: Sequence[bytes]) -> None:
        """Like `try_finish`, but wait for the client to read."""
        if self._task is not None:
            await self._task
        if self._broken:
            raise ClientDisconnected
        self.started = True
        last = [*self._parts, *parts] or [b""]
        self._parts.clear()  # a scheduled flush must find nothing
        try:
            await self._start()
            for number, part in enumerate(last, 1):
                await self._send_part(part, more=number < len(last))
        except CONNECTION_ERRORS as error:
            raise ClientDisconnected from error

    def close(self) -> None:
        """Discard what has not been sent."""
        self._parts.clear()
        if self._task is not None:
            self._task.cancel()

    def flush(self) -> None:
        if not self._parts or self._task is not None:
            return
        try:
            if self._head_sent and self._cycle is not None and self._cycle.write(self._parts):
                self._parts.clear()
                return
            sending = self._send_all()
            awaited = sending.send(None)
        except StopIteration:
            return
        except CONNECTION_ERRORS:
            self._broken = True
            return
        self._task = asyncio.create_task(self._complete(_SuspendedCoroutine(sending, awaited)))

    async def _send_all(self) -> None:
        await self._start()
        while self._parts:
            if self._cycle is not None and self._cycle.write(self._parts):
                self._parts.clear()
            else:
                await self._send_part(self._parts.pop(0), more=True)

    async def _start(self) -> None:
        if not self._head_sent:
            self._head_sent = True
            await self._send_head({"type": "http.response.start", "status": 200, "headers": self._headers})

    async def _send_part(self, part: bytes, *, more: bool) -> None:
        await self._send_body({"type": "http.response.body", "body": part, "more_body": more})

    async def _complete(self, sending: _SuspendedCoroutine) -> None:
        try:
            await sending
        except CONNECTION_ERRORS:
            self._broken = True
        finally:
            self._task, self._buffered = None, 0


class _SuspendedCoroutine:
    """Awaits the rest of a coroutine that was started with `send(None)`. `awaited` is what it yielded."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine, self._awaited = coroutine, awaited

    def __await__(self) -> Generator[Any, Any, None]:
        awaited = self._awaited
        try:
            while True:
                try:
                    result = yield awaited
                except BaseException as error:
                    awaited = self._coroutine.throw(error)
                else:
                    awaited = self._coroutine.send(result)
        except StopIteration:
            return
