"""How far a model is in being loaded, on the Chat page and on the Models page."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from playwright.async_api import Browser, Locator, Page, expect

from syringa.api.models.served_model import FixedModels, ModelCard, ModelStatus
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.server.listener import listen
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState
from syringa.types import LoadProgress, ModelLoading
from tests.chat_models import plain_model
from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, open_page
from tests.e2e import load_gate
from tests.e2e.load_gate import LoadGate
from tests.e2e.server import Server, serve
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])


class LoadingModels(FixedModels):
    """A model that is loaded as far as the test says."""

    def __init__(self) -> None:
        super().__init__([plain_model(id="large")])
        self.progress: LoadProgress | None = None
        self.status: ModelStatus = "cold"
        self._began = time.monotonic()

    async def all(self) -> list[ModelCard]:
        loading = self.progress and ModelLoading(self.progress, time.monotonic() - self._began)
        return [replace(each, status=self.status, loading=loading) for each in await super().all()]


class Loading:
    """A server whose engine waits until the model is loaded."""

    def __init__(self, url: str, engine: FakeEngine, models: LoadingModels) -> None:
        self.url, self._engine, self._models = url, engine, models

    def reach(self, progress: LoadProgress) -> None:
        self._models.status, self._models.progress = "loading", progress

    def finish(self) -> None:
        self._models.status, self._models.progress = "loaded", None
        self._engine.resume()


@contextlib.asynccontextmanager
async def loading_server(folder: Path) -> AsyncIterator[Loading]:
    config = Config(port=0, drain_timeout=1.0, database=str(folder / "syringa.db"))
    engine, models, listener = FakeEngine("Good morning."), LoadingModels(), listen(config)
    engine.pause()
    task = asyncio.create_task(serve_api(config, SingleEngineProvider(engine), models, listener, AppState(config)))
    try:
        yield Loading(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, models)
    finally:
        task.cancel()


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


def bar(place: Locator, model: str) -> Locator:
    return place.get_by_role("progressbar", name=f"Loading {model}", exact=True)


async def stays_within(page: Page, shown: Locator) -> None:
    """Check that nothing is cut off at the right."""
    box, width = await shown.bounding_box(), (page.viewport_size or {"width": 0})["width"]
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    assert await page.evaluate("document.documentElement.scrollWidth") <= width


@SIZES
async def test_chat_shows_how_far_its_model_is_loaded(browser: Browser, tmp_path: Path, size: tuple[int, int]) -> None:
    async with loading_server(tmp_path) as loading, open_page(browser, loading.url, size=size) as (page, _):
        badge, thread = page.locator(".chat-model .badge"), page.get_by_role("region", name="Conversation")
        await expect(badge).to_have_text("cold")
        await ask(page, "Good night")
        waiting, shown = thread.locator(".model-loading"), bar(thread, "large")
        await expect(waiting).to_contain_text("Loading large")
        await expect(shown).to_be_visible()
        loading.reach(LoadProgress("starting"))
        await expect(waiting).to_contain_text("starting its worker")
        assert await shown.get_attribute("value") is None  # not known
        loading.reach(LoadProgress("weights", 0.42))
        await expect(waiting).to_contain_text("reading weights")
        await expect(waiting).to_contain_text("42%")
        await expect(shown).to_have_attribute("value", "0.42")
        await expect(badge).to_have_text("loading 42%")
        option = page.get_by_role("toolbar").get_by_role("option", name="large (loading 42%)", exact=True)
        await expect(option).to_be_attached()
        await stays_within(page, shown)
        await stays_within(page, badge)
        await check_page(page)
        loading.reach(LoadProgress("weights", 0.87))
        await expect(shown).to_have_attribute("value", "0.87")
        loading.finish()
        await expect(thread.get_by_text("Good morning.", exact=True)).to_be_visible()
        await expect(waiting).to_have_count(0)
        await expect(badge).to_have_text("loaded")


@SIZES
async def test_settings_show_how_far_the_chosen_model_is_loaded(
    browser: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    async with loading_server(tmp_path) as loading, open_page(browser, loading.url, size=size) as (page, _):
        loading.reach(LoadProgress("weights", 0.25))
        settings = page.get_by_role("complementary", name="Settings")
        if size == PHONE:
            await page.get_by_role("toolbar").get_by_role("button", name="Settings", exact=True).click()
            settings = page.get_by_role("dialog", name="Settings")
        await expect(bar(settings, "large")).to_have_attribute("value", "0.25")
        await expect(settings.locator(".model-loading")).to_contain_text("reading weights")
        await stays_within(page, bar(settings, "large"))
        loading.finish()
        await expect(bar(settings, "large")).to_have_count(0)


@SIZES
async def test_models_page_shows_how_far_a_model_is_loaded(
    browser: Browser, tmp_path: Path, size: tuple[int, int]
) -> None:
    async with loading_server(tmp_path) as loading:
        loading.reach(LoadProgress("weights", 0.1))
        async with open_page(browser, loading.url, path="/models", size=size) as (page, _):
            card = page.locator(".model-card")
            await expect(bar(card, "large")).to_have_attribute("value", "0.1")
            await expect(card.get_by_text("loading", exact=True)).to_be_visible()
            await expect(card.locator(".model-loading")).to_contain_text("10%")
            await expect(card.locator(".model-loading .muted")).to_contain_text(" s")
            await stays_within(page, bar(card, "large"))
            await check_page(page)
            loading.reach(LoadProgress("warmup"))
            await expect(card.get_by_role("status").filter(has_text="warming up")).to_be_visible()
            await expect(bar(card, "large")).not_to_have_attribute("value", "0.1")
            loading.finish()
            await expect(card.get_by_text("loaded", exact=True)).to_be_visible()
            await expect(bar(card, "large")).to_have_count(0)


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadGate:
    monkeypatch.setenv(load_gate.VARIABLE, str(tmp_path / "gate"))
    return LoadGate(tmp_path / "gate")


@pytest.fixture
def server(gate: LoadGate) -> Iterator[Server]:
    with serve("--served-model-name", "main", "--max-model-len", "512", module=load_gate.MODULE) as running:
        body = {"path": "default", "max_model_len": 256}
        httpx.put(f"{running.url}/admin/models/spare", json=body, timeout=60).raise_for_status()
        yield running


@pytest.mark.slow
@pytest.mark.model
@SIZES
async def test_message_to_a_cold_model_shows_its_loading_on_both_pages(
    browser: Browser, server: Server, gate: LoadGate, size: tuple[int, int]
) -> None:
    gate.close(10)  # of 31 parts
    async with open_page(browser, server.url, size=size) as (page, _):
        await page.get_by_role("toolbar").get_by_label("Model", exact=True).select_option("spare")
        await ask(page, "Wake up")
        shown = bar(page.get_by_role("region", name="Conversation"), "spare")
        await expect(shown).to_have_attribute("value", "0.32")
        async with open_page(browser, server.url, path="/models", size=size) as (other, _):
            card = other.locator(".model-card", has=other.get_by_text("spare", exact=True))
            await expect(bar(card, "spare")).to_have_attribute("value", "0.32")
            gate.close(20)
            await expect(bar(card, "spare")).to_have_attribute("value", "0.64")
            await expect(shown).to_have_attribute("value", "0.64")
            gate.open()
            await expect(card.get_by_text("loaded", exact=True)).to_be_visible()
            await expect(bar(card, "spare")).to_have_count(0)
        await expect(shown).to_have_count(0)
        await expect(page.get_by_role("article", name="spare", exact=True).locator(".figures")).to_have_count(1)
