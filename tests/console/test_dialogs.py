"""Dialogs: what closes them, what does not, and messages that appear while one is open."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Locator, Page, expect

from syringa.config import Config
from tests.chat_models import plain_model
from tests.client import server
from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, choose, open_page
from tests.console.test_account_pages import create_key
from tests.fake_engine import FakeEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

WITHOUT_COPYING = """
Object.defineProperty(navigator, 'clipboard', { value: undefined });
document.execCommand = () => false;
"""


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))


def address(http: httpx.AsyncClient) -> str:
    return str(http.base_url).rstrip("/")


async def try_to_leave(page: Page) -> None:
    """Press Esc, which browsers let a page ignore once only, and click beside the dialog."""
    for _ in range(3):
        await page.keyboard.press("Escape")
    await page.mouse.click(5, 5)


async def fill_prompts(page: Page) -> Locator:
    await page.get_by_role("button", name="Create batch", exact=True).first.click()
    dialog = page.get_by_role("dialog", name="Create a batch", exact=True)
    await dialog.get_by_role("textbox", name="Prompts, one on each line", exact=True).fill("First\nSecond")
    return dialog


async def test_dismissed_file_picker_leaves_the_dialog_and_what_was_typed(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/batches") as (page, _),
    ):
        dialog = await fill_prompts(page)
        await dialog.get_by_role("tab", name="Upload a file", exact=True).click()
        await dialog.get_by_label("File of requests", exact=True).dispatch_event("cancel")
        await dialog.get_by_role("tab", name="Write prompts", exact=True).click()
        prompts = dialog.get_by_role("textbox", name="Prompts, one on each line", exact=True)
        await expect(prompts).to_have_value("First\nSecond")


async def test_form_that_was_filled_is_closed_by_its_buttons_only(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/batches") as (page, _),
    ):
        dialog = await fill_prompts(page)
        await try_to_leave(page)
        prompts = dialog.get_by_role("textbox", name="Prompts, one on each line", exact=True)
        await expect(prompts).to_have_value("First\nSecond")
        await dialog.get_by_role("button", name="Cancel", exact=True).click()
        await expect(dialog).to_have_count(0)
        await page.get_by_role("button", name="Create batch", exact=True).first.click()
        await expect(dialog).to_be_visible()
        await page.mouse.click(5, 5)  # nothing was typed, so nothing is lost
        await expect(dialog).to_have_count(0)


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
async def test_new_key_is_shown_until_it_was_copied(browser: Browser, config: Config, size: tuple[int, int]) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/keys", size=size) as (page, _),
    ):
        key = await create_key(page, "laptop", "acme")
        dialog = page.get_by_role("dialog", name="Copy the key now", exact=True)
        await expect(dialog.get_by_role("button", name="Close", exact=True)).to_have_count(0)
        await dialog.get_by_role("heading", name="Copy the key now", exact=True).click()
        await try_to_leave(page)
        await expect(dialog.get_by_role("textbox")).to_have_value(key)
        await dialog.get_by_role("button", name="Done", exact=True).click()
        await expect(dialog).to_have_count(0)


async def test_message_is_shown_and_dismissed_while_a_dialog_is_open(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model(id="m")) as http,
        open_page(browser, address(http), path="/status", messages_stay=True) as (page, _),
    ):
        await page.add_init_script(WITHOUT_COPYING)
        await page.goto(f"{address(http)}/#/models")
        await page.reload()
        await choose(page, page.get_by_role("button", name="More about m", exact=True), "Configuration")
        dialog = page.get_by_role("dialog", name="Configuration of m", exact=True)
        await dialog.get_by_role("button", name="Copy configuration", exact=True).click()
        message = page.get_by_role("status").filter(has_text="The browser does not let this page copy.")
        await expect(message).to_have_count(1)
        await check_page(page)
        await message.get_by_role("button", name="Dismiss", exact=True).click()
        await expect(message).to_have_count(0)
        await expect(dialog).to_be_visible()
