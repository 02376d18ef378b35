"""Clients that do not read, and more connections than the limit, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from syringa.http.server import connection, limits
from syringa.http.server import server as serving
from tests.client import eventually
from tests.fake_engine import FakeEngine
from tests.http.raw_client import COMPLETION_REQUEST, HEAD, HEALTH_REQUEST, running_server


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


async def test_write_timeout_spares_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITE_TIMEOUT_SECONDS", 0.2)
    aborted: list[bool] = []
    transport = SimpleNamespace(left=100, abort=lambda: aborted.append(True))
    transport.get_write_buffer_size = lambda: transport.left
    protocol = limits.WriteTimeout()
    protocol.transport, protocol.loop = transport, asyncio.get_running_loop()  # type: ignore[assignment]
    protocol._start_write_timer()
    transport.left = 60
    await asyncio.sleep(0.3)
    transport.left = 20
    await asyncio.sleep(0.2)
    assert not aborted
    assert await eventually(lambda: aborted)


async def test_connection_limit_closes_idle_connections_and_rejects_new_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "max_connections", lambda: 4)
    monkeypatch.setattr(connection, "OVERFLOW_CONNECTIONS", 3)
    engine = FakeEngine("hello", delay=0.1)
    async with running_server(engine, read_timeout=30) as server, contextlib.AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(server.client(COMPLETION_REQUEST)) for _ in range(2)]
        idle = await stack.enter_async_context(server.client(HEALTH_REQUEST))
        assert (await idle.response())[0] == 200
        for _ in range(2):
            assert await eventually(lambda: len(engine.running) == 2)
        silent = await stack.enter_async_context(server.client())
        await asyncio.sleep(0.05)
        # The fifth is over the limit. Running ones are not closed: the idle one is.
        fifth = await stack.enter_async_context(server.client())
        assert await idle.is_closed()
        fifth.send(HEALTH_REQUEST)
        assert (await fifth.response())[0] == 200
        sixth = await stack.enter_async_context(server.client(HEALTH_REQUEST))
        headers = await sixth.expect_rejection(503, "too_many_connections")
        assert int(headers["retry-after"]) >= 1
        excess = [await stack.enter_async_context(server.client()) for _ in range(12)]
        assert sum([await each.is_closed(3) for each in excess]) >= 12 - 3
        for each in busy:
            assert (await each.response())[0] == 200
        assert caplog.text.count("limit=4") == 1
        assert silent


async def test_max_connections_follows_the_open_file_limit() -> None:
    assert 100 < limits.max_connections() < 1 << 16
