"""Administration of keys and organizations, and usage reports, over HTTP."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.config import Config, Prices
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from syringa.service.auth.keys import create_api_key
from syringa.store import Store
from tests.chat_models import plain_model
from tests.client import until
from tests.fake_engine import FakeEngine
from tests.store.helpers import read, write

COMPLETION = {"prompt": "hi"}


class Client(httpx.AsyncClient):
    app_state: AppState

    async def until(self, status: int, key: str) -> None:
        """Wait until requests with the key get this status: changes take effect within a second."""

        async def answers() -> bool:
            return (await self.get("/v1/models", headers=bearer(key))).status_code == status

        await until(answers)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def stored_key(database: str, organization: str = "ops", **kwargs: Any) -> str:
    key, stored = create_api_key(organization, **kwargs)
    async with Store(database) as store:
        assert await write(store).keys.create(stored)
    return key


@asynccontextmanager
async def server(database: str, **settings: Any) -> AsyncIterator[Client]:
    """Run a started server without sockets."""
    config = Config(database=database, **settings)
    prices = Prices(input=1.0, cached_input=0.5, output=2.0)
    app_state = AppState(config, prices=lambda model: prices)
    models = FixedModels([plain_model(id="m"), plain_model(id="other")])
    app = create_app(config, SingleEngineProvider(FakeEngine("hello")), models, app_state)
    await app_state.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with Client(transport=transport, base_url="http://localhost:8000") as http:
        http.app_state = app_state
        try:
            yield http
        finally:
            await app_state.close()


async def test_key_lifecycle(database: str) -> None:
    admin = await stored_key(database, admin=True)
    async with server(database) as http:
        assert (await http.get("/v1/models")).status_code == 401
        body = {"organization": "acme", "name": "web", "models": ["m"], "requests_per_minute": 1}
        answer = await http.post("/admin/keys", json=body, headers=bearer(admin))
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        new = answer.json()
        key = new.pop("key")
        assert key.startswith(new["hint"])
        await http.until(200, key)
        assert [each["id"] for each in (await http.get("/v1/models", headers=bearer(key))).json()["data"]] == ["m"]
        for model, status in {"m": 200, "other": 403}.items():
            answer = await http.post("/v1/completions", json=COMPLETION | {"model": model}, headers=bearer(key))
            assert answer.status_code == (
                429 if model == "other" else status
            )  # the first request has used up the minute
        listed = (await http.get("/admin/keys?organization=acme", headers=bearer(admin))).json()["data"]
        assert [each["id"] for each in listed] == [new["id"]]
        assert key not in str(listed)
        revoked = await http.delete(f"/admin/keys/{new['id']}", headers=bearer(admin))
        assert revoked.json()["revoked_at"] is not None
        await http.until(401, key)
        assert (await http.get("/admin/keys?organization=acme", headers=bearer(admin))).json()["data"] == []
        kept = await http.get("/admin/keys?organization=acme&revoked=true", headers=bearer(admin))
        assert len(kept.json()["data"]) == 1


async def test_key_is_restricted_to_its_models(database: str) -> None:
    key = await stored_key(database, models=["m"])
    async with server(database) as http:
        answer = await http.post("/v1/completions", json=COMPLETION | {"model": "other"}, headers=bearer(key))
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")


@pytest.mark.parametrize("path", ["/admin/keys", "/admin/organizations", "/admin/usage"])
async def test_admin_endpoints_require_an_administrator(database: str, path: str) -> None:
    key = await stored_key(database)
    async with server(database) as http:
        assert (await http.get(path, headers=bearer(key))).status_code == 403
        assert (await http.post("/admin/keys", json={"organization": "x"}, headers=bearer(key))).status_code == 403


async def test_organization_limits_take_effect(database: str) -> None:
    admin, key = await stored_key(database, admin=True), await stored_key(database, "acme")
    async with server(database) as http:
        answer = await http.put("/admin/organizations/acme", json={"requests_per_minute": 0}, headers=bearer(admin))
        assert answer.json()["requests_per_minute"] == 0

        async def unlimited() -> bool:
            answer = await http.post("/tokenize", json={"prompt": "x"}, headers=bearer(key))
            return "x-ratelimit-limit-requests" not in answer.headers

        await until(unlimited)
        body = {"requests_per_minute": "default", "concurrent": 3}
        await http.put("/admin/organizations/acme", json=body, headers=bearer(admin))
        shown = (await http.get("/admin/organizations/acme", headers=bearer(admin))).json()
        assert (shown["requests_per_minute"], shown["concurrent"]) == (None, 3)
        assert (await http.get("/admin/organizations/nobody", headers=bearer(admin))).status_code == 404


async def test_usage_is_reported_by_group_and_organization(database: str) -> None:
    admin, key = await stored_key(database, admin=True), await stored_key(database, "acme")
    async with server(database) as http:
        for model in ("m", "m", "other"):
            answer = await http.post("/v1/completions", json=COMPLETION | {"model": model}, headers=bearer(key))
            assert answer.status_code == 200
        await http.post("/v1/completions", json={"prompt": 1}, headers=bearer(key))
        await http.post("/v1/completions", json=COMPLETION, headers=bearer(admin))
        await http.app_state.usage_writer.flush()
        rows = (await http.get("/admin/usage?by=organization,model", headers=bearer(admin))).json()["data"]
        counts = {(row["organization"], row["model"]): (row["requests"], row["refused"]) for row in rows}
        assert counts == {("acme", ""): (1, 1), ("acme", "m"): (2, 0), ("acme", "other"): (1, 0), ("ops", "m"): (1, 0)}
        (row,) = (row for row in rows if (row["organization"], row["model"]) == ("acme", "m"))
        assert (row["input_tokens"], row["cached_tokens"], row["output_tokens"]) == (4, 2, 12)
        assert row["cost"] == pytest.approx((2 * 1.0 + 2 * 0.5 + 12 * 2.0) / 1e6)
        own = (await http.get("/v1/usage?by=organization", headers=bearer(key))).json()["data"]
        assert (await http.get("/v1/usage?organization=ops", headers=bearer(key))).status_code == 400
        assert [(row["organization"], row["requests"]) for row in own] == [("acme", 4)]
        table = await http.get("/admin/usage?by=model&since=1d&format=csv", headers=bearer(admin))
        assert table.headers["content-type"].startswith("text/csv")
        read = list(csv.DictReader(io.StringIO(table.text)))
        assert [(row["model"], row["requests"]) for row in read] == [("", "1"), ("m", "3"), ("other", "1")]
        later = (await http.get("/admin/usage?since=2999-01-01", headers=bearer(admin))).json()
        assert later["data"] == []


async def test_usage_by_key_names_the_keys_of_the_callers_organization(file: str) -> None:
    admin, web = await stored_key(file, admin=True, name="root"), await stored_key(file, "acme", name="web")
    unnamed = await stored_key(file, "acme")
    async with server(file) as http:
        for key in (admin, web, unnamed):
            assert (await http.post("/v1/completions", json=COMPLETION, headers=bearer(key))).status_code == 200
        await http.app_state.usage_writer.flush()

        async def names(path: str, key: str) -> set[str]:
            rows = (await http.get(path, headers=bearer(key))).json()["data"]
            assert all(row["key"] for row in rows)
            return {row["key_name"] for row in rows}

        (hint,) = {name for name in await names("/v1/usage?by=key", web) if unnamed.startswith(name)}
        assert await names("/v1/usage?by=key", web) == {"web", hint}
        assert await names("/admin/usage?by=key", admin) == {"root", "web", hint}
        assert await names("/admin/usage?by=key&organization=ops", admin) == {"root"}
        table = (await http.get("/v1/usage?by=day,key,model&format=csv", headers=bearer(unnamed))).text
        assert table.startswith("day,key,key_name,model,requests,")
        assert {row["key_name"] for row in csv.DictReader(io.StringIO(table))} == {"web", hint}
        (row,) = (await http.get("/admin/usage?by=model", headers=bearer(admin))).json()["data"]
        assert (row["key"], row["key_name"]) == (None, None)


async def test_usage_is_written_at_shutdown(database: str) -> None:
    async with server(database) as http:
        await http.post("/v1/completions", json=COMPLETION)
    async with Store(database) as store:
        (row,) = await read(store).usage.records()
    assert (row.model, row.outcome, row.output_tokens, row.key) == ("m", "ok", 6, "")


@pytest.mark.parametrize(
    ("query", "param"),
    [("by=hour", "by"), ("since=soon", "since"), ("until=9999999999999999d", "until"), ("format=xml", "format")],
)
async def test_usage_rejects_invalid_parameters(file: str, query: str, param: str) -> None:
    async with server(file) as http:
        answer = await http.get(f"/admin/usage?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"organization": "a b"},
        {"organization": "x" * 65},
        {"organization": "a", "expires_at": 1},
        {"organization": "a", "name": "a\nb"},
        {"organization": "a", "models": [""]},
        {"organization": "a", "concurrent": -1},
    ],
)
async def test_invalid_key_requests_are_rejected(file: str, body: dict[str, Any]) -> None:
    async with server(file) as http:
        assert (await http.post("/admin/keys", json=body)).status_code == 400
        assert (await http.get("/admin/keys")).json()["data"] == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "[::1]:8000"}, 200),
        ({"host": "rebound.example:8000"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:8000", "sec-fetch-site": "same-origin"}, 200),
        ({"sec-fetch-site": "cross-site"}, 403),
    ],
)
async def test_open_server_is_administered_from_its_own_machine_only(
    file: str, headers: dict[str, str], status: int
) -> None:
    async with server(file) as http:
        assert (await http.get("/admin/keys", headers=headers)).status_code == status


async def test_first_key_makes_keys_required(file: str) -> None:
    async with server(file) as http:
        assert (await http.get("/v1/models")).status_code == 200
        admin = (await http.post("/admin/keys", json={"organization": "ops", "admin": True})).json()["key"]
        await http.until(401, "")
        assert (await http.get("/v1/models", headers=bearer(admin))).status_code == 200


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")
