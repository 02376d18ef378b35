"""Answers that take a while: a stream of server-sent events, or one body at the end.

Both stop the generation when the client goes away. A stream's per-token path is one `write`, one encode and one send,
straight from the engine's delta; waiting, keep-alive and disconnects live in a task that sleeps meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from syringa.api.common import Writer
from syringa.errors import EngineUnavailable, SyringaError
from syringa.events import Event
from syringa.generation import Emit
from syringa.http.middleware import envelope, unwrapped
from syringa.http.outlet import ClientGone, Outlet
from syringa.output.collect import collect

logger = logging.getLogger("syringa.http")

_DONE = b"data: [DONE]\n\n"
_WAITING = b": waiting\n\n"
# How long a refusal may still have a status of its own before the stream is opened for comments.
_GRACE = 1.0

Run = Callable[[Emit], Awaitable[None]]
"""A generation that waits for somebody to take its events."""

_encode = msgspec.json.Encoder().encode


class StreamedAnswer(Response):
    """Sends each event as it comes, then `[DONE]`. An error in the middle is the last event."""

    def __init__(
        self, run: Run, writer: Writer, *, headers: Mapping[str, str], keep_alive: float, timeout: float
    ) -> None:
        super().__init__(
            headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        # A stream's length is not known; Response counts the empty body.
        del self.headers["content-length"]
        self._run = run
        self._write = writer.write
        self._keep_alive = keep_alive
        self._timeout = timeout or None
        self._quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outlet = Outlet(send, unwrapped(scope, send), self.raw_headers)
        with contextlib.suppress(ClientGone), contextlib.closing(self._outlet):
            await attend(self._stream(), receive, self._comment, self._keep_alive)

    async def _stream(self) -> None:
        try:
            async with deadline(self._timeout):
                await self._run(self._emit)
            last = _DONE
        except ClientGone:
            return
        except Exception as error:
            if not self._outlet.begun:
                raise
            if not isinstance(error, SyringaError):
                logger.exception("a stream failed")
            last = b"data: " + _encode(envelope(error)) + b"\n\n"
        await self._outlet.end(last)

    def _emit(self, events: Sequence[Event]) -> None:
        write = self._write
        chunks = write(events[0]) if len(events) == 1 else [each for event in events for each in write(event)]
        if chunks:
            self._quiet = False
            if len(chunks) == 1:
                self._outlet.put(b"data: " + _encode(chunks[0]) + b"\n\n")
            else:
                self._outlet.put(b"".join([b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks]))

    async def _comment(self) -> None:
        if self._quiet:
            self._outlet.put(_WAITING)
        self._quiet = True


class WholeAnswer(Response):
    """Collects the events and sends the body that they make."""

    def __init__(self, run: Run, writer: Writer, *, headers: Mapping[str, str], timeout: float) -> None:
        super().__init__(headers=headers, media_type="application/json")
        self._run = run
        self._writer = writer
        self._timeout = timeout or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await attend(self._collect(), receive)
        if body is not None:
            headers = dict(self.headers) | {"content-length": str(len(body))}
            await Response(body, headers=headers)(scope, receive, send)

    async def _collect(self) -> bytes:
        events: list[Event] = []
        async with deadline(self._timeout):
            await self._run(events.extend)
        return _encode(self._writer.render(collect(events)))


@contextlib.asynccontextmanager
async def deadline(seconds: float | None) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise EngineUnavailable(f"The request took longer than {seconds:g} seconds.", code="timeout") from None


async def attend(
    work: Coroutine[Any, Any, Any],
    receive: Receive,
    tick: Callable[[], Awaitable[None]] | None = None,
    every: float = 0.0,
) -> Any:
    """Runs `work`, and gives it up when the client is gone: then the result is None. `tick` is called meanwhile."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    wait = min(_GRACE, every) if tick and every else None
    try:
        while True:
            await asyncio.wait((task, gone), timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                return None
            if tick is not None:
                await tick()
                wait = every
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
