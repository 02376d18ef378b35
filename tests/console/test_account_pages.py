"""Keys, organizations and usage in a browser."""

from __future__ import annotations

import csv
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from syringa.config import Config
from tests.chat_models import plain_model
from tests.client import server, until
from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, open_page, pass_time, read_download, stay_within_a_day
from tests.fake_engine import FakeEngine
from tests.http.routes.test_admin import bearer, stored_key

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
CHOOSE = """
(all, value) => {
  for (const each of all) {
    each.value = value;
    each.dispatchEvent(new Event('change', { bubbles: true }));
  }
}
"""
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))


def address(http: httpx.AsyncClient) -> str:
    return str(http.base_url).rstrip("/")


async def create_key(page: Page, name: str, organization: str = "") -> str:
    """Create a key in the open page, and return it. The dialog that shows it stays open."""
    await page.get_by_role("button", name="Create key").first.click()
    dialog = page.get_by_role("dialog", name="Create a key")
    if organization:
        await dialog.get_by_label("Organization", exact=True).fill(organization)
    await dialog.get_by_label("Name", exact=True).fill(name)
    await dialog.get_by_role("button", name="Create", exact=True).click()
    shown = page.get_by_role("dialog", name="Copy the key now").get_by_role("textbox")
    return await shown.input_value()


@SIZES
async def test_first_key_signs_the_console_in(browser: Browser, config: Config, size: tuple[int, int]) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/keys", size=size) as (page, _),
    ):
        await expect(page.get_by_text("This server has no keys")).to_be_visible()
        await expect(page.get_by_role("heading", name="No keys yet")).to_be_visible()
        await check_page(page)
        key = await create_key(page, "laptop", "acme")
        await check_page(page)
        await page.get_by_role("button", name="Done", exact=True).click()
        await expect(page.get_by_role("button", name="Revoke laptop", exact=True)).to_be_attached()
        await expect(page.get_by_text("This server has no keys")).to_have_count(0)
        assert (await http.get("/admin/keys", headers=bearer(key))).status_code == 200
        assert (await http.get("/admin/keys")).status_code == 401
        await page.reload()
        await expect(page.get_by_role("button", name="Revoke laptop", exact=True)).to_be_attached()


async def test_first_key_without_admin_rights_is_shown_before_the_page_goes(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/keys") as (page, watched),
    ):
        await page.clock.install()
        await page.reload()
        await page.get_by_role("button", name="Create key").first.click()
        dialog = page.get_by_role("dialog", name="Create a key")
        await dialog.get_by_label("Organization", exact=True).fill("acme")
        await dialog.get_by_role("switch", name="Administrator", exact=True).press("Space")
        await expect(dialog.get_by_text("Without an administrator's key")).to_be_visible()
        await dialog.get_by_role("button", name="Create", exact=True).click()
        key = await page.get_by_role("dialog", name="Copy the key now").get_by_role("textbox").input_value()
        await page.clock.fast_forward(60_000)
        watched.allow("40[13]")  # the lists behind the dialog are read again while the page goes
        await page.get_by_role("button", name="Sign in with it").click()
        await expect(page.get_by_role("heading", name="There is no page /keys")).to_be_visible()
        await expect(page.locator(".organization")).to_have_text("acme")
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 200


@SIZES
async def test_key_is_created_with_limits_and_revoked(browser: Browser, config: Config, size: tuple[int, int]) -> None:
    admin = await stored_key(config.database, admin=True, name="root")
    async with (
        server(FakeEngine("x"), config, model=plain_model(id="m")) as http,
        open_page(browser, address(http), path="/keys", size=size, key=admin) as (page, watched),
    ):
        watched.allow("400")
        await page.get_by_role("button", name="Create key").first.click()
        dialog = page.get_by_role("dialog", name="Create a key")
        await dialog.get_by_label("Organization", exact=True).fill("bad name!")
        await dialog.get_by_label("Name", exact=True).fill("website")
        await dialog.get_by_label("Expires", exact=True).select_option("30")
        await dialog.get_by_text("Models and limits", exact=True).click()
        await dialog.get_by_role("switch", name="m", exact=True).press("Space")
        await dialog.get_by_label("Requests per minute", exact=True).fill("60")
        await check_page(page)
        await dialog.get_by_role("button", name="Create", exact=True).click()
        await expect(dialog.get_by_role("alert")).to_contain_text("organization")
        await dialog.get_by_label("Organization", exact=True).fill("acme")
        await dialog.get_by_role("button", name="Create", exact=True).click()
        key = await page.get_by_role("dialog", name="Copy the key now").get_by_role("textbox").input_value()
        await page.get_by_role("button", name="Done", exact=True).click()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        (entry,) = [
            each for each in (await http.get("/admin/keys", headers=bearer(admin))).json()["data"] if not each["admin"]
        ]
        assert (entry["organization"], entry["name"], entry["models"]) == ("acme", "website", ["m"])
        assert (entry["requests_per_minute"], entry["expires_at"] is not None) == (60, True)
        assert key not in await page.content()
        answer = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(key))
        assert answer.status_code == 200
        await check_page(page)
        await page.get_by_label("Organization", exact=True).select_option("acme")
        await expect(page.locator("tbody tr")).to_have_count(1)
        await page.get_by_role("button", name="Revoke website", exact=True).click()
        await page.get_by_role("dialog").get_by_role("button", name="Revoke", exact=True).click()
        await expect(page.get_by_role("button", name="Revoke website", exact=True)).to_have_count(0)
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 401
        await page.get_by_role("switch", name="Show revoked keys", exact=True).press("Space")
        await expect(page.get_by_text("revoked", exact=True)).to_be_attached()


async def test_keys_that_others_create_are_shown(browser: Browser, config: Config) -> None:
    admin = await stored_key(config.database, admin=True, name="root")
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/usage", key=admin) as (page, _),
    ):
        await page.clock.install()
        await page.goto(f"{address(http)}/#/keys")
        await expect(page.get_by_role("button", name="Revoke root", exact=True)).to_be_visible()
        created = await http.post("/admin/keys", json={"organization": "lilac", "name": "new"}, headers=bearer(admin))
        assert created.status_code == 200, created.text
        await pass_time(page, page.get_by_role("button", name="Revoke new", exact=True))
        await page.get_by_role("tab", name="Organizations", exact=True).click()
        await pass_time(page, page.get_by_role("button", name="Limits of lilac", exact=True))


async def test_revoked_key_signs_the_console_out(browser: Browser, config: Config) -> None:
    admin, key = await stored_key(config.database, admin=True), await stored_key(config.database, "acme", name="app")
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/usage", key=key) as (page, watched),
    ):
        watched.allow("401")
        await expect(page.get_by_role("heading", name="Nothing was used in this time")).to_be_visible()
        for entry in (await http.get("/admin/keys", headers=bearer(admin))).json()["data"]:
            if entry["name"] == "app":
                await http.delete(f"/admin/keys/{entry['id']}", headers=bearer(admin))
        # The next request of the page is refused. A poll may have been it already, so this does not wait for the field.
        await page.get_by_label("Time", exact=True).evaluate_all(CHOOSE, "7")
        await expect(page.get_by_label("API key", exact=True)).to_be_visible()


@SIZES
async def test_usage_is_shown_by_group_and_downloaded(browser: Browser, config: Config, size: tuple[int, int]) -> None:
    await stay_within_a_day()
    admin = await stored_key(config.database, admin=True)
    acme, lilac = await stored_key(config.database, "acme", name="web"), await stored_key(config.database, "lilac")
    async with (
        server(FakeEngine("Hello."), config, model=plain_model(id="m")) as http,
        open_page(browser, address(http), path="/usage", size=size, key=admin) as (page, _),
    ):
        for key in (acme, acme, lilac):
            assert (await http.post("/v1/chat/completions", json=CHAT, headers=bearer(key))).status_code == 200

        async def is_written() -> bool:
            rows = (await http.get("/admin/usage?by=model", headers=bearer(admin))).json()["data"]
            return sum(row["requests"] for row in rows) == 3

        await until(is_written)
        await page.reload()
        await page.get_by_label("Group by", exact=True).select_option("organization")
        table = page.get_by_role("table", name="Usage by organization", exact=True)
        await expect(table.get_by_role("row")).to_have_count(3)
        await expect(table.get_by_role("row").nth(1)).to_contain_text("acme")
        await expect(table.get_by_role("row").nth(1).get_by_role("cell").nth(1)).to_have_text("2")
        await page.get_by_label("Show", exact=True).select_option("output")
        await expect(page.get_by_role("heading", name="Output tokens by day and organization")).to_be_visible()
        await expect(page.locator("figure.chart figcaption")).to_contain_text("acme: last 8")
        await check_page(page)
        async with page.expect_download() as download:
            await page.get_by_role("button", name="Download CSV").click()
        rows = list(csv.DictReader(await read_download(await download.value)))
        assert [(row["organization"], row["requests"], row["output_tokens"]) for row in rows] == [
            ("acme", "2", "8"),
            ("lilac", "1", "4"),
        ]
        await page.get_by_label("Group by", exact=True).select_option("key")
        await expect(page.get_by_role("cell", name="web (acme)", exact=True)).to_be_attached()
        await page.get_by_text("Figures by day", exact=True).click()
        figures = page.get_by_role("table", name="Output tokens by day and key, in figures")
        await expect(figures.get_by_role("row").nth(0)).to_contain_text("web (acme)")
        await expect(figures.get_by_role("row")).to_have_count(2)  # days without usage are left out
        today = datetime.now(UTC)
        await expect(figures.get_by_role("row").nth(1)).to_contain_text(f"{today:%b} {today.day}, {today.year}")
        await expect(figures.get_by_role("row").nth(1).get_by_role("cell").nth(1)).to_have_text("8")
        await check_page(page)
        async with page.expect_download() as download:
            await page.get_by_role("button", name="Download CSV").click()
        rows = list(csv.DictReader(await read_download(await download.value)))
        assert {(row["key_name"], row["organization"]) for row in rows} >= {("web", "acme")}
        await page.get_by_label("Organization", exact=True).select_option("lilac")
        await expect(page.get_by_role("table", name="Usage by key").get_by_role("row")).to_have_count(2)


async def test_key_without_admin_rights_sees_its_own_organization_only(browser: Browser, config: Config) -> None:
    acme, lilac = await stored_key(config.database, "acme", name="web"), await stored_key(config.database, "lilac")
    async with server(FakeEngine("Hello."), config, model=plain_model(id="m")) as http:
        for key, text in ((acme, "Of acme"), (lilac, "Of lilac")):
            answer = await http.post("/v1/responses", json={"input": text}, headers=bearer(key))
            assert answer.status_code == 200

        async def is_written() -> bool:
            rows = (await http.get("/v1/usage?by=model", headers=bearer(acme))).json()["data"]
            return sum(row["requests"] for row in rows) == 1

        await until(is_written)
        async with open_page(browser, address(http), path="/usage", key=acme) as (page, _):
            await expect(page.get_by_text("What your organization has used.")).to_be_visible()
            table = page.get_by_role("table", name="Usage by model")
            await expect(table.get_by_role("row").nth(1).get_by_role("cell").nth(1)).to_have_text("1")
            await expect(page.get_by_label("Organization")).to_have_count(0)
            await page.get_by_label("Group by", exact=True).select_option("key")
            await expect(page.get_by_role("cell", name="web", exact=True)).to_be_attached()
            pages = page.get_by_role("navigation", name="Pages")
            for link in ("Keys", "Fleet"):
                await expect(page.get_by_role("link", name=link, exact=True)).to_have_count(0)
            await pages.get_by_role("link", name="Responses", exact=True).click()
            await expect(page.locator(".tree-row")).to_have_count(1)
            await expect(page.locator(".tree-row")).to_contain_text("Of acme")
            await pages.get_by_role("link", name="Models", exact=True).click()
            await expect(page.locator(".model-card")).to_have_count(1)
            await expect(page.get_by_role("button", name="Pull a model")).to_have_count(0)
            await expect(page.get_by_role("button", name="Unload")).to_have_count(0)
            await pages.get_by_role("link", name="Status", exact=True).click()
            await expect(page.get_by_role("heading", name="What the public sees")).to_be_visible()
            await expect(page.get_by_role("tab", name="7 days")).to_have_count(0)
            await page.goto(f"{address(http)}/#/keys")
            await expect(page.get_by_role("heading", name="There is no page /keys")).to_be_visible()
