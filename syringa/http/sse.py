"""Answers that take a while: a stream of server-sent events, or one body at the end.

Both stop the generation when the client goes away. A stream's per-token path is one `write`, one encode and one send;
waiting, keep-alive and disconnects live in a task that sleeps meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from syringa.api.common import Writer
from syringa.errors import EngineUnavailable, SyringaError
from syringa.events import Event
from syringa.http.middleware import envelope
from syringa.output.collect import collect

logger = logging.getLogger("syringa.http")

_DONE = b"data: [DONE]\n\n"
_WAITING = b": waiting\n\n"
# How long a refusal may still have a status of its own before the stream is opened for comments.
_GRACE = 1.0

_encode = msgspec.json.Encoder().encode


class StreamedAnswer(Response):
    """Sends each event as it comes, then `[DONE]`. An error in the middle is the last event."""

    def __init__(
        self,
        events: AsyncGenerator[Event],
        writer: Writer,
        *,
        headers: Mapping[str, str],
        keep_alive: float,
        timeout: float,
    ) -> None:
        super().__init__(
            headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        # A stream's length is not known; Response counts the empty body.
        del self.headers["content-length"]
        self._events = events
        self._write = writer.write
        self._keep_alive = keep_alive
        self._timeout = timeout or None
        self._started = False
        self._quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = noticing(send)
        with contextlib.suppress(ClientGone):
            await attend(self._run(send), receive, lambda: self._comment(send), self._keep_alive)

    async def _run(self, send: Send) -> None:
        try:
            await self._pass_on(send)
            last = _DONE
        except ClientGone:
            return
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, SyringaError):
                logger.exception("a stream failed")
            last = b"data: " + _encode(envelope(error)) + b"\n\n"
        await self._start(send)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _pass_on(self, send: Send) -> None:
        write = self._write
        async with deadline(self._timeout), contextlib.aclosing(self._events) as events:
            async for event in events:
                chunks = write(event)
                if not chunks:
                    continue
                if not self._started:
                    await self._start(send)
                self._quiet = False
                if len(chunks) == 1:
                    body = b"data: " + _encode(chunks[0]) + b"\n\n"
                else:
                    body = b"".join([b"data: " + _encode(chunk) + b"\n\n" for chunk in chunks])
                await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _start(self, send: Send) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    async def _comment(self, send: Send) -> None:
        if self._quiet:
            await self._start(send)
            await send({"type": "http.response.body", "body": _WAITING, "more_body": True})
        self._quiet = True


class ClientGone(Exception):
    """The connection broke while we were writing to it."""


def noticing(send: Send) -> Send:
    """`send`, which then tells a broken connection from a fault of ours."""

    async def careful(message: Message) -> None:
        try:
            await send(message)
        except (OSError, RuntimeError) as error:  # uvloop raises the latter for a transport that has closed
            raise ClientGone from error

    return careful


class WholeAnswer(Response):
    """Collects the events and sends the body that they make."""

    def __init__(
        self, events: AsyncGenerator[Event], writer: Writer, *, headers: Mapping[str, str], timeout: float
    ) -> None:
        super().__init__(headers=headers, media_type="application/json")
        self._events = events
        self._writer = writer
        self._timeout = timeout or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await attend(self._collect(), receive)
        if body is not None:
            headers = dict(self.headers) | {"content-length": str(len(body))}
            await Response(body, headers=headers)(scope, receive, send)

    async def _collect(self) -> bytes:
        async with deadline(self._timeout), contextlib.aclosing(self._events) as events:
            return _encode(self._writer.render(await collect(events)))


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
