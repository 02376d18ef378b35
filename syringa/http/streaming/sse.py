"""Responses that take a while to generate: streams of server-sent events, and complete bodies.

Both cancel the generation when the client disconnects. For each token, a stream encodes one chunk and makes one write,
called from the engine client's delta, while the request's task sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from syringa.api.error_formats import error_body, error_envelope
from syringa.api.output_writer import OutputWriter
from syringa.errors import SyringaError
from syringa.events import Event
from syringa.generation import Emit
from syringa.http.context import request_context
from syringa.http.streaming.cancellation import DisconnectGuard
from syringa.http.streaming.writer import ClientDisconnected, StreamWriter
from syringa.output.collect import collect

logger = logging.getLogger("syringa.http")

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE_COMMENT = b": waiting\n\n"
_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_GRACE_SECONDS = 1.0  # before the first comment: until then an error can still have a status of its own
_TIMER_GRANULARITY = 0.25
_FINISH_SECONDS = 600.0  # for the client to read the rest of a finished stream

encode = msgspec.json.Encoder().encode

BufferedSource = Callable[[Emit], Awaitable[None]]
"""Runs a generation whose client gets nothing before its end."""

StreamSource = Callable[[Emit], Awaitable[Sequence[Any] | None]]
"""A generation that passes its events to the argument, and returns the chunks that end the stream, if any."""

ChunkWriter = Callable[[Any], Sequence[Any]]
"""Converts an event to chunks."""


@dataclass(frozen=True)
class Framing:
    """How chunks are framed: `frame` for each chunk, `done` after the last, `fail` for an error instead of `done`.

    `keep_alive` is sent on a silent stream; empty: nothing is.
    """

    frame: Callable[[Any], bytes]
    fail: Callable[[Exception], bytes]
    done: bytes = b""
    keep_alive: bytes = _KEEP_ALIVE_COMMENT
    content_type: bytes = b"text/event-stream; charset=utf-8"


def frame_data(chunk: Any) -> bytes:
    return b"data: %b\n\n" % (chunk if type(chunk) is msgspec.Raw else encode(chunk))


def frame_named_event(event: Any) -> bytes:
    """Frame an event of the Responses API under the name of its type."""
    name: str = event.type
    return b"event: " + name.encode() + b"\ndata: " + encode(event) + b"\n\n"


def frame_line(chunk: Any) -> bytes:
    """Frame a chunk of Ollama's API, as a line of JSON."""
    return b"%b\n" % (chunk if type(chunk) is msgspec.Raw else encode(chunk))


DATA_FRAMING = Framing(frame_data, lambda error: frame_data(error_envelope(error)), DONE)
LINE_FRAMING = Framing(
    frame_line,
    lambda error: frame_line(error_body(error, "ollama")),
    keep_alive=b"",  # clients take every line for JSON: a stream with chunks to repeat sets its own
    content_type=b"application/x-ndjson",
)


class EventStreamResponse(Response):
    """Sends each event when it is generated. An error after the first event is the last event of the stream."""

    def __init__(
        self,
        source: StreamSource,
        write: ChunkWriter,
        framing: Framing,
        *,
        headers: Mapping[str, str],
        keep_alive: float,
        opening: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """`opening` returns the first chunks of the stream, sent with the first event or the first keep-alive."""
        # Not through `Response.__init__`, which would set a content-length.
        extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.status_code, self.background = 200, None
        self.raw_headers = [*_HEADERS, (b"content-type", framing.content_type), *extra]
        self._source = source
        self._convert = write if opening is None else self._convert_first
        self._convert_rest = write
        self._framing = framing
        self._frame = framing.frame
        self._keep_alive = keep_alive if framing.keep_alive else 0.0
        self._opening = opening
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = request_context(scope).cycle
        self._writer = StreamWriter(send, self.raw_headers, cycle)
        if self._keep_alive:
            self._timer = _call_later_together(min(_GRACE_SECONDS, self._keep_alive), self._send_keep_alive)
        try:
            with DisconnectGuard(receive, cycle):
                await self._stream()
        except ClientDisconnected:
            pass
        finally:
            self._writer.close()
            if self._timer is not None:
                self._timer.cancel()

    async def _stream(self) -> None:
        try:
            closing = await self._source(self._emit)
            last = [self._frame(chunk) for chunk in (*self._open(), *(closing or ()))]
            if self._framing.done:
                last.append(self._framing.done)
        except ClientDisconnected:
            return
        except Exception as error:
            if not self._writer.started:
                raise
            if not isinstance(error, SyringaError):
                logger.exception("a stream failed")
            last = [self._framing.fail(error)]
        if self._timer is not None:
            self._timer.cancel()
        if not self._writer.try_finish(last):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FINISH_SECONDS):
                    await self._writer.finish(last)

    def _emit(self, events: Sequence[Event]) -> None:
        for event in events:
            self._write(self._convert(event))

    def _convert_first(self, event: Event) -> Sequence[Any]:
        return [*self._open(), *self._convert_rest(event)]

    def _open(self) -> Sequence[Any]:
        """Return the opening chunks, the first time it is called."""
        opening, self._opening, self._convert = self._opening, None, self._convert_rest
        return () if opening is None else opening()

    def _write(self, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            self._writer.write(self._frame(chunk))

    def _send_keep_alive(self) -> None:
        """Send a comment if nothing was sent for a while: clients and proxies close silent connections."""
        self._timer = _call_later_together(self._keep_alive, self._send_keep_alive)
        if not self._writer.active and not self._writer.is_blocked:
            with contextlib.suppress(ClientDisconnected):  # the next write raises it again
                if opening := self._open():
                    self._write(opening)
                else:
                    self._writer.write(self._framing.keep_alive)
        self._writer.active = False


def _call_later_together(seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    """Like `call_later`, rounded up so that the timers of many streams expire together: each wake-up of the process
    costs as much as several tokens."""
    loop = asyncio.get_running_loop()
    granularity = min(_TIMER_GRANULARITY, seconds / 4)
    return loop.call_at(math.ceil((loop.time() + seconds) / granularity) * granularity, callback)


class BufferedResponse(Response):
    """A JSON response whose body is generated first."""

    def __init__(self, generate: Callable[[], Coroutine[Any, Any, bytes]], *, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers, media_type="application/json")
        self._generate = generate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with DisconnectGuard(receive, request_context(scope).cycle):
                body = await self._generate()
        except ClientDisconnected:
            return
        headers = dict(self.headers) | {"content-length": str(len(body))}
        await Response(body, headers=headers)(scope, receive, send)


async def generate_body(source: BufferedSource, writer: OutputWriter) -> bytes:
    """Run a generation, and return the body that its events make."""
    events: list[Event] = []
    await source(events.extend)
    return encode(writer.render(collect(events)))
