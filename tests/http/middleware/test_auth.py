"""Who comes in, how often, and what the books say of it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.errors import EngineError, EngineOverloaded
from syringa.http.app import create_app
from syringa.http.endpoints import ENDPOINTS
from syringa.service.app_state import AppState
from syringa.service.usage.accounting import RequestAccounting
from tests.chat_models import plain_model
from tests.client import eventually, server
from tests.fake_engine import FakeEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/api/v2/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/v2/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


class Seen(httpx.AsyncClient):
    accounts: list[RequestAccounting]
    engine: FakeEngine


@asynccontextmanager
async def gate(file: str, engine: FakeEngine | None = None, **settings: Any) -> AsyncIterator[Seen]:
    config = Config(database=file, **settings)
    engine = engine or FakeEngine("hello")
    app_state = AppState(config)
    accounts: list[RequestAccounting] = []
    app_state.observers.append(accounts.append)
    app = create_app(config, SingleEngineProvider(engine), FixedModels([plain_model(id="m")]), app_state)
    async with Seen(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test") as http:
        http.accounts, http.engine = accounts, engine
        try:
            yield http
        finally:
            await app_state.close()


def test_bodies_cover_all_metered_endpoints() -> None:
    assert BODIES.keys() == {endpoint.path for endpoint in ENDPOINTS if endpoint.metered}


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("stream", [False, True])
async def test_metered_request_is_accounted_once(file: str, path: str, stream: bool) -> None:
    body = BODIES[path] | ({"stream": True} if stream and "compact" not in path else {})
    async with gate(file) as http:
        answer = await http.post(path, json=body | ({"user": "ann"} if "compact" not in path else {}))
        assert answer.status_code == 200, answer.text
    (account,) = http.accounts
    assert (account.endpoint, account.outcome, account.status, account.model) == (path, "ok", 200, "m")
    assert account.request_id == answer.headers["x-request-id"]
    assert account.user == (None if "compact" in path else "ann")
    assert account.stats.prompt_tokens == len(http.engine.requests[0].prompt)
    assert account.stats.cached_tokens == account.stats.prompt_tokens // 2
    assert account.stats.completion_tokens > 0
    assert account.first_token_seconds is not None
    assert 0 < account.first_token_seconds <= account.total_seconds


async def test_background_response_is_accounted_when_it_ends(file: str) -> None:
    async with gate(file, FakeEngine("hello", delay=0.02)) as http:
        await http.post("/v1/responses", json={"input": "hi", "background": True})
        assert not http.accounts
        assert await eventually(lambda: http.accounts)
    (account,) = http.accounts
    assert account.stats.completion_tokens == 6


@pytest.mark.parametrize(
    ("body", "status", "outcome", "model"),
    [
        ({"prompt": 1}, 400, "refused", ""),
        ({"prompt": "hi", "model": "other"}, 404, "refused", ""),
        ({"prompt": "hi", "n": 0}, 400, "refused", ""),
    ],
)
async def test_rejected_request_is_accounted_as_refused(
    file: str, body: dict[str, Any], status: int, outcome: str, model: str
) -> None:
    async with gate(file) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == status
    (account,) = http.accounts
    assert (account.status, account.outcome, account.model) == (status, outcome, model)
    assert account.stats.prompt_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [EngineError("broken"), EngineOverloaded("full"), ValueError("a bug")])
async def test_failed_request_is_accounted_as_failed(file: str, error: Exception, stream: bool) -> None:
    engine = FakeEngine("hello")
    engine.fail = error
    async with gate(file, engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "hi", "stream": stream})
        assert answer.status_code == (200 if stream else getattr(error, "status", 500))
    (account,) = http.accounts
    assert (account.status, account.outcome) == (getattr(error, "status", 500), "failed")
    assert account.stats.completion_tokens == 1  # came before it failed


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnected_request_is_accounted_as_cancelled(file: str, stream: bool) -> None:
    seen: list[RequestAccounting] = []
    engine = FakeEngine("x" * 50, delay=0.02)
    async with server(engine, Config(port=0, database=file), observe=seen.append) as http:
        body = {"prompt": "hi", "max_tokens": 50, "stream": stream}
        waiting = asyncio.create_task(http.post("/v1/completions", json=body))
        assert await eventually(lambda: engine.running)
        await asyncio.sleep(0.1)
        waiting.cancel()
        assert await eventually(lambda: seen)
    (account,) = seen
    assert (account.outcome, account.status) == ("cancelled", 499)
    assert 0 < account.stats.completion_tokens < 50


async def test_rate_limits_apply_per_key(file: str) -> None:
    async with gate(file, api_key=("a", "b"), requests_per_minute=2) as http:
        first, second = {"authorization": "Bearer a"}, {"authorization": "Bearer b"}
        answers = [await http.post("/v1/completions", json={"prompt": "hi"}, headers=first) for _ in range(3)]
        other = await http.post("/v1/completions", json={"prompt": "hi"}, headers=second)
        free = await http.get("/v1/models", headers=first)
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert (other.status_code, free.status_code) == (200, 200)
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert [account.outcome for account in http.accounts] == ["ok", "ok", "refused", "ok"]
    assert len({account.caller.organization for account in http.accounts}) == 2


async def test_token_limit_counts_generated_tokens(file: str) -> None:
    async with gate(file, api_key=("a",), requests_per_minute=0, tokens_per_minute=6) as http:
        headers = {"authorization": "Bearer a"}
        answers = [await http.post("/v1/completions", json={"prompt": "hi"}, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].headers["x-ratelimit-limit-tokens"] == "6"


async def test_rate_limits_do_not_apply_without_keys(file: str) -> None:
    async with gate(file, requests_per_minute=1) as http:
        for _ in range(3):
            answer = await http.post("/v1/completions", json={"prompt": "hi"})
            assert answer.status_code == 200
            assert "x-ratelimit-limit-requests" not in answer.headers


async def test_concurrency_limit_rejects_excess_requests(file: str) -> None:
    async with gate(file, FakeEngine("hello", delay=0.02), api_key=("a",), concurrent_requests=2) as http:
        headers = {"authorization": "Bearer a"}
        sent = [http.post("/v1/completions", json={"prompt": "hi"}, headers=headers) for _ in range(4)]
        assert sorted(answer.status_code for answer in await asyncio.gather(*sent)) == [200, 200, 429, 429]
        assert (await http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)).status_code == 200


async def test_timeout_header_sets_a_deadline(file: str) -> None:
    async with gate(file, FakeEngine("hello", delay=0.05)) as http:
        slow = await http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-syringa-timeout": "0.08"})
        wrong = await http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-syringa-timeout": "soon"})
    assert (slow.status_code, slow.json()["error"]["code"]) == (503, "timeout")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-syringa-timeout")
    assert [account.outcome for account in http.accounts] == ["failed", "refused"]


async def test_request_without_key_is_counted_but_not_accounted(file: str) -> None:
    async with gate(file, api_key=("secret",), public_metrics=True) as http:
        wrong = {"authorization": "Bearer guess"}
        for headers in ({}, wrong, {"authorization": "Bearer secret"}):
            await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}, headers=headers)
        await http.post("/tokenize", json={"prompt": "hi"}, headers=wrong)
        await http.get("/v1/responses", headers=wrong)
        found = [line for line in (await http.get("/metrics")).text.splitlines() if 'status="401"' in line]
        assert [line.rpartition(" ")[2] for line in found] == ["2.0"]
        assert 'endpoint="/v1/completions"' in found[0]
        assert 'outcome="refused"' in found[0]
        assert [account.status for account in http.accounts] == [200]
