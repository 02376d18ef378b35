"""What holds for every page: accessible in both themes, no sideways scrolling, and it recovers from a lost server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from syringa.config import Config
from tests.chat_models import plain_model
from tests.client import server
from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, open_page
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow
TABLET, LARGE = (768, 1024), (1600, 1000)
# Each page, and what is there once it has loaded.
PAGES = {
    "/chat": "[aria-label='Message'], textarea",
    "/completions": "button:has-text('Complete')",
    "/responses": ".tree-row",
    "/responses/conversations": ".table",
    "/embeddings": ".empty",
    "/batches": ".table",
    "/models": ".model-card",
    "/status": ".table-note",
    "/usage": ".card.flush .table",
    "/keys": ".empty",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def busy_server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    """A server that has answered requests of all kinds."""
    database = tmp_path_factory.mktemp("console") / "syringa.db"
    config = Config(port=0, drain_timeout=1.0, database=str(database))
    async with server(FakeEngine("Lilacs bloom in May."), config, model=plain_model()) as http:
        answer = await http.post("/v1/responses", json={"input": "Which shrub?"})
        await http.post("/v1/responses", json={"input": "Why?", "previous_response_id": answer.json()["id"]})
        conversation = (await http.post("/v1/conversations", json={"metadata": {"topic": "plants"}})).json()["id"]
        await http.post("/v1/responses", json={"input": "Hello", "conversation": conversation})
        await http.post("/v1/completions", json={"prompt": "Hi"})
        await http.post("/v1/completions", json={"prompt": 5})
        line = b'{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}'
        file = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", line)})
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await http.post("/v1/batches", json=body)).status_code == 200
        yield http


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize(
    ("size", "dark"),
    [(DESKTOP, False), (DESKTOP, True), (PHONE, True), (TABLET, False), (LARGE, False)],
    ids=["light", "dark", "phone", "tablet", "large"],
)
async def test_page_is_accessible(
    browser: Browser, busy_server: httpx.AsyncClient, path: str, size: tuple[int, int], dark: bool
) -> None:
    url = str(busy_server.base_url).rstrip("/")
    async with open_page(browser, url, path=path, size=size, dark=dark) as (page, _):
        await expect(page.locator(PAGES[path]).first).to_be_visible()
        await expect(page.locator(".loading")).to_have_count(0)
        await check_page(page)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", ["/models", "/status", "/usage", "/responses", "/batches"])
async def test_page_recovers_when_the_server_is_back(
    browser: Browser, busy_server: httpx.AsyncClient, path: str
) -> None:
    url = str(busy_server.base_url).rstrip("/")
    async with open_page(browser, url, path="/keys") as (page, watched):
        await expect(page.get_by_role("heading", name="No keys yet")).to_be_visible()
        watched.allow("ERR_INTERNET_DISCONNECTED")
        await page.goto(f"{url}/#{path}")  # its script is fetched, so that only its data is missing below
        await expect(page.locator(PAGES[path]).first).to_be_visible()
        await page.goto(f"{url}/#/keys")
        await expect(page.get_by_role("heading", name="No keys yet")).to_be_visible()  # the page is left
        await page.context.set_offline(True)
        await page.goto(f"{url}/#{path}")
        await expect(page.get_by_text("The server is away.")).to_be_visible()
        await expect(page.get_by_role("alert").filter(has_text="cannot be reached").first).to_be_visible()
        await page.context.set_offline(False)
        await expect(page.get_by_text("The server is away.")).to_have_count(0)
        await expect(page.locator(PAGES[path]).first).to_be_visible()
        await expect(page.get_by_text("cannot be reached")).to_have_count(0)


def test_pages_of_the_list_are_those_of_the_console() -> None:
    folder = Path(__file__).resolve().parents[2] / "syringa" / "console" / "static" / "pages"
    names = {each.parent.name for each in folder.glob("*/page.js")} - {"fleet"}
    assert names == {path.split("/")[1] for path in PAGES}
