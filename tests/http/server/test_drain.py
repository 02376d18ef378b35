"""Graceful shutdown, as clients see it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect

from syringa.config import Config
from syringa.http.server import limits
from syringa.http.server import server as serving
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.client import events, eventually, server, settle
from tests.fake_engine import FakeEngine
from tests.http.raw_client import HEAD

LONG = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}


def send_signal() -> None:
    """Send SIGTERM to this process, whose handler is the server's while it runs."""
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _ignore_sigterm() -> Any:
    """A signal before or after the server runs must not end the tests."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


class DrainingServer:
    def __init__(self, http: httpx.AsyncClient, engine: FakeEngine, states: list[AppState]) -> None:
        self.http, self.engine, self.states = http, engine, states

    @property
    def app_state(self) -> AppState:
        return self.states[0]

    async def drain(self) -> None:
        send_signal()
        assert await eventually(lambda: self.app_state.draining)

    async def is_gone(self, seconds: float = 60.0) -> bool:
        async def gone() -> bool:
            try:
                async with httpx.AsyncClient(base_url=self.http.base_url, trust_env=False, timeout=60) as http:
                    await http.get("/health")
            except httpx.TransportError:
                return True
            return False

        finish = time.monotonic() + seconds
        while time.monotonic() < finish:
            if await gone():
                return True
            await asyncio.sleep(0.02)
        return False

    async def request(self, path: str, **arguments: Any) -> httpx.Response:
        """Return the response to a request over a new connection."""
        async with httpx.AsyncClient(base_url=self.http.base_url, trust_env=False, timeout=60) as http:
            return await http.request("POST" if arguments else "GET", path, **arguments)


@contextlib.asynccontextmanager
async def draining_server(
    monkeypatch: pytest.MonkeyPatch, path: Path, engine: FakeEngine | None = None, *, drain_timeout: float = 90.0
) -> AsyncIterator[DrainingServer]:
    engine = engine or FakeEngine("hello", delay=0.02)
    states: list[AppState] = []

    async def serve_and_record(config: Any, engines: Any, models: Any, listener: Any, app_state: AppState) -> None:
        states.append(app_state)
        await serve_api(config, engines, models, listener, app_state)

    monkeypatch.setattr("tests.client.serve_api", serve_and_record)
    config = Config(port=0, drain_timeout=drain_timeout, database=str(path / "syringa.db"))
    async with server(engine, config, plain_model()) as http:
        yield DrainingServer(http, engine, states)


async def test_drain_rejects_new_requests_while_streams_finish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with draining_server(monkeypatch, tmp_path) as running:
        body = {**LONG, "max_tokens": 150, "stream": True}
        async with running.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            running.engine.pause()
            await running.drain()
            rejected = await running.request("/v1/completions", json={"prompt": "x"})
            assert (rejected.status_code, rejected.json()["error"]["code"]) == (503, "server_ending")
            assert int(rejected.headers["retry-after"]) >= 1
            assert rejected.headers["connection"] == "close"
            assert rejected.headers["x-request-id"]
            assert (await running.request("/v1/models")).status_code == 503
            assert (await running.request("/health")).status_code == 200
            assert (await running.request("/ready")).json()["error"]["code"] == "server_ending"
            running.engine.resume()
            text = "\n".join([first, *[line async for line in lines]])
        seen = events(text.rstrip())
        assert seen[-1] == "[DONE]"
        assert len([each for each in seen[:-1] if each["choices"][0]["text"]]) == 150
        assert await running.is_gone()
        assert not running.engine.running


async def test_shutdown_is_immediate_without_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with draining_server(monkeypatch, tmp_path, drain_timeout=120) as running:
        send_signal()
        assert await running.is_gone()


async def test_drain_fails_requests_that_do_not_finish_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with draining_server(monkeypatch, tmp_path, drain_timeout=0.3) as running:
        whole = asyncio.create_task(running.request("/v1/completions", json=LONG))
        stream = asyncio.create_task(running.request("/v1/completions", json={**LONG, "stream": True}))
        response = asyncio.create_task(
            running.request(
                "/v1/responses", json={"input": "x", "max_output_tokens": 1000, "ignore_eos": True, "stream": True}
            )
        )
        assert await eventually(lambda: len(running.engine.running) == 3)
        enough = running.engine.delivered + 30  # ten of each
        assert await eventually(lambda: running.engine.delivered >= enough)
        await running.drain()
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_ending")
        seen = events((await stream).text)
        assert len(seen) > 2
        assert seen[-1]["error"]["code"] == "server_ending"
        last = json.loads((await response).text.strip().rpartition("data: ")[2])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert await running.is_gone()
        assert not running.engine.running


async def test_second_signal_skips_the_drain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serving, "_DUPLICATE_SIGNAL_SECONDS", 60)
    async with draining_server(monkeypatch, tmp_path, drain_timeout=120) as running:
        stream = asyncio.create_task(running.request("/v1/completions", json={**LONG, "stream": True}))
        assert await eventually(lambda: running.engine.delivered >= 3)
        await running.drain()
        send_signal()  # a duplicate of the first
        await settle()
        assert not stream.done()
        monkeypatch.setattr(serving, "_DUPLICATE_SIGNAL_SECONDS", 0)
        send_signal()
        seen = events((await asyncio.wait_for(stream, 60)).text)
        assert seen[-1]["error"]["code"] == "server_ending"
        assert await running.is_gone()


async def test_drain_closes_kept_alive_connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An idle connection is closed at once, a busy one after its response, and an unused one gets a 503."""
    async with draining_server(monkeypatch, tmp_path) as running:
        port = running.http.base_url.port
        idle = await asyncio.open_connection("127.0.0.1", port)
        idle[1].write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await idle[0].readuntil(b'{"status":"ok"}')
        fresh = await asyncio.open_connection("127.0.0.1", port)
        busy = asyncio.create_task(running.http.post("/v1/completions", json={**LONG, "max_tokens": 150}))
        assert await eventually(lambda: running.engine.running)
        running.engine.pause()
        await running.drain()
        assert await asyncio.wait_for(idle[0].read(), 60) == b""
        assert not busy.done()
        fresh[1].write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        received = await asyncio.wait_for(fresh[0].read(), 60)
        assert b" 503 " in received
        assert b"server_ending" in received
        running.engine.resume()
        answer = await busy
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        for _, writer in (idle, fresh):
            writer.close()


async def remaining_events(socket: ClientConnection) -> tuple[list[str], int | None]:
    """Return the types of the remaining events, and the close code."""
    kinds = []
    async with asyncio.timeout(60):
        async for text in socket:
            kinds.append(json.loads(text)["type"])
    return kinds, socket.close_code


async def test_drain_closes_websockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with draining_server(monkeypatch, tmp_path) as running:
        url = str(running.http.base_url).replace("http:", "ws:") + "/v1/responses"
        async with connect(url, proxy=None) as idle, connect(url, proxy=None) as busy:
            create = {"type": "response.create", "input": "x", "max_output_tokens": 150, "ignore_eos": True}
            await busy.send(json.dumps(create))
            await busy.recv()
            running.engine.pause()
            await running.drain()
            assert await asyncio.wait_for(remaining_events(idle), 60) == ([], 1001)
            with pytest.raises(websockets.InvalidStatus) as rejected:
                await connect(url, proxy=None)
            assert rejected.value.response.status_code == 503
            assert json.loads(rejected.value.response.body)["error"]["code"] == "server_ending"
            running.engine.resume()
            kinds, code = await remaining_events(busy)
            assert kinds[-1] in ("response.completed", "response.incomplete")
            assert code == 1001
        assert await running.is_gone()


async def test_drain_fails_websocket_responses_that_do_not_finish_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with draining_server(monkeypatch, tmp_path, drain_timeout=0.3) as running:
        url = str(running.http.base_url).replace("http:", "ws:") + "/v1/responses"
        async with connect(url, proxy=None) as busy:
            create = {"type": "response.create", "input": "x", "max_output_tokens": 1000, "ignore_eos": True}
            await busy.send(json.dumps(create))
            await busy.recv()
            await running.drain()
            kinds, code = await remaining_events(busy)
            assert kinds[-1] == "response.failed"
            assert code == 1001
        assert await running.is_gone()


@pytest.mark.parametrize("length", [40, 1000])
async def test_drain_waits_for_background_responses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int
) -> None:
    async with draining_server(monkeypatch, tmp_path, drain_timeout=90 if length == 40 else 0.3) as running:
        body = {"input": "x", "max_output_tokens": length, "ignore_eos": True, "background": True}
        id = (await running.request("/v1/responses", json=body)).json()["id"]
        running.engine.pause()
        await running.drain()
        if length == 40:
            assert (await running.request("/health")).status_code == 200  # until the shutdown is complete
            running.engine.resume()
        assert await running.is_gone(60)
    config = Config(port=0, database=str(tmp_path / "syringa.db"))
    async with server(FakeEngine("hello"), config, plain_model()) as http:
        found = (await http.get(f"/v1/responses/{id}")).json()
    assert found["status"] == ("incomplete" if length == 40 else "failed")


async def test_shutdown_does_not_wait_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = FakeEngine("x" * 4096, at_once=1)
    async with draining_server(monkeypatch, tmp_path, engine, drain_timeout=0.3) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http.base_url.port)
        writer.transport.pause_reading()
        body = json.dumps({**LONG, "prompt": ["x"] * 50, "max_tokens": 3000, "stream": True}).encode()
        head = HEAD + b"content-length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        assert await eventually(lambda: engine.running)
        send_signal()
        assert await running.is_gone()
        assert await eventually(lambda: not engine.running)
        writer.transport.abort()
        assert reader


async def test_shutdown_rejects_requests_that_are_still_being_received(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with draining_server(monkeypatch, tmp_path, drain_timeout=0.2) as running:
        accounting: list[Any] = []
        running.app_state.observers.append(accounting.append)
        reader, writer = await asyncio.open_connection("127.0.0.1", running.http.base_url.port)
        writer.write(HEAD + b"content-length: 9\r\n\r\n{")
        await settle()
        await running.drain()
        received = await asyncio.wait_for(reader.read(), 60)
        assert received.startswith(b"HTTP/1.1 503 ")
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "server_ending"
        writer.close()
        assert await running.is_gone()
    assert [(each.outcome, each.status) for each in accounting] == [("failed", 503)]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_shutdown_logs_no_error_for_unread_responses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"prompt": ["x"] * 100, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    blocked: list[bool] = []
    monkeypatch.setattr(limits.WriteTimeout, "_start_write_timer", lambda self: blocked.append(True))
    async with draining_server(
        monkeypatch, tmp_path, FakeEngine("x" * 4096, delay=0.0001), drain_timeout=0.2
    ) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.http.base_url.port)
        writer.transport.pause_reading()
        writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert await eventually(lambda: blocked)
        await running.drain()
        assert await running.is_gone()
        writer.transport.abort()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
