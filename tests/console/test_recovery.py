"""Pages that are first opened while the server is stopped: nothing of them has been fetched."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, Route, expect

from tests.chat_models import plain_model
from tests.client import server
from tests.console.browser import open_page
from tests.console.fake_server import fake_server
from tests.fake_engine import FakeEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
# Pages, and what they show.
PAGES = {
    "Chat": "What would you like to know?",
    "Models": "fake",
    "Status": "What the public sees",
    "Usage": "Nothing was used in this time",
}
STYLED = {"Chat", "Models"}  # those with a style sheet of their own
HAS_STYLES = "(name) => [...document.styleSheets].some((each) => each.href?.endsWith(`/${name}.css`))"


async def open_link(page: Page, name: str) -> None:
    await page.get_by_role("navigation", name="Pages").get_by_role("link", name=name, exact=True).click()
    await expect(page).to_have_title(f"{name} · Syringa")


async def check_shown(page: Page, name: str) -> None:
    await expect(page.get_by_role("main").get_by_text(PAGES[name], exact=True).first).to_be_visible()
    await expect(page.get_by_role("alert")).to_have_count(0)
    assert name not in STYLED or await page.evaluate(HAS_STYLES, name.lower())


async def test_pages_first_opened_without_a_server_are_there_when_it_is_back(browser: Browser, tmp_path: Path) -> None:
    with fake_server(tmp_path) as stoppable:
        async with open_page(browser, stoppable.url, path="/keys") as (page, watched):
            watched.allow("ERR_CONNECTION|ERR_EMPTY_RESPONSE|ERR_SOCKET")
            await expect(page.get_by_role("heading", name="No keys yet")).to_be_visible()
            stoppable.kill()
            for name in reversed(PAGES):
                await open_link(page, name)
                await expect(page.get_by_text("The server is away.")).to_be_visible()
            await asyncio.to_thread(stoppable.start)
            await check_shown(page, "Chat")  # by itself
            for name in PAGES:
                await open_link(page, name)
                await check_shown(page, name)


async def test_page_whose_files_fail_is_fetched_again_by_the_user(browser: Browser) -> None:
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, str(http.base_url).rstrip("/"), path="/completions") as (page, watched),
    ):
        watched.allow("500")

        async def fail(route: Route) -> None:
            await route.fulfill(status=500)

        await expect(page.get_by_role("button", name="Complete", exact=True)).to_be_visible()
        await page.route("**/models.css", fail)
        await open_link(page, "Models")
        await expect(page.get_by_role("alert")).to_contain_text("models.css could not be fetched")
        await page.unroute("**/models.css")
        await page.get_by_role("button", name="Try again", exact=True).click()
        await check_shown(page, "Models")
