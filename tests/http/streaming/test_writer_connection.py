from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from syringa.flush_queue import flush_queue
from syringa.http.context import REQUEST_CYCLE
from syringa.http.server.connection import HttpConnection
from syringa.http.streaming.writer import StreamWriter
from tests.http.fake_transport import FakeTransport, create_connection

REQUEST = b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


class Stream:
    """A stream whose head has been sent, and what its connection has sent since."""

    def __init__(self, version: bytes = b"1.1") -> None:
        self._version = version
        self._ready = asyncio.Event()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.cycle = scope["extensions"][REQUEST_CYCLE]
        self.writer = StreamWriter(send, [], self.cycle)
        self.writer.write(b"begin")
        self._ready.set()
        await asyncio.Event().wait()

    async def begin(self) -> None:
        self.connection: HttpConnection
        self.transport: FakeTransport
        self.connection, self.transport = create_connection(self._app)
        self.connection.data_received(REQUEST % self._version)
        await self._ready.wait()
        await asyncio.sleep(0)
        self.head = len(self.transport.writes)

    @property
    def sent(self) -> list[bytes]:
        return self.transport.writes[self.head :]


async def test_writer_sends_the_chunks_of_a_step_when_the_step_is_complete() -> None:
    streams = [Stream(), Stream()]
    for stream in streams:
        await stream.begin()
    with flush_queue():
        for stream in streams:
            stream.writer.write(b"zero")
        assert [each.sent for each in streams] == [[], []]
    assert [each.sent for each in streams] == [[b"4\r\nzero\r\n"], [b"4\r\nzero\r\n"]]
    assert streams[0].writer.active


async def test_writer_keeps_the_order_up_to_the_end_of_the_stream() -> None:
    stream = Stream()
    await stream.begin()
    with flush_queue():
        stream.writer.write(b"zero")
        stream.writer.write(b"one")
    assert b"".join(stream.sent) == b"4\r\nzero\r\n3\r\none\r\n"
    stream.writer.write(b"three")  # outside of a step: not flushed yet when the stream ends
    assert stream.writer.try_finish([b"end"])
    await asyncio.sleep(0)
    assert b"".join(stream.sent[-1:]) == b"5\r\nthree\r\n3\r\nend\r\n0\r\n\r\n"


async def test_writer_waits_for_a_client_that_does_not_read() -> None:
    stream = Stream()
    await stream.begin()
    stream.connection.pause_writing()
    for body in (b"zero", b"one"):
        with flush_queue():
            stream.writer.write(body)
    assert stream.sent == []
    assert stream.writer.is_blocked
    stream.connection.resume_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert b"".join(stream.sent) == b"4\r\nzero\r\n3\r\none\r\n"
    with flush_queue():
        stream.writer.write(b"three")
    assert stream.sent[-1] == b"5\r\nthree\r\n"


async def test_writer_sends_no_chunk_framing_to_http_1_0() -> None:
    stream = Stream(b"1.0")
    await stream.begin()
    with flush_queue():
        stream.writer.write(b"zero")
    await asyncio.sleep(0)
    assert b"".join(stream.sent) == b"zero"


async def test_writer_sends_nothing_after_the_client_disconnected() -> None:
    ends: list[Callable[[Stream], None]] = [
        lambda stream: stream.connection.connection_lost(None),
        lambda stream: stream.connection.abandon_response(),
        lambda stream: stream.cycle.finish([]),
    ]
    for end in ends:
        stream = Stream()
        await stream.begin()
        end(stream)
        before = len(stream.sent)
        with flush_queue():
            stream.writer.write(b"zero")
        assert len(stream.sent) == before
