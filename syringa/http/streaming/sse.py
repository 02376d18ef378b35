"""Answers that take a while: a stream of server-sent events, or one body at the end.

Both stop the generation when the client goes away. A stream's per-token path is one `write`, one encode and one send,
straight from the engine's delta, while the request's only task sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from syringa.api.decoding import Writer
from syringa.errors import SyringaError
from syringa.events import Event
from syringa.generation import Emit
from syringa.http.middleware.errors import unwrapped
from syringa.http.streaming.cancellation import Presence
from syringa.http.streaming.framing import Framing, encode
from syringa.http.streaming.writer import ClientGone, Outlet, Voice
from syringa.output.collect import collect

logger = logging.getLogger("syringa.http")

_WAITING = b": waiting\n\n"
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
]
# How long a refusal may still have a status of its own before the stream is opened for comments.
_GRACE = 1.0
_GRAIN = 0.25  # of when that is looked at
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
        around: Callable[[], tuple[bytes, bytes] | None] | None = None,
    ) -> None:
        """`opening`: the chunks that a stream begins with, sent with the first others, or when it has to wait.
        `around`: a writer's `around_text`, where a chunk's JSON is all that is framed."""
        # Not by Response, which would count an empty body.
        given = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.status_code, self.background, self.raw_headers = 200, None, [*_HEADERS, *given]
        self._run = run
        self._write = write if opening is None else self._write_first
        self._write_rest = write
        self._framing = framing
        self._frame = framing.frame
        self._keep_alive = keep_alive
        self._opening = opening
        self._around = around
        self._ticking: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = scope["state"].get("exchange")
        self._outlet = Outlet(send, unwrapped(scope, send), self.raw_headers, exchange)
        if self._keep_alive:
            self._ticking = _about(min(_GRACE, self._keep_alive), self._tick)
        try:
            with Presence(scope, receive):
                await self._stream()
        except ClientGone:
            pass
        finally:
            self._outlet.close()
            if self._ticking is not None:
                self._ticking.cancel()

    async def _stream(self) -> None:
        try:
            closing = await self._run(_Teller(self))
            last = [self._frame(each) for each in (*self._open(), *(closing or ()))]
            if self._framing.done:
                last.append(self._framing.done)
        except ClientGone:
            return
        except Exception as error:
            if not self._outlet.begun:
                raise
            if not isinstance(error, SyringaError):
                logger.exception("a stream failed")
            last = [self._framing.fail(error)]
        if self._ticking is not None:
            self._ticking.cancel()
        if not self._outlet.finish(last):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PATIENCE):
                    await self._outlet.end(last)

    def emit(self, events: Sequence[Event]) -> None:
        for event in events:
            self._put(self._write(event))

    def voice(self, texts: Sequence[bytes | None]) -> Voice | None:
        around = self._around() if self._around is not None else None
        return None if around is None else self._outlet.voice(texts, b"data: " + around[0], around[1] + b"\n\n")

    def _write_first(self, event: Event) -> Sequence[Any]:
        return [*self._open(), *self._write_rest(event)]

    def _open(self) -> Sequence[Any]:
        """From now on, what opens the stream has been sent."""
        opening, self._opening, self._write = self._opening, None, self._write_rest
        return () if opening is None else opening()

    def _put(self, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            self._outlet.put(self._frame(chunk))

    def _tick(self) -> None:
        """A client, or a proxy between, that hears nothing for long would give up."""
        self._ticking = _about(self._keep_alive, self._tick)
        if not self._outlet.used and not self._outlet.behind:
            with contextlib.suppress(ClientGone):  # whoever writes next is told
                if opening := self._open():
                    self._put(opening)
                else:
                    self._outlet.put(_WAITING)
        self._outlet.used = False


def _about(seconds: float, do: Callable[[], None]) -> asyncio.TimerHandle:
    """Calls `do` after that time and a little more. Streams that began together are then looked after together: each
    waking of the process costs as much as some tokens."""
    loop = asyncio.get_running_loop()
    grain = min(_GRAIN, seconds / 4)
    return loop.call_at(math.ceil((loop.time() + seconds) / grain) * grain, do)


class _Teller:
    """Takes a generation's events for a stream."""

    __slots__ = ("_answer", "_voice")

    def __init__(self, answer: StreamedAnswer) -> None:
        self._answer = answer
        self._voice: Voice | None = None

    def __call__(self, events: Sequence[Event]) -> None:
        self._answer.emit(events)

    def voice(self, texts: Sequence[bytes | None]) -> Voice | None:
        if self._voice is None:
            self._voice = self._answer.voice(texts)
        return self._voice


class WholeAnswer(Response):
    """One body, once there is all of it."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, bytes]], *, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers, media_type="application/json")
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with Presence(scope, receive):
                body = await self._work()
        except ClientGone:
            return
        headers = dict(self.headers) | {"content-length": str(len(body))}
        await Response(body, headers=headers)(scope, receive, send)


async def collected(run: Run, writer: Writer) -> bytes:
    """The body that the events of a generation make."""
    events: list[Event] = []
    await run(events.extend)
    return encode(writer.render(collect(events)))
