"""Administration of replicas over HTTP, and `syringa replicas`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import ReplicaState, SingleEngineProvider
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.fake_engine import FakeEngine
from tests.http.routes.test_admin import bearer, stored_key

READY = ReplicaState("m-1", "ready", "unix:/run/1.sock", fingerprint="f00d")
LOADING = ReplicaState("m-2", "queued", reason="memory is short")


class ReplicatedEngines(SingleEngineProvider):
    """Models that share their replicas, and a record of what was drained."""

    def __init__(self) -> None:
        super().__init__(FakeEngine("hello"))
        self.drained: list[tuple[str, float]] = []

    def replicas(self, model: str) -> Sequence[ReplicaState]:
        return [READY, LOADING]

    def drain(self, replica: str, grace: float) -> None:
        self.drained.append((replica, grace))


@asynccontextmanager
async def server(engines: ReplicatedEngines, database: str, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = Config(database=database, **settings)
    app_state = AppState(config)
    models = FixedModels([plain_model(id="m"), plain_model(id="twin")])
    app = create_app(config, engines, models, app_state)
    await app_state.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
        try:
            yield http
        finally:
            await app_state.close()


async def test_replicas_are_listed_once_each(database: str) -> None:
    async with server(ReplicatedEngines(), database) as http:
        answer = await http.get("/admin/replicas")
    assert answer.status_code == 200
    assert answer.json() == {
        "object": "list",
        "data": [
            {
                "object": "replica",
                "id": "m-1",
                "model": "m",
                "status": "ready",
                "node": "local",
                "fingerprint": "f00d",
                "reason": None,
            },
            {
                "object": "replica",
                "id": "m-2",
                "model": "m",
                "status": "queued",
                "node": "local",
                "fingerprint": "",
                "reason": "memory is short",
            },
        ],
    }


async def test_replica_is_drained_with_the_grace_of_the_request_or_the_server(database: str) -> None:
    engines = ReplicatedEngines()
    async with server(engines, database, drain_timeout=7.0) as http:
        for body in ({"grace": 2.5}, {}, {"grace": None}):
            answer = await http.post("/admin/replicas/m-1/drain", json=body)
            assert answer.status_code == 200, answer.text
            assert (answer.json()["id"], answer.json()["status"]) == ("m-1", "draining")
    assert engines.drained == [("m-1", 2.5), ("m-1", 7.0), ("m-1", 7.0)]


async def test_unknown_replica_and_invalid_grace_are_refused(database: str) -> None:
    engines = ReplicatedEngines()
    async with server(engines, database) as http:
        answer = await http.post("/admin/replicas/unknown/drain", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "replica_not_found")
        for grace in (-1, "soon", 1e9):
            answer = await http.post("/admin/replicas/m-1/drain", json={"grace": grace})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grace")
    assert engines.drained == []


@pytest.mark.parametrize(("method", "path"), [("GET", "/admin/replicas"), ("POST", "/admin/replicas/m-1/drain")])
async def test_replica_endpoints_require_an_administrator(database: str, method: str, path: str) -> None:
    key, admin = await stored_key(database), await stored_key(database, admin=True)
    async with server(ReplicatedEngines(), database) as http:
        assert (await http.request(method, path, json={})).status_code == 401
        assert (await http.request(method, path, json={}, headers=bearer(key))).status_code == 403
        assert (await http.request(method, path, json={}, headers=bearer(admin))).status_code == 200
