"""Clients that do not read, and more of them than there is room for, over real sockets."""

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
from tests.http.raw import ASK, HEAD, HEALTH, place


async def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.3)
    engine = FakeEngine("x" * 4096, at_once=1)
    body = json.dumps({"prompt": ["x"] * 100, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    async with place(engine) as here, here.client() as client:
        client.writer.transport.pause_reading()
        client.send(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert await eventually(lambda: engine.running)
        assert await eventually(lambda: not engine.running)
        assert await eventually(lambda: here.accounts and here.accounts[0].outcome == "cancelled")


async def test_a_slow_reader_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNREAD_SECONDS", 0.2)
    aborted: list[bool] = []
    transport = SimpleNamespace(left=100, abort=lambda: aborted.append(True))
    transport.get_write_buffer_size = lambda: transport.left
    watched = limits.Watched()
    watched.transport, watched.loop = transport, asyncio.get_running_loop()  # type: ignore[assignment]
    watched._watch()
    transport.left = 60
    await asyncio.sleep(0.3)
    transport.left = 20
    await asyncio.sleep(0.2)
    assert not aborted
    assert await eventually(lambda: aborted)


async def test_more_connections_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "room", lambda: 4)
    monkeypatch.setattr(connection, "SPARE", 3)
    engine = FakeEngine("hello", delay=0.1)
    async with place(engine, read_timeout=30) as here, contextlib.AsyncExitStack() as stack:
        busy = [await stack.enter_async_context(here.client(ASK)) for _ in range(2)]
        idle = await stack.enter_async_context(here.client(HEALTH))
        assert (await idle.answer())[0] == 200
        for _ in range(2):
            assert await eventually(lambda: len(engine.running) == 2)
        silent = await stack.enter_async_context(here.client())
        await asyncio.sleep(0.05)
        # The fifth finds no room, nor would it get any by closing those that run: the idle one has to go.
        fifth = await stack.enter_async_context(here.client())
        assert await idle.closed()
        fifth.send(HEALTH)
        assert (await fifth.answer())[0] == 200
        sixth = await stack.enter_async_context(here.client(HEALTH))
        headers = await sixth.refused(503, "too_many_connections")
        assert int(headers["retry-after"]) >= 1
        crowd = [await stack.enter_async_context(here.client()) for _ in range(12)]
        assert sum([await each.closed(3) for each in crowd]) >= 12 - 3
        for each in busy:
            assert (await each.answer())[0] == 200
        assert caplog.text.count("there is room for 4") == 1
        assert silent


async def test_room_is_what_may_be_opened() -> None:
    assert 100 < limits.room() < 1 << 16
