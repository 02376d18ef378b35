"""Authentication, rate limits, and the accounting of requests."""

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
from tests.client import client, eventually, server
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/api/v2/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/api/v2/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/compact": {"input": "hi"},
}
EMBEDDING_BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    "/api/v2/embeddings": {"input": ["hi", "ho"]},
    "/rerank": {"query": "hi", "documents": ["ho"]},
    "/v1/rerank": {"query": "hi", "documents": ["ho", "hum"]},
    "/v2/rerank": {"query": "hi", "documents": ["ho"]},
    "/score": {"text_1": "hi", "text_2": "ho"},
    "/v1/score": {"text_1": "hi", "text_2": ["ho", "hum"]},
}
# Of other APIs, without a field `user`.
OTHER_BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"model": "m", "prompt": "hi"},
    "/api/embed": {"model": "tiny", "input": ["hi", "ho"]},
    "/api/embeddings": {"model": "tiny", "prompt": "hi"},
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


class AccountingClient(httpx.AsyncClient):
    """A client that records the accounting of its requests."""

    accounting: list[RequestAccounting]
    engine: FakeEngine


@asynccontextmanager
async def accounting_client(
    file: str, engine: FakeEngine | None = None, **settings: Any
) -> AsyncIterator[AccountingClient]:
    config = Config(database=file, **settings)
    engine = engine or FakeEngine("hello")
    app_state = AppState(config)
    accounting: list[RequestAccounting] = []
    app_state.observers.append(accounting.append)
    app = create_app(
        config, SingleEngineProvider(engine), FixedModels([plain_model(id="m"), embedding_model()]), app_state
    )
    async with AccountingClient(
        transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://localhost"
    ) as http:
        http.accounting, http.engine = accounting, engine
        try:
            yield http
        finally:
            await app_state.close()


def test_bodies_cover_all_metered_endpoints() -> None:
    bodies = {**BODIES, **EMBEDDING_BODIES, **OTHER_BODIES}
    assert bodies.keys() == {endpoint.path for endpoint in ENDPOINTS if endpoint.metered}


@pytest.mark.parametrize("path", sorted(BODIES))
@pytest.mark.parametrize("stream", [False, True])
async def test_metered_request_is_accounted_once(file: str, path: str, stream: bool) -> None:
    body = BODIES[path] | ({"stream": True} if stream and "compact" not in path else {})
    async with accounting_client(file) as http:
        answer = await http.post(path, json=body | ({"user": "ann"} if "compact" not in path else {}))
        assert answer.status_code == 200, answer.text
    (entry,) = http.accounting
    assert (entry.endpoint, entry.outcome, entry.status, entry.model) == (path, "ok", 200, "m")
    assert entry.request_id == answer.headers["x-request-id"]
    assert entry.user == (None if "compact" in path else "ann")
    assert entry.stats.prompt_tokens == len(http.engine.requests[0].prompt)
    assert entry.stats.cached_tokens == entry.stats.prompt_tokens // 2
    assert entry.stats.completion_tokens > 0
    assert entry.first_token_seconds is not None
    assert 0 < entry.first_token_seconds <= entry.total_seconds


@pytest.mark.parametrize("path", sorted(EMBEDDING_BODIES))
async def test_embedding_request_is_accounted_once_without_output(file: str, path: str) -> None:
    async with accounting_client(file) as http:
        answer = await http.post(path, json=EMBEDDING_BODIES[path] | {"user": "ann"})
        assert answer.status_code == 200, answer.text
    (entry,) = http.accounting
    assert (entry.endpoint, entry.outcome, entry.status, entry.model) == (path, "ok", 200, "tiny")
    assert (entry.request_id, entry.user) == (answer.headers["x-request-id"], "ann")
    assert entry.stats.prompt_tokens == sum(map(len, http.engine.embedded[0].inputs))
    assert answer.json()["usage"] == dict.fromkeys(("prompt_tokens", "total_tokens"), entry.stats.prompt_tokens)
    assert (entry.stats.completion_tokens, entry.stats.cached_tokens, entry.first_token_seconds) == (0, 0, None)


@pytest.mark.parametrize("path", sorted(OTHER_BODIES))
@pytest.mark.parametrize("stream", [False, True])
async def test_request_of_another_api_is_accounted_once(file: str, path: str, stream: bool) -> None:
    async with accounting_client(file) as http:
        answer = await http.post(path, json=OTHER_BODIES[path] | {"stream": stream})
        assert answer.status_code == 200, answer.text
    (entry,) = http.accounting
    model = OTHER_BODIES[path]["model"]
    assert (entry.endpoint, entry.outcome, entry.status, entry.model) == (path, "ok", 200, model)
    assert entry.request_id == answer.headers["x-request-id"]
    assert entry.stats.prompt_tokens > 0
    assert (entry.stats.completion_tokens > 0) == (model == "m")


async def test_background_response_is_accounted_when_it_ends(file: str) -> None:
    engine = FakeEngine("hello")
    engine.pause()
    async with accounting_client(file, engine) as http:
        await http.post("/v1/responses", json={"input": "hi", "background": True})
        assert not http.accounting
        engine.resume()
        assert await eventually(lambda: http.accounting)
    (entry,) = http.accounting
    assert entry.stats.completion_tokens == 6


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
    async with accounting_client(file) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == status
    (entry,) = http.accounting
    assert (entry.status, entry.outcome, entry.model) == (status, outcome, model)
    assert entry.stats.prompt_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("error", [EngineError("broken"), EngineOverloaded("full"), ValueError("a bug")])
async def test_failed_request_is_accounted_as_failed(file: str, error: Exception, stream: bool) -> None:
    engine = FakeEngine("hello")
    engine.fail = error
    async with accounting_client(file, engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "hi", "stream": stream})
        assert answer.status_code == (200 if stream else getattr(error, "status", 500))
    (entry,) = http.accounting
    assert (entry.status, entry.outcome) == (getattr(error, "status", 500), "failed")
    assert entry.stats.completion_tokens == 1  # generated before the failure


async def test_accounting_has_what_the_request_asks_for(file: str) -> None:
    async with accounting_client(file, FakeEngine("hello world")) as http:
        await http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 3, "max_tokens": 7})
    (entry,) = http.accounting
    assert (entry.choices, entry.max_tokens) == (3, 7)
    assert (entry.stats.longest_choice, entry.stats.completion_tokens) == (7, 42)


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnected_request_is_accounted_as_cancelled(file: str, stream: bool) -> None:
    seen: list[RequestAccounting] = []
    engine = FakeEngine("x" * 50, delay=0.02)
    async with server(engine, Config(port=0, database=file), observe=seen.append) as http:
        body = {"prompt": "hi", "max_tokens": 50, "stream": stream}
        waiting = asyncio.create_task(http.post("/v1/completions", json=body))
        assert await eventually(lambda: engine.delivered >= 3)
        waiting.cancel()
        assert await eventually(lambda: seen)
    (entry,) = seen
    assert (entry.outcome, entry.status) == ("cancelled", 499)
    assert 0 < entry.stats.completion_tokens < 50


async def test_rate_limits_apply_per_key(file: str) -> None:
    async with accounting_client(file, api_key=("a", "b"), requests_per_minute=2) as http:
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
    assert [entry.outcome for entry in http.accounting] == ["ok", "ok", "refused", "ok"]
    assert len({entry.caller.organization for entry in http.accounting}) == 2


async def test_token_limit_counts_generated_tokens(file: str) -> None:
    async with accounting_client(file, api_key=("a",), requests_per_minute=0, tokens_per_minute=6) as http:
        headers = {"authorization": "Bearer a"}
        answers = [await http.post("/v1/completions", json={"prompt": "hi"}, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].headers["x-ratelimit-limit-tokens"] == "6"


async def test_rate_limits_do_not_apply_without_keys(file: str) -> None:
    async with accounting_client(file, requests_per_minute=1) as http:
        for _ in range(3):
            answer = await http.post("/v1/completions", json={"prompt": "hi"})
            assert answer.status_code == 200
            assert "x-ratelimit-limit-requests" not in answer.headers


async def test_concurrency_limit_rejects_excess_requests(file: str) -> None:
    engine = FakeEngine("hello")
    engine.pause()
    async with accounting_client(file, engine, api_key=("a",), concurrent_requests=2) as http:
        headers = {"authorization": "Bearer a"}
        sent = [
            asyncio.create_task(http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)) for _ in range(4)
        ]
        assert await eventually(lambda: sum(each.done() for each in sent) == 2)
        engine.resume()
        assert sorted(answer.status_code for answer in await asyncio.gather(*sent)) == [200, 200, 429, 429]
        assert (await http.post("/v1/completions", json={"prompt": "hi"}, headers=headers)).status_code == 200


async def test_timeout_header_sets_a_deadline(file: str) -> None:
    async with accounting_client(file, FakeEngine("hello", delay=0.05)) as http:
        slow = await http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-syringa-timeout": "0.08"})
        wrong = await http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-syringa-timeout": "soon"})
    assert (slow.status_code, slow.json()["error"]["code"]) == (503, "timeout")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-syringa-timeout")
    assert [entry.outcome for entry in http.accounting] == ["failed", "refused"]


@pytest.mark.parametrize(
    ("path", "prepare", "body"),
    [
        ("/v1/completions", "syringa.api.completions.request.prepare_completion", {"prompt": "hi"}),
        (
            "/v1/chat/completions",
            "syringa.api.chat.request.prepare_chat",
            {"messages": [{"role": "user", "content": "hi"}]},
        ),
        ("/v1/responses", "syringa.http.routes.response_run.prepare_response", {"input": "hi", "store": False}),
    ],
)
async def test_deadline_covers_preparation(
    file: str, monkeypatch: pytest.MonkeyPatch, path: str, prepare: str, body: dict[str, object]
) -> None:
    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(prepare, never)
    async with accounting_client(file) as http:
        late = await http.post(path, json=body, headers={"x-syringa-timeout": "0.05"})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "timeout")
    assert [entry.outcome for entry in http.accounting] == ["failed"]


async def test_request_without_key_is_counted_but_not_accounted(file: str) -> None:
    async with accounting_client(file, api_key=("secret",), public_metrics=True) as http:
        wrong = {"authorization": "Bearer guess"}
        for headers in ({}, wrong, {"authorization": "Bearer secret"}):
            await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}, headers=headers)
        await http.post("/tokenize", json={"prompt": "hi"}, headers=wrong)
        await http.get("/v1/responses", headers=wrong)
        found = [line for line in (await http.get("/metrics")).text.splitlines() if 'status="401"' in line]
        assert [line.rpartition(" ")[2] for line in found] == ["2.0"]
        assert 'endpoint="/v1/completions"' in found[0]
        assert 'outcome="refused"' in found[0]
        assert [entry.status for entry in http.accounting] == [200]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer", 401),
        ("Bearer wrong", 401),
        ("Basic first", 401),
        ("Bearer first", 200),
        ("bearer second", 200),
        ("Bearer caf\u00e9", 401),
    ],
)
async def test_api_key_is_required(header: str | None, status: int) -> None:
    headers = {"authorization": header.encode("latin-1")} if header else {}
    async with client(config=Config(api_key=("first", "second"))) as http:
        answer = await http.get("/v1/models", headers=headers)
        assert answer.status_code == status
        if status == 401:
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["type"] == "authentication_error"
        assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": " second "}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "Bearer first"}, 401),
        ({"x-api-key": "first", "authorization": "bearer  first "}, 200),
        ({"x-api-key": "first", "authorization": "Basic aGk6aG8="}, 200),  # meant for a proxy
        ({"x-api-key": "first", "authorization": ""}, 200),
        ({"x-api-key": "", "authorization": "Bearer first"}, 200),
        ({"x-api-key": "first", "authorization": "Bearer second"}, 401),
        ({"x-api-key": "second", "authorization": "Bearer wrong"}, 401),
        ({"x-api-key": "wrong", "authorization": "Bearer first"}, 401),
    ],
)
async def test_api_key_header_is_accepted_beside_bearer(headers: dict[str, str], status: int) -> None:
    async with client(config=Config(api_key=("first", "second"))) as http:
        answer = await http.get("/v1/models", headers=headers)
        assert answer.status_code == status
        if status == 401 and all(headers.values()) and len(headers) == 2:
            assert "different API keys" in answer.json()["error"]["message"]
    async with client() as http:  # no key is needed
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_api_key_header_is_not_logged(caplog: pytest.LogCaptureFixture, file: str) -> None:
    caplog.set_level("DEBUG")
    async with accounting_client(file, api_key=("sesame-1234",), log_prompts=True) as http:
        for key in ("sesame-1234", "sesame-5678"):
            await http.post("/v1/completions", json={"prompt": "hi"}, headers={"x-api-key": key})
        both = {"x-api-key": "sesame-1234", "authorization": "Bearer sesame-5678"}
        refused = await http.post("/v1/completions", json={"prompt": "hi"}, headers=both)
    assert refused.status_code == 401
    assert "sesame" not in refused.text
    assert [entry.status for entry in http.accounting] == [200]
    assert caplog.records
    assert not any("sesame" in record.getMessage() + str(vars(record)) for record in caplog.records)


async def test_unknown_paths_are_not_counted(file: str) -> None:
    async with accounting_client(file, public_metrics=True) as http:
        for number in range(3):
            assert (await http.post(f"/v1/secret-{number}", json={"prompt": "hi"})).status_code == 404
        assert "secret" not in (await http.get("/metrics")).text
    assert not http.accounting
