"""axe-core on what pages show only sometimes, in both themes: signing in, a lost server, dialogs and filled pages."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from syringa.config import Config
from tests.chat_models import plain_model
from tests.client import server
from tests.console.axe import check_page
from tests.console.browser import choose, open_page
from tests.console.test_operate_pages import FleetEngines, fleet_server
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine
from tests.http.routes.test_admin import bearer, stored_key

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
THEMES = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))


def address(http: httpx.AsyncClient) -> str:
    return str(http.base_url).rstrip("/")


async def check_dialog(page: Page, name: str) -> None:
    """Check the open dialog, then close it."""
    dialog = page.get_by_role("dialog", name=name, exact=True)
    await expect(dialog).to_be_visible()
    await expect(dialog.locator(".loading")).to_have_count(0)
    await check_page(page)
    await page.keyboard.press("Escape")
    await expect(dialog).to_have_count(0)


@THEMES
async def test_sign_in_page_is_accessible(browser: Browser, config: Config, dark: bool) -> None:
    await stored_key(config.database, admin=True)
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), dark=dark) as (page, watched),
    ):
        watched.allow("401")
        key = page.get_by_label("API key", exact=True)
        await expect(key).to_be_visible()
        await check_page(page)
        await key.fill("sk-wrong")
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await expect(key).to_have_attribute("aria-invalid", "true")
        await check_page(page)


@THEMES
async def test_console_without_its_server_is_accessible(browser: Browser, config: Config, dark: bool) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/models", dark=dark) as (page, watched),
    ):
        watched.allow("ERR_INTERNET_DISCONNECTED|ERR_FAILED")
        await expect(page.locator(".model-card")).to_be_visible()
        await page.context.set_offline(True)
        await expect(page.get_by_text("The server is away.", exact=True)).to_be_visible()
        await check_page(page)
        await page.context.set_offline(False)
        await page.route("**/v1/me", lambda route: route.abort())
        await page.reload()
        await expect(page.get_by_role("navigation", name="Pages", exact=True)).to_have_count(0)
        await expect(page.get_by_text("The server is away.", exact=True)).to_be_visible()
        await check_page(page)
        await page.unroute_all(behavior="ignoreErrors")


@THEMES
async def test_fleet_is_accessible(browser: Browser, tmp_path: Path, dark: bool) -> None:
    config = Config(port=0, drain_timeout=1.0, cluster=True, database=str(tmp_path / "syringa.db"))
    async with (
        fleet_server(config, FleetEngines()) as url,
        open_page(browser, url, path="/fleet", dark=dark) as (page, _),
    ):
        await expect(page.get_by_role("table", name="Pools", exact=True)).to_be_visible()
        await check_page(page)
        await page.get_by_role("button", name="Drain node gpu-1", exact=True).click()
        await check_dialog(page, "Drain node gpu-1?")


@THEMES
async def test_dialogs_are_accessible(browser: Browser, config: Config, dark: bool) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model(id="m")) as http,
        open_page(browser, address(http), path="/batches", dark=dark) as (page, _),
    ):
        await page.get_by_role("button", name="Create batch", exact=True).first.click()
        await check_dialog(page, "Create a batch")
        await page.get_by_role("button", name="Create batch", exact=True).first.click()
        await page.get_by_role("tab", name="Upload a file", exact=True).click()
        await check_dialog(page, "Create a batch")
        await page.goto(f"{address(http)}/#/responses")
        await page.get_by_role("button", name="Run in the background", exact=True).first.click()
        await check_dialog(page, "Run in the background")
        await page.goto(f"{address(http)}/#/models")
        await page.get_by_role("button", name="Pull a model", exact=True).first.click()
        await check_dialog(page, "Pull a model")
        await choose(page, page.get_by_role("button", name="More about m", exact=True), "Configuration")
        await check_dialog(page, "Configuration of m")
        await page.goto(f"{address(http)}/#/keys")
        await page.get_by_role("button", name="Create key", exact=True).first.click()
        await page.get_by_text("Models and limits", exact=True).click()
        await check_dialog(page, "Create a key")
        await page.get_by_role("tab", name="Organizations", exact=True).click()
        await page.get_by_role("button", name="Add organization", exact=True).click()
        await check_dialog(page, "Add an organization")


@THEMES
async def test_heat_map_is_accessible(browser: Browser, config: Config, dark: bool) -> None:
    async with (
        server(FakeEngine(" in May"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions", dark=dark) as (page, _),
    ):
        await page.get_by_role("button", name="Complete", exact=True).click()
        tokens = page.get_by_role("group", name="Tokens; arrow keys choose one", exact=True)
        await expect(tokens).to_contain_text("<end>")
        for level in range(6):  # those of a real model
            await (
                tokens.locator(".heat")
                .nth(level)
                .evaluate("(each, level) => each.className = `heat heat-${level}`", level)
            )
        await check_page(page)
        await tokens.press("ArrowRight")
        await tokens.press("ArrowRight")
        await expect(page.locator(".heat-detail").get_by_role("listitem").first).to_be_visible()
        await check_page(page)


@THEMES
async def test_similarity_matrix_is_accessible(browser: Browser, config: Config, dark: bool) -> None:
    async with (
        server(FakeEngine(), config, model=embedding_model()) as http,
        open_page(browser, address(http), path="/embeddings", dark=dark) as (page, _),
    ):
        await page.get_by_label("Texts, one on each line", exact=True).fill("ab\nba\nzzzz\nab")
        await page.get_by_role("button", name="Compare", exact=True).click()
        await expect(page.locator(".matrix tbody td")).to_have_count(16)
        await page.get_by_text("Vectors", exact=True).click()
        await check_page(page)


@THEMES
async def test_keys_and_organizations_are_accessible(browser: Browser, config: Config, dark: bool) -> None:
    admin = await stored_key(config.database, admin=True, name="root")
    async with (
        server(FakeEngine("x"), config, model=plain_model(id="m")) as http,
        open_page(browser, address(http), path="/keys", dark=dark, key=admin) as (page, _),
    ):
        limits = {"requests_per_minute": 60, "tokens_per_minute": 5000, "concurrent": 4}
        for name in ("web", "old"):
            body = {"organization": "acme", "name": name, "models": ["m"], "expires_at": 4_000_000_000, **limits}
            created = await http.post("/admin/keys", json=body, headers=bearer(admin))
            assert created.status_code == 200, created.text
        assert (await http.delete(f"/admin/keys/{created.json()['id']}", headers=bearer(admin))).status_code == 200
        await page.reload()
        await page.get_by_role("switch", name="Show revoked keys", exact=True).press("Space")
        await expect(page.get_by_text("revoked", exact=True)).to_be_visible()
        await check_page(page)
        await page.get_by_role("button", name="Revoke web", exact=True).click()
        await check_dialog(page, "Revoke web?")
        await page.get_by_role("tab", name="Organizations", exact=True).click()
        await expect(page.get_by_role("button", name="Limits of acme", exact=True)).to_be_visible()
        await check_page(page)
