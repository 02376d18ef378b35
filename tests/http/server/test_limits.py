"""Clients that do not read, and more connections than the limit, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from websockets.asyncio.client import ClientConnection, connect

from syringa.http.server import connection, connection_pool, limits
from syringa.http.server import server as serving
from tests.client import eventually, settle
from tests.fake_engine import FakeEngine
from tests.http.raw_client import BODY, COMPLETION_REQUEST, HEAD, HEALTH_REQUEST, running_server


@pytest.fixture(autouse=True)
def _slow_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stalls, a client over the limit may take longer than usual to send its request."""
    monkeypatch.setattr(connection, "_OVERFLOW_READ_SECONDS", 60.0)


async def test_write_timeout_aborts_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_TIMEOUT_SECONDS", 0.3)
    engine = FakeEngine("x" * 4096, at_once=1)
    body = json.dumps({"prompt": ["x"] * 100, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    async with running_server(engine) as server, server.client() as client:
        client.writer.transport.pause_reading()
        client.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert await eventually(lambda: engine.running)
        assert await eventually(lambda: not engine.running)
        assert await eventually(lambda: server.accounting and server.accounting[0].outcome == "cancelled")


def test_write_timeout_spares_a_slow_reader() -> None:
    aborted: list[bool] = []
    timers: list[Callable[[], None]] = []
    transport = SimpleNamespace(left=100, abort=lambda: aborted.append(True))
    transport.get_write_buffer_size = lambda: transport.left
    protocol = limits.WriteTimeout()
    loop = SimpleNamespace(call_later=lambda seconds, callback: timers.append(callback))
    protocol.transport, protocol.loop = transport, loop  # type: ignore[assignment]
    protocol._start_write_timer()
    for left in (60, 20):
        transport.left = left
        timers.pop()()
        assert not aborted
        assert len(timers) == 1
    timers.pop()()
    assert aborted


async def test_connection_limit_closes_idle_connections_and_rejects_new_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "max_connections", lambda: 4)
    monkeypatch.setattr(connection_pool, "OVERFLOW_CONNECTIONS", 3)
    monkeypatch.setattr(connection_pool, "PATIENCE_SECONDS", 60)
    engine = FakeEngine("hello")
    engine.pause()
    async with running_server(engine) as server, contextlib.AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(server.client(COMPLETION_REQUEST)) for _ in range(2)]
        idle = await stack.enter_async_context(server.client(HEALTH_REQUEST))
        assert (await idle.response())[0] == 200
        assert await eventually(lambda: len(engine.running) == 2)
        await stack.enter_async_context(server.client())
        await settle()
        # The fifth is over the limit. Running ones are not closed: the idle one is.
        fifth = await stack.enter_async_context(server.client())
        assert await idle.is_closed()
        await settle()
        sixth = await stack.enter_async_context(server.client(HEALTH_REQUEST))
        headers = await sixth.expect_rejection(503, "too_many_connections")
        assert int(headers["retry-after"]) >= 1
        fifth.send(HEALTH_REQUEST)
        assert (await fifth.response())[0] == 200
        excess = [await stack.enter_async_context(server.client()) for _ in range(12)]
        closed = [asyncio.create_task(each.is_closed()) for each in excess]
        # Three are kept to be told why, and one took the place of the fifth.
        assert await eventually(lambda: sum(each.done() and each.result() for each in closed) >= 12 - 3 - 1)
        for each in closed:
            each.cancel()
        await asyncio.gather(*closed, return_exceptions=True)
        engine.resume()
        for each in busy:
            assert (await each.response())[0] == 200
        assert caplog.text.count("limit=4") == 1


def request(key: str, head: bytes = HEAD) -> bytes:
    body = BODY if head is HEAD else b""
    return head + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n" % (key.encode(), len(body)) + body


async def test_idle_websockets_of_one_organization_do_not_keep_another_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "max_connections", lambda: 6)
    async with running_server(api_key=("first", "second")) as server, contextlib.AsyncExitStack() as stack:

        async def open_websocket(key: str) -> ClientConnection:
            url = f"ws://127.0.0.1:{server.port}/v1/responses"
            headers = {"authorization": f"Bearer {key}"}
            return await stack.enter_async_context(connect(url, additional_headers=headers, proxy=None))

        first = [await open_websocket("first") for _ in range(6)]
        second = [await open_websocket("second")]
        client = await stack.enter_async_context(server.client(request("second")))
        assert (await client.response())[0] == 200
        for socket in first[:2]:  # the idlest
            async with asyncio.timeout(60):
                await socket.wait_closed()
            assert socket.close_code == 1013
            assert (socket.close_reason or "").startswith("too many connections")
        assert [socket.close_code for socket in (*first[2:], *second)] == [None] * 5
        # The one that holds the most makes room among its own.
        await open_websocket("first")
        async with asyncio.timeout(60):
            await first[2].wait_closed()
        client.send(request("second"))
        assert (await client.response())[0] == 200


async def test_busy_connections_of_one_organization_do_not_keep_another_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "max_connections", lambda: 3)
    engine = FakeEngine("hello")
    engine.pause()
    async with running_server(engine, api_key=("first", "second")) as server, contextlib.AsyncExitStack() as stack:
        busy = []
        for _ in range(3):
            busy.append(await stack.enter_async_context(server.client(request("first"))))
            assert await eventually(lambda: len(engine.running) == len(busy))
        fourth = await stack.enter_async_context(server.client(request("first")))
        await fourth.expect_rejection(503, "too_many_connections")
        models = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n"
        other = await stack.enter_async_context(server.client(request("second", models)))
        assert (await other.response())[0] == 200
        await busy[2].expect_rejection(503, "too_many_connections")  # the latest
        assert await eventually(lambda: len(engine.running) == 2)
        engine.resume()
        for each in busy[:2]:
            assert (await each.response())[0] == 200


async def test_max_connections_follows_the_open_file_limit() -> None:
    assert 100 < limits.max_connections() < 1 << 16
