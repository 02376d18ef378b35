"""Administration of models at run time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.fields.defaults import read_defaults
from syringa.api.models.registry import ModelRegistry
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from syringa.service.model_catalog import ModelCatalog
from syringa.store import Store
from tests.client import until
from tests.fake_engine import FakeEngine
from tests.store.helpers import read

pytestmark = pytest.mark.model

SPEC = {"path": "default", "prices": {"input": 1.0, "output": 2.0}, "defaults": {"temperature": 0.25, "max_tokens": 3}}


class Client(httpx.AsyncClient):
    engine: FakeEngine
    app_state: AppState


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


@asynccontextmanager
async def process(file: str) -> AsyncIterator[Client]:
    config = Config(database=file)
    models = ModelRegistry(config)
    await models.start()
    store = Store(file)
    catalog = ModelCatalog(store, config, models.set_added, read_defaults)
    app_state = AppState(config, store=store, catalog=catalog, prices=models.prices)
    engine = FakeEngine("hello")
    app = create_app(config, SingleEngineProvider(engine), models, app_state)
    await app_state.start()
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with Client(transport=transport, base_url="http://127.0.0.1:8000") as http:
        http.engine, http.app_state = engine, app_state
        try:
            yield http
        finally:
            await app_state.close()


async def ids(http: Client) -> list[str]:
    return [each["id"] for each in (await http.get("/v1/models")).json()["data"]]


async def test_model_lifecycle(file: str) -> None:
    async with process(file) as http, process(file) as other:
        (default,) = await ids(http)
        answer = await http.put("/admin/models/team/second", json=SPEC | {"aliases": ["two"]})
        assert answer.status_code == 200, answer.text
        assert (answer.json()["id"], answer.json()["prices"]["output"]) == ("team/second", 2.0)
        assert await ids(http) == [default, "team/second"]

        async def known() -> bool:
            return await ids(other) == [default, "team/second"]

        await until(known)
        shown = (await other.get("/v1/models/two")).json()
        assert (shown["id"], shown["prices"]["input"]) == ("team/second", 1.0)
        answer = await other.post("/v1/completions", json={"model": "two", "prompt": "hi"})
        assert answer.json()["model"] == "team/second"
        (request,) = other.engine.requests
        assert (request.sampling.temperature, request.stopping.max_tokens) == (0.25, 3)
        assert (await http.put("/admin/models/team/second", json={"path": "default"})).status_code == 200
        await http.post("/v1/completions", json={"model": "team/second", "prompt": "hi"})
        assert http.engine.requests[0].sampling.temperature == 1.0  # the whole configuration was replaced
        assert (await http.delete("/admin/models/team/second")).json()["deleted"] is True
        assert await ids(http) == [default]
        assert (await http.post("/v1/completions", json={"model": "two", "prompt": "hi"})).status_code == 404
        await other.app_state.usage_writer.flush()
        (row,) = await read(other.app_state.store).usage.records()
        assert row.cost == pytest.approx((row.input_tokens * 1.0 + row.output_tokens * 2.0) / 1e6)


async def test_added_model_survives_a_restart(file: str) -> None:
    async with process(file) as http:
        await http.put("/admin/models/second", json=SPEC)
    async with process(file) as http:
        assert "second" in await ids(http)
        listed = (await http.get("/admin/models")).json()["data"]
        assert [each["path"] for each in listed] == ["default", "default"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "path"),
        ({"path": "/nowhere"}, "path"),
        (SPEC | {"dtype": "int9"}, "dtype"),
        (SPEC | {"tempo": 1}, "tempo"),
        (SPEC | {"defaults": {"temperature": 9}}, "defaults.temperature"),
        (SPEC | {"prices": {"input": -1}}, "prices.input"),
        (SPEC | {"aliases": ["SmolLM2-135M-Instruct"]}, "aliases[0]"),
        (SPEC | {"id": "third"}, "id"),
        (SPEC | {"chat_template": "/nowhere"}, "chat_template"),
    ],
)
async def test_invalid_model_configuration_is_rejected(file: str, body: dict[str, Any], param: str) -> None:
    async with process(file) as http:
        answer = await http.put("/admin/models/second", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert len(await ids(http)) == 1


async def test_configured_models_cannot_be_changed(file: str) -> None:
    async with process(file) as http:
        (default,) = await ids(http)
        assert (await http.put(f"/admin/models/{default}", json=SPEC)).status_code == 400
        assert (await http.delete(f"/admin/models/{default}")).status_code == 400
        assert (await http.delete("/admin/models/nobody")).status_code == 404
        assert (await http.get("/admin/models/nobody")).status_code == 404
        assert await ids(http) == [default]
