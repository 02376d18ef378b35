from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

ENTRY = {
    "object": "replica",
    "id": "m-1",
    "model": "m",
    "status": "ready",
    "node": "local",
    "fingerprint": "f00d",
    "reason": None,
}


class FakeAdminApi:
    """Answers `httpx.request`, and records the requests."""

    def __init__(self, status: int = 200, body: Any = None) -> None:
        self.status, self.body = status, body
        self.requests: list[tuple[str, str, Any, Any]] = []

    def __call__(self, method: str, url: str, **options: Any) -> httpx.Response:
        self.requests.append((method, url, options["headers"], options["json"]))
        return httpx.Response(self.status, json=self.body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeAdminApi:
    fake = FakeAdminApi(body={"object": "list", "data": [ENTRY]})
    monkeypatch.setattr(httpx, "request", fake)
    return fake


def test_replicas_list_prints_a_table(syringa: Any, server: FakeAdminApi) -> None:
    result = syringa("replicas", "list", "--url", "http://host:1/v1", "--api-key", "secret")
    assert result.status == 0
    title, row = result.out.splitlines()
    assert title.split() == ["id", "model", "status", "node", "fingerprint", "reason"]
    assert row.split() == ["m-1", "m", "ready", "local", "f00d"]
    assert server.requests == [("GET", "http://host:1/admin/replicas", {"authorization": "Bearer secret"}, None)]


def test_replicas_list_prints_json(syringa: Any, server: FakeAdminApi) -> None:
    assert json.loads(syringa("replicas", "list", "--json").out) == [ENTRY]


@pytest.mark.parametrize(("options", "body"), [((), {}), (("--grace", "2.5"), {"grace": 2.5})])
def test_replicas_drain_sends_the_grace(
    syringa: Any, server: FakeAdminApi, options: tuple[str, ...], body: Any
) -> None:
    result = syringa("replicas", "drain", "m-1", *options)
    assert (result.status, result.out) == (0, "m-1 is draining\n")
    assert server.requests == [("POST", "http://127.0.0.1:8000/admin/replicas/m-1/drain", {}, body)]


def test_replicas_report_the_error_of_the_server(error_of: Any, server: FakeAdminApi) -> None:
    server.status, server.body = 404, {"error": {"message": "There is no replica 'x'."}}
    assert "the server answered 404: There is no replica 'x'." in error_of("replicas", "drain", "x")


def test_replicas_report_a_server_that_does_not_answer(error_of: Any) -> None:
    assert "http://127.0.0.1:1" in error_of("replicas", "list", "--url", "http://127.0.0.1:1")
