"""WebSocket clients that send many small frames."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, cast

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from syringa.http.server import websocket_connection
from syringa.http.server.connection_pool import ConnectionPool
from syringa.http.server.read_scheduler import SLICE_BYTES, WORK_PER_TURN, ReadScheduler
from syringa.http.server.websocket_connection import (
    SMALL_FRAME_BURST,
    SMALL_FRAMES_PER_SECOND,
    FrameLimit,
    WebSocketConnection,
)
from tests.http.fake_transport import FakeTransport, ManualLoop
from tests.http.raw_client import HEALTH_REQUEST, RawClient, running_server
from tests.http.server.test_connection import UPGRADE
from tests.http.server.test_request_cycle import run_tasks

PING, PONG = b"\x89\x80\0\0\0\0", b"\x8a\x00"
TEXT, BINARY, CONTINUATION, FINAL = 1, 2, 0, 0x80


def frame(opcode: int, data: bytes) -> bytes:
    """Return a masked frame, with a mask of zeros."""
    length = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + len(data).to_bytes(2, "big")
    return bytes([opcode]) + length + bytes(4) + data


def fragmented(text: bytes, size: int) -> bytes:
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return b"".join(
        frame((CONTINUATION if at else TEXT) | (FINAL if at == len(parts) - 1 else 0), part)
        for at, part in enumerate(parts)
    )


def test_frame_limit_allows_a_burst_and_then_a_rate() -> None:
    limit = FrameLimit(now=100.0)
    assert limit.take(SMALL_FRAME_BURST, 100.0)
    assert limit.take(SMALL_FRAMES_PER_SECOND, 101.0)
    assert not limit.take(1, 101.0)
    limit = FrameLimit(now=100.0)
    assert not limit.take(SMALL_FRAME_BURST + 1, 1000.0), "no more than a burst is saved"


async def open_websocket(client: RawClient) -> None:
    client.send(UPGRADE + b"\r\n")
    assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")


@pytest.mark.parametrize(
    "flood",
    [
        PING * 200_000,
        frame(FINAL | 10, b"") * 200_000,  # pongs
        frame(TEXT, b"x") + frame(CONTINUATION, b"x") * 200_000,
        frame(TEXT, b"") + frame(CONTINUATION, b"") * 200_000,
    ],
    ids=["pings", "pongs", "fragments", "empty fragments"],
)
async def test_websocket_with_too_many_small_frames_is_closed_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, flood: bytes
) -> None:
    monkeypatch.setattr(websocket_connection, "LINGER_SECONDS", 60.0)
    async with running_server() as server, server.client() as client, server.client() as other:
        await open_websocket(client)
        began = time.monotonic()
        client.send(flood)
        async with asyncio.timeout(60):
            received = await client.reader.read()
        pongs, _, closing = received.partition(b"\x88")
        allowed = SMALL_FRAME_BURST + SMALL_FRAMES_PER_SECOND * (time.monotonic() - began)
        assert len(pongs) // len(PONG) <= allowed + SLICE_BYTES // len(PING)
        assert closing[1:3] == (1008).to_bytes(2, "big")
        assert b"too many small frames" in closing
        other.send(HEALTH_REQUEST)
        assert (await other.response())[0] == 200


@pytest.mark.parametrize("size", [1, 200])
async def test_websocket_accepts_fragmented_messages(size: int) -> None:
    """Fragments that are not small may be many: here, three times as many as small ones."""
    fragments = 50 if size == 1 else 3 * SMALL_FRAME_BURST
    text = json.dumps({"type": "x" * size * fragments}).encode()
    async with running_server() as server, server.client() as client:
        await open_websocket(client)
        client.send(fragmented(text, size))
        async with asyncio.timeout(60):
            assert b"not 'xxx" in await client.reader.readuntil(b"xxx")


@pytest.mark.parametrize("message", [frame(FINAL | TEXT, b"\xff"), frame(TEXT, b"\xe2\x82") + frame(FINAL, b"x")])
async def test_websocket_text_that_is_not_utf8_is_closed_and_not_logged_as_an_error(
    caplog: pytest.LogCaptureFixture, message: bytes
) -> None:
    async with running_server() as server, server.client() as client:
        await open_websocket(client)
        client.send(message)
        async with asyncio.timeout(60):
            assert (await client.reader.read())[2:4] == (1007).to_bytes(2, "big")
    assert caplog.records == []


class AcceptingApp:
    """Accepts a WebSocket, and receives as many messages as the test allows."""

    def __init__(self) -> None:
        self.allowed = asyncio.Semaphore(0)
        self.received: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        while True:
            await self.allowed.acquire()
            self.received.append(await receive())
            if self.received[-1]["type"] == "websocket.disconnect":
                return


async def test_websocket_client_that_is_still_sending_reads_why_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An immediate close would make the client's kernel discard the last frame."""
    monkeypatch.setattr(websocket_connection, "LINGER_SECONDS", 60.0)
    async with running_server(max_body_bytes=1000) as server, server.client() as client:
        await open_websocket(client)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"\x82\xff" + (20 << 20).to_bytes(8, "big") + bytes(4) + bytes(20 << 20))
        async with asyncio.timeout(60):
            await client.writer.drain()
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(60):
            assert (1009).to_bytes(2, "big") in await client.reader.read()


async def create_websocket(app: AcceptingApp) -> tuple[WebSocketConnection, FakeTransport, ManualLoop]:
    loop, transport = ManualLoop(), FakeTransport()
    config = Config(cast(Any, app), lifespan="off", log_config=None, interface="asgi3", ws_per_message_deflate=False)
    reads = ReadScheduler(cast(Any, loop))
    pool = ConnectionPool(100)
    connection = WebSocketConnection(pool, reads, config=config, server_state=ServerState(), app_state={})
    connection.connection_made(transport)
    connection.data_received(UPGRADE + b"\r\n")
    await run_tasks()
    assert transport.text.startswith(b"HTTP/1.1 101 ")
    return connection, transport, loop


async def end(app: AcceptingApp, connection: WebSocketConnection) -> None:
    connection.connection_lost(None)
    for _ in range(10_000):
        app.allowed.release()
    await run_tasks()


async def test_websocket_parses_a_flood_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_connection, "SMALL_FRAME_BURST", 1_000_000)
    app = AcceptingApp()
    connection, transport, loop = await create_websocket(app)
    connection.data_received(PING * 40_000)
    turns, before = 1, 0
    while True:
        pongs = transport.text.count(PONG)
        assert pongs - before <= WORK_PER_TURN + SLICE_BYTES // len(PING)
        before = pongs
        if not loop.run_turn():
            break
        turns += 1
    assert before >= 40_000
    assert turns > 40_000 // (WORK_PER_TURN + SLICE_BYTES // len(PING))
    assert not transport.reading_paused
    await end(app, connection)


async def test_websocket_reads_further_only_after_received_data_is_parsed() -> None:
    app = AcceptingApp()
    connection, transport, loop = await create_websocket(app)
    message = frame(FINAL | BINARY, b"x" * 125)
    connection.data_received(message * 2000)
    while connection.has_unparsed_data:
        for _ in range(2000):
            app.allowed.release()
        await run_tasks()
        assert transport.reading_paused
        loop.run_turn()
    for _ in range(2000):
        app.allowed.release()
    await run_tasks()
    assert len(app.received) == 2000
    assert not transport.reading_paused
    await end(app, connection)


async def test_websocket_joins_fragments_as_they_arrive() -> None:
    """A list of one-byte fragments would take a hundred times the memory of the message."""
    app = AcceptingApp()
    connection, _, _ = await create_websocket(app)
    connection.data_received(frame(TEXT, b"a") + frame(CONTINUATION, b"b") * 100)
    assert [bytes(each) for each in connection.frames] == [b"a" + b"b" * 100]
    connection.data_received(frame(FINAL | CONTINUATION, b"c"))
    app.allowed.release()
    await run_tasks()
    assert app.received[0]["text"] == "a" + "b" * 100 + "c"
    await end(app, connection)
