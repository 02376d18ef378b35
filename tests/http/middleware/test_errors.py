from __future__ import annotations

import pytest

from tests.client import client
from tests.fake_engine import FakeEngine


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
