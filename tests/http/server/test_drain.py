"""How a server ends, as its clients see it."""

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
from tests.client import events, eventually, server
from tests.fake_engine import FakeEngine

LONG = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True}


def end() -> None:
    """The server's handler is this process's, as long as it runs."""
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(autouse=True)
def _survive() -> Any:
    """A signal that comes before or after the server must not end the tests."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGTERM, before)


class Ending:
    def __init__(self, http: httpx.AsyncClient, engine: FakeEngine, works: list[AppState]) -> None:
        self.http, self.engine, self.works = http, engine, works

    @property
    def app_state(self) -> AppState:
        return self.works[0]

    async def drain(self) -> None:
        end()
        assert await eventually(lambda: self.app_state.draining)

    async def is_gone(self, seconds: float = 30.0) -> bool:
        async def gone() -> bool:
            try:
                async with httpx.AsyncClient(base_url=self.http.base_url, trust_env=False) as http:
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

    async def new(self, path: str, **given: Any) -> httpx.Response:
        """The answer over a connection of its own."""
        async with httpx.AsyncClient(base_url=self.http.base_url, trust_env=False) as http:
            return await http.request("POST" if given else "GET", path, **given)


@contextlib.asynccontextmanager
async def place(
    monkeypatch: pytest.MonkeyPatch, path: Path, engine: FakeEngine | None = None, *, drain_timeout: float = 90.0
) -> AsyncIterator[Ending]:
    engine = engine or FakeEngine("hello", delay=0.02)
    works: list[AppState] = []

    async def keeping(config: Any, engines: Any, models: Any, listener: Any, app_state: AppState) -> None:
        works.append(app_state)
        await serve_api(config, engines, models, listener, app_state)

    monkeypatch.setattr("tests.client.serve_api", keeping)
    config = Config(port=0, drain_timeout=drain_timeout, database=str(path / "syringa.db"))
    async with server(engine, config, plain_model()) as http:
        yield Ending(http, engine, works)


async def test_drain_rejects_new_requests_while_streams_finish(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with place(monkeypatch, tmp_path) as here:
        body = {**LONG, "max_tokens": 150, "stream": True}
        async with here.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            first = await anext(lines)
            await here.drain()
            refused = await here.new("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_ending")
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
            assert refused.headers["x-request-id"]
            assert (await here.new("/v1/models")).status_code == 503
            assert (await here.new("/health")).status_code == 200
            assert (await here.new("/ready")).json()["error"]["code"] == "server_ending"
            text = "\n".join([first, *[line async for line in lines]])
        seen = events(text.rstrip())
        assert seen[-1] == "[DONE]"
        assert len([each for each in seen[:-1] if each["choices"][0]["text"]]) == 150
        assert await here.is_gone()
        assert not here.engine.running


async def test_shutdown_is_immediate_without_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with place(monkeypatch, tmp_path, drain_timeout=120) as here:
        end()
        assert await here.is_gone()


async def test_drain_fails_requests_that_do_not_finish_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with place(monkeypatch, tmp_path, drain_timeout=0.3) as here:
        whole = asyncio.create_task(here.new("/v1/completions", json=LONG))
        stream = asyncio.create_task(here.new("/v1/completions", json={**LONG, "stream": True}))
        response = asyncio.create_task(
            here.new(
                "/v1/responses", json={"input": "x", "max_output_tokens": 1000, "ignore_eos": True, "stream": True}
            )
        )
        assert await eventually(lambda: len(here.engine.running) == 3)
        await asyncio.sleep(0.1)
        await here.drain()
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_ending")
        seen = events((await stream).text)
        assert len(seen) > 2
        assert seen[-1]["error"]["code"] == "server_ending"
        last = json.loads((await response).text.strip().rpartition("data: ")[2])
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert await here.is_gone()
        assert not here.engine.running


async def test_second_signal_skips_the_drain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serving, "_SAME_SIGNAL_SECONDS", 60)
    async with place(monkeypatch, tmp_path, drain_timeout=120) as here:
        stream = asyncio.create_task(here.new("/v1/completions", json={**LONG, "stream": True}))
        assert await eventually(lambda: here.engine.running)
        await asyncio.sleep(0.1)
        await here.drain()
        end()  # the same, told by another
        await asyncio.sleep(0.4)
        assert not stream.done()
        monkeypatch.setattr(serving, "_SAME_SIGNAL_SECONDS", 0)
        end()
        seen = events((await asyncio.wait_for(stream, 30)).text)
        assert seen[-1]["error"]["code"] == "server_ending"
        assert await here.is_gone()


async def test_drain_closes_kept_alive_connections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An idle one at once; one that is in use after its answer, which says so if it still can; one that has yet to ask
    is told."""
    async with place(monkeypatch, tmp_path) as here:
        port = here.http.base_url.port
        idle = await asyncio.open_connection("127.0.0.1", port)
        idle[1].write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        await idle[0].readuntil(b'{"status":"ok"}')
        fresh = await asyncio.open_connection("127.0.0.1", port)
        busy = asyncio.create_task(here.http.post("/v1/completions", json={**LONG, "max_tokens": 150}))
        assert await eventually(lambda: here.engine.running)
        await here.drain()
        assert await asyncio.wait_for(idle[0].read(), 30) == b""
        assert not busy.done()
        fresh[1].write(b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n")
        said = await asyncio.wait_for(fresh[0].read(), 30)
        assert b" 503 " in said
        assert b"server_ending" in said
        answer = await busy
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        for _, writer in (idle, fresh):
            writer.close()


async def rest(socket: ClientConnection) -> tuple[list[str], int | None]:
    """The types of the events that still come, and the code with which the server closes."""
    kinds = []
    async with asyncio.timeout(30):
        async for text in socket:
            kinds.append(json.loads(text)["type"])
    return kinds, socket.close_code


async def test_drain_closes_websockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with place(monkeypatch, tmp_path) as here:
        url = str(here.http.base_url).replace("http:", "ws:") + "/v1/responses"
        async with connect(url, proxy=None) as idle, connect(url, proxy=None) as busy:
            create = {"type": "response.create", "input": "x", "max_output_tokens": 150, "ignore_eos": True}
            await busy.send(json.dumps(create))
            await busy.recv()
            await here.drain()
            assert await asyncio.wait_for(rest(idle), 30) == ([], 1001)
            with pytest.raises(websockets.InvalidStatus) as refused:
                await connect(url, proxy=None)
            assert refused.value.response.status_code == 503
            assert json.loads(refused.value.response.body)["error"]["code"] == "server_ending"
            kinds, code = await rest(busy)
            assert kinds[-1] in ("response.completed", "response.incomplete")
            assert code == 1001
        assert await here.is_gone()


async def test_drain_fails_websocket_responses_that_do_not_finish_in_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with place(monkeypatch, tmp_path, drain_timeout=0.3) as here:
        url = str(here.http.base_url).replace("http:", "ws:") + "/v1/responses"
        async with connect(url, proxy=None) as busy:
            create = {"type": "response.create", "input": "x", "max_output_tokens": 1000, "ignore_eos": True}
            await busy.send(json.dumps(create))
            await busy.recv()
            await here.drain()
            kinds, code = await rest(busy)
            assert kinds[-1] == "response.failed"
            assert code == 1001
        assert await here.is_gone()


@pytest.mark.parametrize("length", [40, 1000])
async def test_drain_waits_for_background_responses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, length: int
) -> None:
    async with place(monkeypatch, tmp_path, drain_timeout=20 if length == 40 else 1.5) as here:
        body = {"input": "x", "max_output_tokens": length, "ignore_eos": True, "background": True}
        id = (await here.new("/v1/responses", json=body)).json()["id"]
        await here.drain()
        assert (await here.new("/health")).status_code == 200  # it is there until the end
        assert await here.is_gone(60)
    config = Config(port=0, database=str(tmp_path / "syringa.db"))
    async with server(FakeEngine("hello"), config, plain_model()) as http:
        found = (await http.get(f"/v1/responses/{id}")).json()
    assert found["status"] == ("incomplete" if length == 40 else "failed")


async def test_shutdown_does_not_wait_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = FakeEngine("x" * 4096, at_once=1)
    async with place(monkeypatch, tmp_path, engine, drain_timeout=0.3) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.http.base_url.port)
        writer.transport.pause_reading()
        body = json.dumps({**LONG, "prompt": ["x"] * 50, "max_tokens": 3000, "stream": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        assert await eventually(lambda: engine.running)
        end()
        assert await here.is_gone()
        assert await eventually(lambda: not engine.running)
        writer.transport.abort()
        assert reader


async def test_shutdown_rejects_requests_that_are_still_being_received(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with place(monkeypatch, tmp_path, drain_timeout=0.2) as here:
        accounts: list[Any] = []
        here.app_state.books.observers.append(accounts.append)
        reader, writer = await asyncio.open_connection("127.0.0.1", here.http.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
        await asyncio.sleep(0.1)
        await here.drain()
        said = await asyncio.wait_for(reader.read(), 30)
        assert said.startswith(b"HTTP/1.1 503 ")
        assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["code"] == "server_ending"
        writer.close()
        assert await here.is_gone()
    assert [(each.outcome, each.status) for each in accounts] == [("failed", 503)]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_shutdown_logs_no_error_for_unread_responses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"prompt": ["x"] * 100, "max_tokens": 3000, "ignore_eos": True, "stream": True}).encode()
    behind: list[bool] = []
    monkeypatch.setattr(limits.WriteTimeout, "_watch", lambda self: behind.append(True))
    async with place(monkeypatch, tmp_path, FakeEngine("x" * 4096, delay=0.0001), drain_timeout=0.2) as here:
        _, writer = await asyncio.open_connection("127.0.0.1", here.http.base_url.port)
        writer.transport.pause_reading()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert await eventually(lambda: behind)
        await here.drain()
        assert await here.is_gone()
        writer.transport.abort()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
