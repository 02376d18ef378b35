"""Streams, background responses and WebSockets whose API key is revoked or expires, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from syringa.config import Config
from syringa.service import store_poller
from syringa.service.auth.keys import create_api_key
from syringa.store import ApiKey, Store
from tests.chat_models import plain_model
from tests.client import eventually, server, until
from tests.fake_engine import FakeEngine
from tests.http.responses_client import stream_events
from tests.store.helpers import write

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


class RevocationServer:
    """A server whose keys another process manages: they are changed in the database only."""

    def __init__(self, http: httpx.AsyncClient, engine: FakeEngine, store: Store) -> None:
        self.http, self.engine, self.store = http, engine, store

    async def create_key(self, organization: str = "acme", **changes: Any) -> tuple[dict[str, str], ApiKey]:
        key, record = create_api_key(organization, **changes)
        assert await write(self.store).keys.create(record)
        return {"authorization": f"Bearer {key}"}, record

    async def revoke(self, record: ApiKey) -> None:
        await write(self.store).keys.revoke(record.id)


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RevocationServer]:
    monkeypatch.setattr(store_poller, "POLL_SECONDS", 0.02)
    monkeypatch.setattr("syringa.service.auth.key_cache.UNKNOWN_KEY_WAIT_SECONDS", 60)
    engine = FakeEngine("x", delay=0.01)
    database = str(tmp_path / "syringa.db")
    config = Config(port=0, drain_timeout=1.0, database=database)
    async with Store(database) as store:
        assert await write(store).keys.create(create_api_key("first")[1])  # from the start, a key is needed
        async with server(engine, config, plain_model()) as http:
            yield RevocationServer(http, engine, store)


async def read_stream(response: httpx.Response) -> str:
    async with asyncio.timeout(60):
        return "".join([text async for text in response.aiter_text()])


async def test_stream_ends_with_an_error_when_its_key_is_revoked(running: RevocationServer) -> None:
    headers, record = await running.create_key()
    other_headers, _ = await running.create_key()
    body = CHAT | {"ignore_eos": True, "max_tokens": 4000}
    async with contextlib.AsyncExitStack() as stack:
        revoked, other = [
            await stack.enter_async_context(
                running.http.stream("POST", "/v1/chat/completions", json=body, headers=each)
            )
            for each in (headers, other_headers)
        ]
        assert await eventually(lambda: running.engine.delivered > 4)
        await running.revoke(record)
        *_, last, end = (await read_stream(revoked)).split("\n\n")
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (end, error["code"], error["message"]) == ("", "invalid_api_key", "The API key was revoked.")
        assert await eventually(lambda: len(running.engine.running) == 1)  # the other key's stream goes on
        assert not other.is_closed
    assert (await running.http.get("/v1/models", headers=headers)).status_code == 401


async def test_request_without_a_stream_gets_401_when_its_key_expires(running: RevocationServer) -> None:
    running.engine.pause()
    headers, _ = await running.create_key(expires_at=int(time.time()) + 5)
    answer = await running.http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["message"] == "The API key has expired."
    assert await eventually(lambda: not running.engine.running)


async def test_background_response_fails_when_its_key_is_revoked(running: RevocationServer) -> None:
    headers, record = await running.create_key()
    reader_headers, reader = await running.create_key()
    colleague_headers, _ = await running.create_key()
    body = {"input": "hi", "background": True, "ignore_eos": True, "max_output_tokens": 4000}
    response = (await running.http.post("/v1/responses", json=body, headers=headers)).json()
    path = f"/v1/responses/{response['id']}"
    async with running.http.stream("GET", f"{path}?stream=true", headers=reader_headers) as follower:
        await running.revoke(reader)  # the stream ends, the response does not
        last = stream_events(await read_stream(follower))[-1]
        assert (last["type"], last["message"]) == ("error", "The API key was revoked.")
    found = (await running.http.get(path, headers=colleague_headers)).json()
    assert found["status"] in ("queued", "in_progress")
    await running.revoke(record)

    async def failed() -> bool:
        nonlocal found
        found = (await running.http.get(path, headers=colleague_headers)).json()
        return bool(found["status"] == "failed")

    await until(failed)
    assert found["error"]["message"] == "The API key was revoked."
    assert await eventually(lambda: not running.engine.running)


@pytest.mark.parametrize("busy", [False, True])
async def test_websocket_is_closed_when_its_key_is_revoked(running: RevocationServer, busy: bool) -> None:
    headers, record = await running.create_key()
    url = str(running.http.base_url).replace("http:", "ws:") + "/v1/responses"
    async with connect(url, additional_headers=headers, proxy=None) as socket:
        if busy:
            message = {"type": "response.create", "input": "hi", "ignore_eos": True, "max_output_tokens": 4000}
            await socket.send(json.dumps(message))
            assert await eventually(lambda: running.engine.delivered > 4)
        await running.revoke(record)
        events = []
        with contextlib.suppress(ConnectionClosed):
            async with asyncio.timeout(60):
                while True:
                    events.append(json.loads(await socket.recv()))
        last = events[-1]
        error = last["response"]["error"] if busy else last["error"]
        assert (last["type"], error["message"]) == (
            "response.failed" if busy else "error",
            "The API key was revoked.",
        )
        assert (socket.close_code, socket.close_reason) == (1008, "The API key was revoked.")
    assert await eventually(lambda: not running.engine.running)


async def test_key_works_at_once_in_a_process_that_did_not_create_it(
    running: RevocationServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = await running.create_key()
    assert (await running.http.get("/v1/models", headers=first)).status_code == 200
    monkeypatch.setattr(store_poller, "POLL_SECONDS", 3600)
    for _ in range(3):
        headers, _ = await running.create_key("new")
        assert (await running.http.get("/v1/models", headers=headers)).status_code == 200


async def test_key_works_at_once_in_the_process_that_created_it(
    running: RevocationServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, _ = await running.create_key(admin=True)
    assert (await running.http.get("/v1/models", headers=admin)).status_code == 200
    monkeypatch.setattr(store_poller, "POLL_SECONDS", 3600)
    made = (await running.http.post("/admin/keys", json={"organization": "new"}, headers=admin)).json()
    monkeypatch.setattr("syringa.service.auth.key_cache.UNKNOWN_KEY_WAIT_SECONDS", 0)
    headers = {"authorization": f"Bearer {made['key']}"}
    assert (await running.http.get("/v1/models", headers=headers)).status_code == 200
    assert (await running.http.delete(f"/admin/keys/{made['id']}", headers=admin)).status_code == 200
    assert (await running.http.get("/v1/models", headers=headers)).status_code == 401
