"""Answers that take a while: a stream of server-sent events, or one body at the end.

Both stop the generation when the client goes away. A stream's per-token path is one `write`, one encode and one send,
straight from the engine's delta; waiting, keep-alive and disconnects live in a task that sleeps meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from syringa.api.common import Writer
from syringa.errors import SyringaError
from syringa.events import Event
from syringa.generation import Emit
from syringa.http.framing import Framing, encode
from syringa.http.middleware import unwrapped
from syringa.http.outlet import ClientGone, Outlet
from syringa.output.collect import collect

logger = logging.getLogger("syringa.http")

_WAITING = b": waiting\n\n"
# How long a refusal may still have a status of its own before the stream is opened for comments.
_GRACE = 1.0
# How long a client may take to read what is left when all of it is there.
_PATIENCE = 600.0

Run = Callable[[Emit], Awaitable[Sequence[Any] | None]]
"""A generation that waits for somebody to take its events. The result, if any, are the chunks that close the stream."""

Write = Callable[[Any], Sequence[Any]]
"""The chunks that one event becomes."""


class StreamedAnswer(Response):
    """Sends each event as it comes, then what `framing` ends a stream with. An error in the middle comes last."""

    def __init__(
        self,
        run: Run,
        write: Write,
        framing: Framing,
        *,
        headers: Mapping[str, str],
        keep_alive: float,
        opening: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """`opening`: the chunks that a stream begins with, sent with the first others, or when it has to wait."""
        super().__init__(
            headers={**headers, "cache-control": "no-cache", "x-accel-buffering": "no"}, media_type="text/event-stream"
        )
        # A stream's length is not known; Response counts the empty body.
        del self.headers["content-length"]
        self._run = run
        self._write = write if opening is None else self._write_first
        self._write_rest = write
        self._framing = framing
        self._frame = framing.frame
        self._keep_alive = keep_alive
        self._opening = opening
        self._quiet = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outlet = Outlet(send, unwrapped(scope, send), self.raw_headers)
        with contextlib.suppress(ClientGone), contextlib.closing(self._outlet):
            await attend(self._stream(), receive, self._comment, self._keep_alive)

    async def _stream(self) -> None:
        try:
            closing = await self._run(self._emit)
            last = self._join([*self._open(), *(closing or ())]) + self._framing.done
        except ClientGone:
            return
        except Exception as error:
            if not self._outlet.begun:
                raise
            if not isinstance(error, SyringaError):
                logger.exception("a stream failed")
            last = self._framing.fail(error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await self._outlet.end(last)

    def _emit(self, events: Sequence[Event]) -> None:
        write = self._write
        chunks = write(events[0]) if len(events) == 1 else [each for event in events for each in write(event)]
        if chunks:
            self._quiet = False
            if len(chunks) == 1:
                self._outlet.put(self._frame(chunks[0]))
            else:
                self._outlet.put(self._join(chunks))

    def _write_first(self, event: Event) -> Sequence[Any]:
        return [*self._open(), *self._write_rest(event)]

    def _open(self) -> Sequence[Any]:
        """From now on, what opens the stream has been sent."""
        opening, self._opening, self._write = self._opening, None, self._write_rest
        return () if opening is None else opening()

    def _join(self, chunks: Sequence[Any]) -> bytes:
        return b"".join([self._frame(chunk) for chunk in chunks])

    async def _comment(self) -> None:
        if self._quiet and not self._outlet.behind:
            self._outlet.put(self._join(self._open()) or _WAITING)
        self._quiet = True


class WholeAnswer(Response):
    """One body, once there is all of it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, bytes]], *, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers, media_type="application/json")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await attend(self._work(), receive)
        if body is not None:
            headers = dict(self.headers) | {"content-length": str(len(body))}
            await Response(body, headers=headers)(scope, receive, send)


async def collected(run: Run, writer: Writer) -> bytes:
    """The body that the events of a generation make."""
    events: list[Event] = []
    await run(events.extend)
    return encode(writer.render(collect(events)))


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
