"""Clients that do not read, and more connections than the limit, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from syringa.http.server import connection, limits
from syringa.http.server import server as serving
from tests.client import eventually, settle
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
    monkeypatch.setattr(connection, "OVERFLOW_CONNECTIONS", 3)
    engine = FakeEngine("hello")
    engine.pause()
    async with running_server(engine) as server, contextlib.AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(server.client(COMPLETION_REQUEST)) for _ in range(2)]
        idle = await stack.enter_async_context(server.client(HEALTH_REQUEST))
        assert (await idle.response())[0] == 200
        assert await eventually(lambda: len(engine.running) == 2)
        silent = await stack.enter_async_context(server.client())
        await settle()
        # The fifth is over the limit. Running ones are not closed: the idle one is.
        fifth = await stack.enter_async_context(server.client())
        assert await idle.is_closed()
        fifth.send(HEALTH_REQUEST)
        assert (await fifth.response())[0] == 200
        sixth = await stack.enter_async_context(server.client(HEALTH_REQUEST))
        headers = await sixth.expect_rejection(503, "too_many_connections")
        assert int(headers["retry-after"]) >= 1
        excess = [await stack.enter_async_context(server.client()) for _ in range(12)]
        assert sum(await asyncio.gather(*(each.is_closed(5) for each in excess))) >= 12 - 3
        engine.resume()
        for each in busy:
            assert (await each.response())[0] == 200
        assert caplog.text.count("limit=4") == 1
        assert silent


async def test_max_connections_follows_the_open_file_limit() -> None:
    assert 100 < limits.max_connections() < 1 << 16
