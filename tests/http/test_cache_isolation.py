"""Isolation of the prefix cache between organizations and by `cache_salt`, seen through the API.

The engine is fake, but finds prefixes with the real block pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from syringa.config import Config
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool, hash_block
from syringa.generation import cache_key
from syringa.types import EngineDelta, EngineRequest
from tests.chat_models import plain_model
from tests.client import client, server
from tests.fake_engine import FakeEngine
from tests.http.responses_client import responses_client
from tests.http.routes.test_background import finished
from tests.http.routes.test_websocket import ResponsesSocket, socket

SECRET = "You are the assistant of a bank. The PIN of the vault is 482. Never tell it to anybody, whatever they say."
KEYS = ("key-of-one-organization", "key-of-another-organization")
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class CachingEngine(FakeEngine):
    """A fake engine with a prefix cache."""

    def __init__(self) -> None:
        super().__init__("hello")
        self.pool = BlockPool(1000)

    def _delta(self, request: EngineRequest, choice: int, taken: list[int], *, left: bool, first: bool) -> EngineDelta:
        delta = super()._delta(request, choice, taken, left=left, first=first)
        if not first:
            return delta
        found, _ = self.pool.find_prefix(request.cache_key, request.prompt)
        parent = request.cache_key
        for start in range(0, len(request.prompt) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = hash_block(parent, request.prompt[start : start + BLOCK_SIZE])
            self.pool.add_to_prefix_cache(self.pool.allocate(), parent)
        return msgspec.structs.replace(delta, cached_tokens=len(found) * BLOCK_SIZE)


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    if path == "/v1/completions":
        return {"prompt": SECRET} | fields
    if path == "/v1/chat/completions":
        return {"messages": [{"role": "system", "content": SECRET}, {"role": "user", "content": "hi"}]} | fields
    return {"instructions": SECRET, "input": "hi", "store": False} | fields


async def cached_tokens(http: httpx.AsyncClient, path: str, key: str | None = None, **fields: Any) -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    answer = await http.post(path, json=body_of(path, **fields), headers=headers)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    details = usage["input_tokens_details"] if path == "/v1/responses" else usage["prompt_tokens_details"]
    found: int = details["cached_tokens"]
    return found


@contextlib.asynccontextmanager
async def caching_client(keys: Sequence[str] = KEYS, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = Config(api_key=tuple(keys), **settings)
    async with client(CachingEngine(), config, plain_model()) as http:
        yield http


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_guessed_prompt_of_another_organization_is_not_cached(path: str) -> None:
    async with caching_client() as http:
        assert await cached_tokens(http, path, KEYS[0]) == 0
        assert await cached_tokens(http, path, KEYS[1]) == 0
        assert await cached_tokens(http, path, KEYS[0]) >= len(SECRET) // BLOCK_SIZE * BLOCK_SIZE - BLOCK_SIZE
        assert await cached_tokens(http, path, KEYS[1]) > 0  # its own


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_server_without_keys_shares_its_cache(path: str) -> None:
    async with caching_client(keys=()) as http:
        assert await cached_tokens(http, path) == 0
        assert await cached_tokens(http, path) > 0


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_share_prefix_cache_shares_between_organizations_but_not_between_salts(path: str) -> None:
    async with caching_client(share_prefix_cache=True) as http:
        assert await cached_tokens(http, path, KEYS[0]) == 0
        assert await cached_tokens(http, path, KEYS[1]) > 0
        assert await cached_tokens(http, path, KEYS[0], cache_salt="a") == 0
        assert await cached_tokens(http, path, KEYS[1], cache_salt="b") == 0
        assert await cached_tokens(http, path, KEYS[1], cache_salt="a") > 0


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_cache_salt_isolates_within_an_organization(path: str) -> None:
    async with caching_client() as http:
        assert await cached_tokens(http, path, KEYS[0]) == 0
        for salt in ("a", "a" * 256, "é"):
            assert await cached_tokens(http, path, KEYS[0], cache_salt=salt) == 0
            assert await cached_tokens(http, path, KEYS[0], cache_salt=salt) > 0
            assert await cached_tokens(http, path, KEYS[1], cache_salt=salt) == 0
        assert await cached_tokens(http, path, KEYS[0], cache_salt=None) > 0


@pytest.mark.parametrize("path", [*ENDPOINTS, "/v1/responses/compact"])
@pytest.mark.parametrize("salt", ["", "a" * 257, 5, True, ["a"], {}])
async def test_invalid_cache_salt_is_refused(path: str, salt: Any) -> None:
    engine = FakeEngine("x")
    async with client(engine, model=plain_model()) as http:
        answer = await http.post(path, json=body_of(path, cache_salt=salt))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "cache_salt"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_all_prompts_and_choices_of_a_request_have_its_cache_key(path: str) -> None:
    engine = FakeEngine("x")
    more = {"prompt": ["a", "b"], "n": 2} if path == "/v1/completions" else {}
    async with client(engine, model=plain_model()) as http:
        answer = await http.post(path, json=body_of(path, cache_salt="salt", stream=True, **more))
    assert answer.status_code == 200
    assert "salt" not in answer.text
    assert {each.cache_key for each in engine.requests} == {cache_key("", "salt")}


async def test_compaction_and_background_response_have_their_cache_key(tmp_path: Path) -> None:
    async with responses_client(str(tmp_path / "syringa.db")) as http:
        answer = await http.post("/v1/responses/compact", json={"input": "hi", "cache_salt": "salt"})
        assert answer.status_code == 200, answer.text
        response = await http.respond(background=True, cache_salt="salt")
        stored = await finished(http, response["id"])
        assert "cache_salt" not in stored
        keys = [each.cache_key for each in http.engine.requests]
    assert keys == [cache_key("", "salt")] * 2


async def test_websocket_honors_and_checks_cache_salt(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    async with socket(tmp_path, engine) as ws:
        for salt in ("", 5):
            error = (await ws.ask(cache_salt=salt))[-1]
            assert (error["type"], error["status"], error["error"]["param"]) == ("error", 400, "cache_salt")
        first = await ws.ask(store=False, cache_salt="salt")
        await ws.ask(store=False, previous_response_id=first[-1]["response"]["id"])
    assert [each.cache_key for each in engine.requests] == [cache_key("", "salt"), cache_key("", None)]


async def test_websockets_of_two_organizations_do_not_share_the_cache(tmp_path: Path) -> None:
    config = Config(port=0, drain_timeout=1.0, api_key=KEYS, database=str(tmp_path / "syringa.db"))
    cached = []
    async with server(CachingEngine(), config, plain_model()) as http:
        url = str(http.base_url).replace("http:", "ws:") + "/v1/responses"
        for key in (*KEYS, *KEYS):
            async with connect(url, additional_headers={"authorization": f"Bearer {key}"}, proxy=None) as connection:
                seen = await ResponsesSocket(connection).ask(instructions=SECRET, store=False)
            cached.append(seen[-1]["response"]["usage"]["input_tokens_details"]["cached_tokens"])
    assert [count > 0 for count in cached] == [False, False, True, True]
