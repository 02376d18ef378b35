"""Every page with a real server and real models: its main action without keys, with a key, and as an administrator."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from syringa.modelfiles import locate
from tests.console.axe import check_page
from tests.console.browser import PHONE, choose, open_page
from tests.console.test_account_pages import create_key
from tests.e2e.server import Server, serve
from tests.engine.embedding.tiny_encoders import save_encoder

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

BROKEN = """
[[models]]
id = "smollm2"
path = "{default}"
max_model_len = 256
[[models]]
id = "broken"
path = "/no/such/model"
"""


@pytest.fixture
def embedding(tmp_path: Path) -> Path:
    """The folder of a small embedding model, in the place of the catalog's in a directory of models."""
    folder = tmp_path / "home" / "models" / "all-MiniLM-L6-v2"
    folder.mkdir(parents=True)
    save_encoder(folder, "Bert", pooling="mean_tokens")
    return folder


@pytest.fixture
def server(embedding: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    settings = tmp_path / "models.toml"
    settings.write_text(BROKEN.format(default=locate("default").path))
    monkeypatch.setenv("SYRINGA_HOME", str(embedding.parents[1]))
    with serve("--config", str(settings), "--requests-per-minute", "0") as running:
        yield running


async def visit(page: Page, name: str) -> Locator:
    """Open a page by the navigation, and return what it shows."""
    menu = page.get_by_role("button", name="Open navigation", exact=True)
    pages = page.get_by_role("navigation", name="Pages", exact=True)
    await expect(menu.or_(pages).first).to_be_visible()  # the page may not have been drawn yet
    if await menu.is_visible():
        await menu.click()
    await pages.get_by_role("link", name=name, exact=True).click()
    await expect(page.get_by_role("heading", level=1, name=name, exact=True)).to_be_visible()
    return page.get_by_role("main")


async def complete(page: Page) -> None:
    main = await visit(page, "Completions")
    await main.get_by_label("Maximum tokens", exact=True).fill("4")
    await main.get_by_role("button", name="Complete", exact=True).click()
    await expect(main.get_by_role("status").filter(has_text="4 out")).to_be_visible()


async def run_in_background(page: Page) -> None:
    main = await visit(page, "Responses")
    await main.get_by_role("button", name="Run in the background").first.click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_label("Input", exact=True).fill("Name a shrub.")
    await dialog.get_by_label("Maximum output tokens", exact=True).fill("4")
    await dialog.get_by_role("button", name="Run", exact=True).click()
    detail = main.locator("section", has=page.get_by_role("heading", name="Response", exact=True))
    await expect(detail.get_by_text(re.compile("^(completed|incomplete)$"))).to_be_visible()
    await expect(detail.locator(".item", has_text="assistant")).to_be_visible()


async def compare_lines(page: Page) -> None:
    main = await visit(page, "Embeddings")
    await main.get_by_label("Texts, one on each line").fill("one\ntwo")
    await main.get_by_role("button", name="Compare", exact=True).click()
    await expect(main.locator(".matrix tbody td")).to_have_count(4)


async def run_batch(page: Page) -> None:
    main = await visit(page, "Batches")
    await main.get_by_role("button", name="Create batch").first.click()
    dialog = page.get_by_role("dialog")
    await dialog.get_by_role("textbox", name="Prompts").fill("Name a tree.")
    await dialog.get_by_role("button", name="Create", exact=True).click()
    await expect(main.get_by_text("1 of 1", exact=True)).to_be_attached()


async def read_status(page: Page, *, admin: bool) -> None:
    main = await visit(page, "Status")
    await expect(main.get_by_role("table", name="Public status").get_by_role("row").nth(1)).to_contain_text("smollm2")
    await expect(main.get_by_role("figure", name="Tokens per second")).to_have_count(int(admin))
    await expect(main.get_by_role("tab", name="7 days", exact=True)).to_have_count(int(admin))


async def read_usage(page: Page) -> None:
    main = await visit(page, "Usage")
    await expect(main.get_by_role("cell", name="smollm2", exact=True)).to_be_attached()


async def add_from_catalog(page: Page) -> None:
    main = await visit(page, "Models")
    await main.get_by_role("button", name="Pull a model").first.click()
    await page.get_by_role("dialog").get_by_role("button", name="Add embedding", exact=True).click()
    await expect(main.locator(".pull").get_by_text("completed", exact=True)).to_be_visible()
    await expect(card_of(page, "embedding")).to_be_visible()


def card_of(page: Page, model: str) -> Locator:
    return page.locator(".model-card", has=page.locator(".model-name", has_text=re.compile(f"^{model}$")))


async def test_every_page_does_its_work_with_and_without_keys(
    browser: Browser, server: Server, embedding: Path
) -> None:
    async with open_page(browser, server.url) as (page, _):
        await add_from_catalog(page)
        failed = card_of(page, "broken").get_by_role("alert")
        await expect(failed).to_contain_text("/no/such/model")
        await check_page(page)
        for use in (complete, run_in_background, compare_lines, run_batch, read_usage):
            await use(page)
        await read_status(page, admin=True)
        await visit(page, "Keys")
        admin = await create_key(page, "root", "ops")
        await page.get_by_role("button", name="Done", exact=True).click()
        key = await create_member_key(page)

    async with open_page(browser, server.url, size=PHONE, key=key) as (page, _):
        for use in (complete, run_in_background, compare_lines, run_batch, read_usage):
            await use(page)
        await read_status(page, admin=False)
        await visit(page, "Models")
        await expect(card_of(page, "broken").get_by_text("failed", exact=True)).to_be_visible()
        await expect(page.get_by_text("/no/such/model")).to_have_count(0)
        for name in ("Load", "Unload", "More about", "Pull a model"):
            await expect(page.get_by_role("button", name=name)).to_have_count(0)

    async with open_page(browser, server.url, key=admin) as (page, _):
        await read_usage(page)
        await read_status(page, admin=True)
        await visit(page, "Models")
        await choose(page, page.get_by_role("button", name="More about embedding", exact=True), "Remove")
        dialog = page.get_by_role("dialog", name="Remove embedding?")
        await dialog.get_by_role("switch", name="Delete its files too").press("Space")
        await dialog.get_by_role("button", name="Remove", exact=True).click()
        await expect(card_of(page, "embedding")).to_have_count(0)
    assert not list(embedding.parent.iterdir())


async def create_member_key(page: Page) -> str:
    await page.get_by_role("button", name="Create key").first.click()
    dialog = page.get_by_role("dialog", name="Create a key")
    await dialog.get_by_label("Organization", exact=True).fill("acme")
    await dialog.get_by_label("Name", exact=True).fill("app")
    await dialog.get_by_role("button", name="Create", exact=True).click()
    return await page.get_by_role("dialog", name="Copy the key now").get_by_role("textbox").input_value()
