"""`/v1/me`: the caller with a stored key, with a key of the settings, and without keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from syringa.service.auth.keys import RateLimits, create_api_key
from syringa.version import installed_version
from tests.client import client
from tests.fake_engine import FakeEngine, fake_model


@asynccontextmanager
async def service(config: Config) -> AsyncIterator[tuple[httpx.AsyncClient, AppState]]:
    app_state = AppState(config)
    await app_state.start()
    app = create_app(config, SingleEngineProvider(FakeEngine()), FixedModels([fake_model()]), app_state)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http, app_state
    finally:
        await app_state.close()


async def add_key(app_state: AppState, organization: str, **about: Any) -> tuple[dict[str, str], str]:
    key, stored = create_api_key(organization, **about)
    await app_state.store.write(lambda session: session.keys.create(stored))
    await app_state.refresh_keys()
    return {"authorization": f"Bearer {key}"}, stored.id


async def test_caller_without_keys_may_administer_from_this_machine() -> None:
    async with client() as http:
        answer = await http.get("/v1/me")
        assert answer.headers["cache-control"] == "no-store"
        none = {"requests_per_minute": 0, "tokens_per_minute": 0, "concurrent": 0}
        assert answer.json() == {
            "object": "caller",
            "keys_required": False,
            "organization": None,
            "key": None,
            "scopes": ["inference", "admin"],
            "models": None,
            "limits": {"organization": none, "key": none},
            "server": {"version": installed_version(), "cluster": False, "default_model": "fake"},
        }


@pytest.mark.parametrize(
    "headers", [{"host": "10.0.0.9:8000"}, {"origin": "http://10.0.0.9"}, {"sec-fetch-site": "cross-site"}]
)
async def test_caller_without_keys_may_not_administer_from_elsewhere(headers: dict[str, str]) -> None:
    config = Config(allowed_hosts=("10.0.0.9",), cors_origins=("http://10.0.0.9",))
    async with client(config=config) as http:
        assert (await http.get("/v1/me", headers=headers)).json()["scopes"] == ["inference"]
        assert (await http.get("/admin/keys", headers=headers)).status_code == 403


async def test_stored_key_is_described_without_its_secret(tmp_path: Path) -> None:
    config = Config(database=str(tmp_path / "db"), requests_per_minute=77)
    async with service(config) as (http, app_state):
        limits = RateLimits(tokens_per_minute=9)
        header, id = await add_key(app_state, "acme", name="site", models=["b", "a"], rates=limits)
        answer = await http.get("/v1/me", headers=header)
        found = answer.json()
        assert header["authorization"].removeprefix("Bearer ") not in answer.text
        assert found["key"].pop("created_at") > 0
        assert found["key"] == {"id": id, "name": "site", "hint": header["authorization"][7:18], "expires_at": None}
        assert (found["keys_required"], found["organization"], found["models"]) == (True, "acme", ["a", "b"])
        assert found["scopes"] == ["inference"]
        assert found["limits"]["organization"]["requests_per_minute"] == 77
        assert found["limits"]["key"] == {"requests_per_minute": 0, "tokens_per_minute": 9, "concurrent": 0}


async def test_administrators_key_has_the_scope_from_anywhere(tmp_path: Path) -> None:
    async with service(Config(database=str(tmp_path / "db"))) as (http, app_state):
        header, _ = await add_key(app_state, "acme", admin=True)
        found = await http.get("/v1/me", headers=header | {"host": "api.example"})
        assert found.json()["scopes"] == ["inference", "admin"]


async def test_key_is_required_once_there_was_one(tmp_path: Path) -> None:
    async with service(Config(database=str(tmp_path / "db"))) as (http, app_state):
        header, id = await add_key(app_state, "acme")
        assert (await http.get("/v1/me")).status_code == 401
        await app_state.store.write(lambda session: session.keys.revoke(id))
        await app_state.refresh_keys()
        assert (await http.get("/v1/me", headers=header)).status_code == 401


async def test_key_of_the_settings_is_known_by_its_id_only(tmp_path: Path) -> None:
    async with client(config=Config(api_key=("secret",), database=str(tmp_path / "db"))) as http:
        found = (await http.get("/v1/me", headers={"authorization": "Bearer secret"})).json()
        assert found["key"].pop("id").startswith("config-")
        assert found["key"] == {"name": None, "hint": None, "created_at": None, "expires_at": None}
        assert found["scopes"] == ["inference"]
        assert len(found["organization"]) == 16
    assert not (tmp_path / "db").exists()  # asking who one is creates no database
