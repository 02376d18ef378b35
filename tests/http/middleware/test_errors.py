from __future__ import annotations

import pytest

from syringa.config import Config
from tests.client import client
from tests.fake_engine import FakeEngine


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


async def test_request_id_is_adopted_or_generated() -> None:
    async with client() as http:
        first = (await http.get("/health")).headers["x-request-id"]
        assert first != (await http.get("/health")).headers["x-request-id"]
        assert (await http.get("/health", headers={"x-request-id": "mine-1"})).headers["x-request-id"] == "mine-1"
        assert (await http.get("/health", headers={"x-request-id": "a b"})).headers["x-request-id"] != "a b"
        assert "x-request-id" in (await http.get("/nowhere")).headers


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nowhere", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405), ("GET", "/v1/models/", 404)],
)
async def test_unknown_path_or_method_is_rejected(method: str, path: str, status: int) -> None:
    async with client() as http:
        answer = await http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_body_limit() -> None:
    async with client(config=Config(max_body_bytes=100)) as http:
        stated = await http.post("/v1/completions", json={"prompt": "x" * 200})

        async def chunks():
            for _ in range(20):
                yield b" " * 10

        grown = await http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    for answer in (stated, grown):
        assert answer.status_code == 413
        assert "100 bytes" in answer.json()["error"]["message"]


async def test_body_must_be_json() -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", data={"prompt": "x"})
    assert answer.status_code == 415


async def test_internal_error_is_logged_but_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine("x")
    engine.fail, engine.fail_first = ValueError("a secret detail"), True
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


async def test_cors_headers_follow_the_configuration() -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with client(config=Config(cors_origins=("https://a.example",), api_key=("k",))) as http:
        preflight = await http.options("/v1/completions", headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        refused = await http.get("/v1/models", headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = await http.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
