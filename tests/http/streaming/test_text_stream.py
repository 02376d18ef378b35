from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from syringa.http.server.connection import Connection
from syringa.http.streaming.writer import Outlet, Voice
from syringa.sweep import this_sweep
from tests.http.transport import Transport, connection

TEXTS = [b"zero", b"one", None, b"three"]
REQUEST = b"POST /v1/completions HTTP/%b\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


class Stream:
    """An answer that has begun, and what its connection has sent since."""

    def __init__(self, version: bytes = b"1.1") -> None:
        self._version = version
        self._ready = asyncio.Event()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.exchange = scope["state"]["exchange"]
        self.outlet = Outlet(send, send, [], self.exchange)
        self.outlet.put(b"begin")
        self._ready.set()
        await asyncio.Event().wait()

    async def begin(self) -> Voice:
        self.connection: Connection
        self.transport: Transport
        self.connection, self.transport = connection(self._answer)
        self.connection.data_received(REQUEST % self._version)
        await self._ready.wait()
        await asyncio.sleep(0)
        self.head = len(self.transport.writes)
        return self.outlet.voice(TEXTS, b"<", b">")

    @property
    def sent(self) -> list[bytes]:
        return self.transport.writes[self.head :]


async def test_the_texts_of_a_step_are_written_when_all_are_there() -> None:
    streams = [Stream(), Stream()]
    voices = [await each.begin() for each in streams]
    with this_sweep():
        for token, voice in enumerate(voices):
            assert voice(token)
        assert [each.sent for each in streams] == [[], []]
    assert [each.sent for each in streams] == [[b"6\r\n<zero>\r\n"], [b"5\r\n<one>\r\n"]]
    assert [each.said for each in voices] == [1, 1]
    assert streams[0].outlet.used


async def test_what_has_no_text_is_left_to_others() -> None:
    stream = Stream()
    voice = await stream.begin()
    with this_sweep():
        assert not any([voice(token) for token in (2, 4, -1, 10**6)])  # noqa: C419 - all are to be tried
    assert stream.sent == []
    assert voice.said == 0


async def test_order_is_kept_among_all_that_is_put() -> None:
    stream = Stream()
    voice = await stream.begin()
    with this_sweep():
        voice(0)
        stream.outlet.put(b"put")
        voice(1)
    assert b"".join(stream.sent) == b"6\r\n<zero>\r\n3\r\nput\r\n5\r\n<one>\r\n"
    voice(3)  # not in a step: it has to be there when the stream is ended at once
    assert stream.outlet.finish([b"end"])
    await asyncio.sleep(0)
    assert b"".join(stream.sent[-1:]) == b"7\r\n<three>\r\n3\r\nend\r\n0\r\n\r\n"


async def test_a_client_that_does_not_read_is_waited_for() -> None:
    stream = Stream()
    voice = await stream.begin()
    stream.connection.pause_writing()
    with this_sweep():
        voice(0)
    with this_sweep():
        voice(1)
    assert stream.sent == []
    assert stream.outlet.behind
    stream.connection.resume_writing()
    for _ in range(20):
        await asyncio.sleep(0)
    assert b"".join(stream.sent) == b"6\r\n<zero>\r\n5\r\n<one>\r\n"
    with this_sweep():
        voice(3)
    assert stream.sent[-1] == b"7\r\n<three>\r\n"


async def test_http_1_0_gets_no_chunks() -> None:
    stream = Stream(b"1.0")
    voice = await stream.begin()
    with this_sweep():
        voice(0)
    await asyncio.sleep(0)
    assert b"".join(stream.sent) == b"<zero>"


async def test_nothing_is_written_to_who_has_left_or_was_given_up() -> None:
    ends: list[Callable[[Stream], None]] = [
        lambda stream: stream.connection.connection_lost(None),
        lambda stream: stream.connection.give_up(),
        lambda stream: stream.exchange.finish([]),
    ]
    for end in ends:
        stream = Stream()
        voice = await stream.begin()
        end(stream)
        before = len(stream.sent)
        with this_sweep():
            voice(0)
        assert len(stream.sent) == before
