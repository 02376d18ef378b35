"""Every page but Chat with a real server and real models: every action, on a desktop and on a phone, without keys and
with them.
"""

from __future__ import annotations

import csv
import json
import math
import re

import httpx
import pytest
from playwright.async_api import Browser, Locator, Page, Response, expect

from tests.client import until
from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, choose, open_menu, read_download, stay_within_a_day
from tests.console.real_server import ORGANIZATION, RealServer
from tests.console.test_account_pages import create_key
from tests.e2e.server import serve

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
WITH_KEYS = pytest.mark.parametrize("real", [True], ids=["keys"], indirect=True)
TREE = "Name a tree."
LONG = "3000"  # tokens, which take so long that an answer is stopped before


def unique(text: str, size: tuple[int, int]) -> str:
    """Return a text that no test of another width sends to the server."""
    return f"{text} ({size[0]} pixels)"


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


async def confirm(page: Page, action: str) -> None:
    await page.get_by_role("dialog").get_by_role("button", name=action, exact=True).click()
    await expect(page.get_by_role("dialog")).to_have_count(0)


def stat(place: Locator, label: str) -> Locator:
    return place.locator(".stat", has=place.page.get_by_text(label, exact=True)).locator("dd")


# Completions


async def test_completion_has_a_heat_map_and_is_stopped(
    browser: Browser, real: RealServer, size: tuple[int, int]
) -> None:
    async with real.page(browser, size) as (page, _):
        main = await visit(page, "Completions")
        prompt = "The lilac is a shrub that blooms in"
        await main.get_by_role("textbox", name="Text", exact=True).fill(prompt)
        await main.get_by_label("Maximum tokens", exact=True).fill("4")
        await main.get_by_label("Temperature", exact=True).fill("0")
        await main.get_by_role("button", name="Complete", exact=True).click()
        figures = main.get_by_role("status").filter(has_text="4 out")
        await expect(figures).to_be_visible()
        tokens = main.get_by_role("group", name="Tokens; arrow keys choose one", exact=True)
        counted = int(re.findall(r"(\d+) tokens in", await figures.inner_text())[0])
        await expect(tokens.locator("span")).to_have_count(counted + 4)
        texts = await tokens.locator("span").all_inner_texts()
        assert "".join(texts[:counted]) == prompt
        levels = {await each.get_attribute("class") for each in await tokens.locator("span").all()}
        assert len(levels) > 1
        detail = main.locator(".heat-detail")
        await expect(detail).to_contain_text("Perplexity")
        await tokens.press("ArrowRight")
        await expect(detail).to_contain_text("is the first token")
        await tokens.locator("span").nth(3).hover()
        await expect(detail.get_by_role("paragraph")).to_contain_text(json.dumps(texts[3]))
        await expect(detail.get_by_role("listitem")).to_have_count(5)
        await check_page(page)

        await main.get_by_role("switch", name="Echo the prompt", exact=True).press("Space")
        await main.get_by_role("button", name="Complete", exact=True).click()
        await expect(tokens.locator("span")).to_have_text(texts[counted:])  # of the same, which is greedy

        await main.get_by_label("Model", exact=True).select_option("endless")
        await main.get_by_label("Maximum tokens", exact=True).fill(LONG)
        await main.get_by_role("button", name="Complete", exact=True).click()
        await expect(tokens.locator("span").nth(5)).to_be_attached()
        await main.get_by_role("button", name="Stop", exact=True).click()
        await expect(main.get_by_role("button", name="Complete", exact=True)).to_be_enabled()
        assert 5 < await tokens.locator("span").count() < int(LONG)


async def test_text_is_filled_in_at_the_cursor(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    """SmolLM2 has no fill-in-the-middle tokens, and the page says so."""
    before, after = "def add(a, b):\n    return ", "\n\nprint(add(2, 3))\n"
    async with real.page(browser, size) as (page, _):
        main = await visit(page, "Completions")
        await main.get_by_role("tab", name="Fill in the middle", exact=True).click()
        await main.get_by_label("Maximum tokens", exact=True).fill("4")
        area = main.get_by_role("textbox", name="Text, with the cursor")
        await area.fill(before + after)
        await area.press("Control+Home")
        await area.press("ArrowDown")
        await area.press("End")
        await main.get_by_role("button", name="Fill in at the cursor").click()
        await expect(main.get_by_role("status").filter(has_text="4 out")).to_be_visible()
        written = await area.input_value()
        assert written.startswith(before)
        assert written.endswith(after)
        filled_in = written[len(before) : -len(after)]
        assert filled_in
        await page.wait_for_function("(text) => getSelection().toString() === text", arg=filled_in)
        await expect(main.get_by_text("This model has no fill-in-the-middle tokens")).to_be_visible()
        await check_page(page)


# Responses


async def test_background_response_is_run_followed_canceled_and_deleted(
    browser: Browser, real: RealServer, size: tuple[int, int]
) -> None:
    text = unique("Write a book.", size)
    async with real.page(browser, size) as (page, _), real.http(admin=False) as http:
        main = await visit(page, "Responses")
        await main.get_by_role("button", name="Run in the background").first.click()
        dialog = page.get_by_role("dialog", name="Run in the background", exact=True)
        await dialog.get_by_label("Model", exact=True).select_option("endless")
        await dialog.get_by_label("Input", exact=True).fill(text)
        await dialog.get_by_label("Maximum output tokens", exact=True).fill(LONG)
        await check_page(page)
        await dialog.get_by_role("button", name="Run", exact=True).click()
        await expect(main.get_by_role("status").filter(has_text="pieces of text so far")).to_be_visible()
        detail = main.locator("section", has=page.get_by_role("heading", name="Response", exact=True))
        await expect(detail.locator(".item", has_text="assistant").locator(".item-text")).not_to_be_empty()
        await expect(detail.get_by_role("progressbar")).to_have_count(1)
        await detail.get_by_role("button", name="Cancel", exact=True).click()
        await expect(detail.get_by_text("cancelled", exact=True)).to_be_visible()
        await expect(detail.get_by_role("progressbar")).to_have_count(0)
        row = main.locator(".tree-row", has_text=text)
        await expect(row.get_by_text("cancelled", exact=True)).to_be_visible()
        id = page.url.rpartition("/")[2]
        assert (await http.get(f"/v1/responses/{id}")).json()["status"] == "cancelled"
        await check_page(page)
        await detail.get_by_role("button", name="Delete", exact=True).click()
        await confirm(page, "Delete")
        await expect(row).to_have_count(0)
        assert (await http.get(f"/v1/responses/{id}")).status_code == 404


async def test_responses_are_a_tree_with_items(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    texts = [unique(each, size) for each in ("Which shrub?", "And in June?", "And in July?", "Shorter!")]
    async with real.page(browser, size) as (page, _), real.http(admin=False) as http:

        async def respond(text: str, previous: str | None = None) -> str:
            body = {"model": "endless", "input": text, "previous_response_id": previous, "max_output_tokens": 4}
            return str((await http.post("/v1/responses", json=body)).raise_for_status().json()["id"])

        first = await respond(texts[0])
        second = await respond(texts[1], first)
        await respond(texts[2], first)
        await respond(texts[3], second)
        main = await visit(page, "Responses")
        rows = main.locator(".tree-row", has_text=f"({size[0]} pixels)")
        await expect(rows).to_have_count(4)
        for text, depth in zip(texts, "0112", strict=True):
            await expect(rows.filter(has_text=text)).to_have_class(re.compile(rf"\bdepth-{depth}\b"))
        await expect(page.locator(".tree-row", has_text=texts[1]).locator("+ .tree-row")).to_contain_text(texts[3])
        await rows.filter(has_text=texts[1]).get_by_role("link").click()
        detail = main.locator("section", has=page.get_by_role("heading", name="Response", exact=True))
        await expect(detail.locator(".item")).to_have_count(2)
        await expect(detail.locator(".item").nth(0)).to_contain_text(texts[1])
        await expect(detail.locator(".item").nth(1)).to_contain_text("assistant")
        await expect(detail.get_by_text("Continues")).to_contain_text(first)
        await main.get_by_label("Status", exact=True).select_option("failed")
        await expect(main.get_by_role("heading", name="None is like that")).to_be_visible()
        await main.get_by_label("Status", exact=True).select_option("incomplete")  # cut at four tokens
        await expect(rows).to_have_count(4)
        await check_page(page)


async def test_conversation_is_listed_and_deleted(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    async with real.page(browser, size) as (page, _), real.http(admin=False) as http:
        body = {"metadata": {"topic": unique("plants", size)}}
        id = (await http.post("/v1/conversations", json=body)).raise_for_status().json()["id"]
        answer = {"input": TREE, "conversation": id, "max_output_tokens": 4}
        (await http.post("/v1/responses", json=answer)).raise_for_status()
        main = await visit(page, "Responses")
        await main.get_by_role("tab", name="Conversations", exact=True).click()
        await expect(main.get_by_text(f"topic: {unique('plants', size)}", exact=True)).to_be_attached()
        await main.get_by_role("link", name=id, exact=True).click()
        await expect(main.locator(".item")).to_have_count(2)
        await expect(main.locator(".item").first).to_contain_text(TREE)
        await check_page(page)
        await main.get_by_role("button", name=f"Delete {id}", exact=True).click()
        await confirm(page, "Delete")
        await expect(main.get_by_role("link", name=id, exact=True)).to_have_count(0)
        assert (await http.get(f"/v1/conversations/{id}")).status_code == 404


# Batches and embeddings


async def create_batch(page: Page, prompts: str, model: str) -> str:
    """Create a batch in the open page, and return its id."""
    await page.get_by_role("button", name="Create batch").first.click()
    dialog = page.get_by_role("dialog", name="Create a batch", exact=True)
    await dialog.get_by_label("Model", exact=True).select_option(model)
    await dialog.get_by_role("textbox", name="Prompts").fill(prompts)

    def is_creation(response: Response) -> bool:
        return response.url.endswith("/v1/batches") and response.request.method == "POST"

    async with page.expect_response(is_creation) as created:
        await dialog.get_by_role("button", name="Create", exact=True).click()
    await expect(dialog).to_have_count(0)
    return str((await (await created.value).json())["id"])


async def test_batch_is_run_and_another_one_canceled(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    async with real.page(browser, size) as (page, _):
        main = await visit(page, "Batches")
        id = await create_batch(page, "Name a tree.\n\nName a shrub.", "brief")
        row = main.get_by_role("row").filter(has_text=id)
        await expect(row.get_by_text("completed", exact=True)).to_be_attached()
        await expect(row.get_by_text("2 of 2", exact=True)).to_be_attached()
        await check_page(page)
        async with page.expect_download() as download:
            await choose(page, row.get_by_role("button", name=f"Actions of {id}", exact=True), "Output")
        lines = [json.loads(line) for line in await read_download(await download.value)]
        assert {line["custom_id"] for line in lines} == {"1", "2"}
        assert all(line["response"]["body"]["choices"][0]["message"]["content"] for line in lines)

        id = await create_batch(page, "\n".join([TREE] * 20), "endless")
        row = main.get_by_role("row").filter(has_text=id)
        await choose(page, row.get_by_role("button", name=f"Actions of {id}", exact=True), "Cancel")
        await confirm(page, "Cancel batch")
        await expect(row.get_by_text("cancelled", exact=True)).to_be_attached()

        await main.get_by_role("tab", name="Files", exact=True).click()
        files = main.get_by_role("row").filter(has_text="prompts.jsonl")
        await expect(files.first).to_be_attached()
        file = await files.first.locator(".mono").inner_text()
        await choose(page, files.first.get_by_role("button", name="Actions of prompts.jsonl", exact=True), "Delete")
        await confirm(page, "Delete")
        await expect(main.get_by_text(file, exact=True)).to_have_count(0)


async def test_lines_are_compared(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    """By a small model of random weights."""
    lines = ["Lilacs bloom in May.", "The train is late.", "A shrub flowers."]
    async with real.page(browser, size) as (page, _), real.http(admin=False) as http:
        main = await visit(page, "Embeddings")
        await main.get_by_label("Texts, one on each line").fill("\n".join(lines))
        await main.get_by_role("button", name="Compare", exact=True).click()
        cells = main.locator(".matrix tbody td")
        await expect(cells).to_have_count(9)
        answer = await http.post("/v1/embeddings", json={"model": "embedding", "input": lines})
        vectors = [each["embedding"] for each in answer.raise_for_status().json()["data"]]
        expected = [sum(map(math.prod, zip(a, b, strict=True))) for a in vectors for b in vectors]
        assert [float(text) for text in await cells.all_inner_texts()] == pytest.approx(expected, abs=0.011)
        await check_page(page)


# Models, status and usage


def card_of(page: Page, model: str) -> Locator:
    return page.locator(".model-card", has=page.locator(".model-name", has_text=re.compile(f"^{model}$")))


async def make_traffic(http: httpx.AsyncClient) -> None:
    """Send a request that is answered and one that is refused, and wait until the figures over time have both."""
    (await http.post("/v1/completions", json={"prompt": TREE, "max_tokens": 4})).raise_for_status()
    assert (await http.post("/v1/completions", json={"prompt": {}})).status_code == 400

    async def is_counted() -> bool:
        reports = [(await http.get("/admin/series", params={"range": each})).json() for each in ("5m", "1h")]
        totals = [each["all"]["totals"] for each in reports]
        return all(each["ok"] and each["errors"].get("invalid_request") for each in totals)

    await until(is_counted)


async def test_model_is_unloaded_loaded_and_removed(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    async with real.page(browser, size, admin=True) as (page, _), real.http() as http:
        await make_traffic(http)
        (await http.put("/admin/models/spare", json={"path": "default", "max_model_len": 256})).raise_for_status()
        await visit(page, "Models")
        card = card_of(page, "smollm2")
        await expect(card.get_by_text("loaded", exact=True)).to_be_visible()
        await expect(stat(card, "Context")).to_contain_text("4,096")
        await expect(stat(card, "Memory")).to_contain_text("MB")
        await expect(stat(card, "Precision")).not_to_be_empty()
        await expect(stat(card, "Last hour")).to_contain_text(re.compile("[1-9]"))
        await expect(card.get_by_role("figure", name="Tokens per second of smollm2, last hour")).to_be_visible()
        await expect(card_of(page, "broken").get_by_role("alert")).to_contain_text("/no/such/model")
        await check_page(page)
        menu = await open_menu(page, card.get_by_role("button", name="More about smollm2", exact=True))
        await expect(menu.get_by_role("menuitem")).to_have_text(["Configuration"])  # it is one of the settings
        await page.keyboard.press("Escape")

        spare = card_of(page, "spare")
        await expect(spare.get_by_text("cold", exact=True)).to_be_visible()
        await spare.get_by_role("button", name="Load spare", exact=True).click()
        await expect(spare.get_by_text("loaded", exact=True)).to_be_visible()
        await spare.get_by_role("button", name="Unload spare", exact=True).click()
        await expect(spare.get_by_text("cold", exact=True)).to_be_visible()
        more = spare.get_by_role("button", name="More about spare", exact=True)
        await choose(page, more, "Configuration")
        await expect(page.get_by_role("dialog")).to_contain_text('"max_model_len": 256')
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await choose(page, more, "Remove")
        await page.get_by_role("dialog").get_by_role("button", name="Remove", exact=True).click()
        await expect(spare).to_have_count(0)
        listed = (await http.get("/v1/models")).json()["data"]
        assert "spare" not in {each["id"] for each in listed}


@WITH_KEYS
async def test_models_are_not_changed_without_admin_rights(
    browser: Browser, real: RealServer, size: tuple[int, int]
) -> None:
    async with real.page(browser, size) as (page, _):
        await visit(page, "Models")
        await expect(card_of(page, "broken").get_by_text("failed", exact=True)).to_be_visible()
        await expect(page.get_by_text("/no/such/model")).to_have_count(0)
        for name in ("Load", "Unload", "More about", "Pull a model"):
            await expect(page.get_by_role("button", name=name)).to_have_count(0)
        main = await visit(page, "Status")
        await expect(main.get_by_role("table", name="Public status")).to_contain_text("smollm2")
        await expect(main.get_by_role("figure")).to_have_count(0)
        await expect(main.get_by_role("tab", name="24 hours", exact=True)).to_be_visible()
        await expect(main.get_by_role("tab", name="7 days", exact=True)).to_have_count(0)


async def test_status_shows_the_traffic(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    async with real.page(browser, size, admin=True) as (page, _), real.http() as http:
        await make_traffic(http)
        main = await visit(page, "Status")
        await expect(main.get_by_role("table", name="Public status")).to_contain_text("smollm2")
        for name in ("Tokens per second", "Requests that ended"):
            await expect(main.get_by_role("figure", name=name)).to_be_visible()
        await expect(main.get_by_text(re.compile("^Invalid request: [1-9]"))).to_be_visible()
        # Longer ones may be a minute old.
        for name in ("6 hours", "24 hours", "7 days", "30 days", "1 hour", "5 minutes"):
            tab = main.get_by_role("tab", name=name, exact=True)
            await tab.click()
            await expect(tab).to_have_attribute("aria-selected", "true")
            least = "[1-9]" if name in ("1 hour", "5 minutes") else r"\d"
            await expect(stat(main, "Requests")).to_have_text(re.compile(f"^{least}"))
        await check_page(page)


async def test_usage_is_a_chart_a_table_and_a_file(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    await stay_within_a_day()
    async with real.page(browser, size, admin=True) as (page, _), real.http(admin=False) as http:
        (await http.post("/v1/completions", json={"prompt": TREE, "max_tokens": 4})).raise_for_status()

        async def is_written() -> bool:
            rows = (await http.get("/v1/usage?by=model")).json()["data"]
            return any(row["model"] == "smollm2" and row["ok"] for row in rows)

        await until(is_written)
        main = await visit(page, "Usage")
        row = main.get_by_role("table", name="Usage by model", exact=True).get_by_role("row").filter(has_text="smollm2")
        await expect(row.get_by_role("cell").nth(1)).to_have_text(re.compile("^[1-9]"))
        await expect(row.get_by_role("cell").last).to_have_text(re.compile(r"^\$[1-9]"))
        await main.get_by_label("Show", exact=True).select_option("cost")
        await expect(main.get_by_role("heading", name="Cost by day and model", exact=True)).to_be_visible()
        await expect(main.get_by_role("figure", name="Cost by day and model", exact=True)).to_be_visible()
        await main.get_by_text("Figures by day", exact=True).click()
        figures = main.get_by_role("table", name="Cost by day and model, in figures", exact=True)
        await expect(figures.get_by_role("row").nth(1)).to_contain_text("$")
        await check_page(page)
        async with page.expect_download() as download:
            await main.get_by_role("button", name="Download CSV").click()
        rows = list(csv.DictReader(await read_download(await download.value)))
        assert sum(int(each["requests"]) for each in rows if each["model"] == "smollm2") > 0
        if not real.key:
            await expect(main.get_by_label("Group by", exact=True).get_by_role("option", name="Key")).to_have_count(0)
            return
        await main.get_by_label("Group by", exact=True).select_option("key")
        own = f"browser ({ORGANIZATION})"
        await expect(main.get_by_role("cell", name=own, exact=True)).to_be_attached()
        await expect(main.get_by_label("Organization", exact=True)).to_be_visible()
        await main.get_by_label("Organization", exact=True).select_option("operators")
        await expect(main.get_by_role("cell", name=own, exact=True)).to_have_count(0)


# Keys


async def test_limits_of_an_organization_are_changed(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    organization = f"lilac-{size[0]}"
    async with real.page(browser, size, admin=True) as (page, _), real.http() as http:
        main = await visit(page, "Keys")
        await main.get_by_role("tab", name="Organizations", exact=True).click()
        await main.get_by_role("button", name="Add organization", exact=True).click()
        dialog = page.get_by_role("dialog", name="Add an organization", exact=True)
        await dialog.get_by_label("Name", exact=True).fill(organization)
        await dialog.get_by_role("button", name="Save", exact=True).click()
        await expect(dialog).to_have_count(0)
        await main.get_by_role("button", name=f"Limits of {organization}", exact=True).click()
        dialog = page.get_by_role("dialog", name=f"Limits of {organization}", exact=True)
        await dialog.get_by_label("Requests per minute", exact=True).fill("7")
        await dialog.get_by_label("Concurrent requests", exact=True).fill("0")
        await check_page(page)
        await dialog.get_by_role("button", name="Save", exact=True).click()
        await expect(dialog).to_have_count(0)
        row = main.get_by_role("row").filter(has_text=organization)
        await expect(row.get_by_role("cell").nth(1)).to_have_text("7")
        entry = (await http.get(f"/admin/organizations/{organization}")).json()
        assert (entry["requests_per_minute"], entry["tokens_per_minute"], entry["concurrent"]) == (7, None, 0)


@WITH_KEYS
async def test_key_is_created_copied_limited_and_revoked(
    browser: Browser, real: RealServer, size: tuple[int, int]
) -> None:
    name = f"website-{size[0]}"
    permissions = ["clipboard-read", "clipboard-write"]
    async with real.page(browser, size, admin=True, messages_stay=True, permissions=permissions) as (page, _):
        main = await visit(page, "Keys")
        used = main.get_by_role("row").filter(has_text="operators")
        await expect(used).to_contain_text(re.compile("just now|seconds? ago|minutes? ago"))
        await main.get_by_role("button", name="Create key").first.click()
        dialog = page.get_by_role("dialog", name="Create a key", exact=True)
        await dialog.get_by_label("Organization", exact=True).fill(ORGANIZATION)
        await dialog.get_by_label("Name", exact=True).fill(name)
        await dialog.get_by_text("Models and limits", exact=True).click()
        await dialog.get_by_role("switch", name="smollm2", exact=True).press("Space")
        await dialog.get_by_label("Requests per minute", exact=True).fill("1")
        await check_page(page)
        await dialog.get_by_role("button", name="Create", exact=True).click()
        shown = page.get_by_role("dialog", name="Copy the key now", exact=True)
        await shown.get_by_role("button", name="Copy", exact=True).click()
        await expect(shown.get_by_role("button", name="Copied", exact=True)).to_be_visible()
        key = await page.evaluate("navigator.clipboard.readText()")
        assert key == await shown.get_by_role("textbox").input_value()
        await shown.get_by_role("button", name="Done", exact=True).click()
        await expect(page.get_by_role("dialog")).to_have_count(0)
        assert key not in await page.content()

        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=real.url, headers=headers, timeout=60) as http:
            body = {"model": "smollm2", "prompt": TREE, "max_tokens": 4}
            statuses = [(await http.post("/v1/completions", json=body)).status_code for _ in range(2)]
            assert statuses == [200, 429]
            row = main.get_by_role("row").filter(has_text=name)
            await expect(row).to_contain_text("1 requests/min")
            await expect(row).to_contain_text("smollm2")
            await main.get_by_role("button", name=f"Revoke {name}", exact=True).click()
            await confirm(page, "Revoke")
            await expect(row).to_have_count(0)

            async def is_refused() -> bool:
                return (await http.get("/v1/models")).status_code == 401

            await until(is_refused)
        await main.get_by_role("switch", name="Show revoked keys", exact=True).press("Space")
        await expect(row.get_by_text("revoked", exact=True)).to_be_attached()
        await check_page(page)


@WITH_KEYS
async def test_key_signs_in_and_out(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    async with real.page(browser, size, key="") as (page, watched):
        watched.allow("401")
        field = page.get_by_label("API key", exact=True)
        await field.fill("sk-wrong")
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await expect(page.locator(".field-error")).to_be_visible()
        await field.fill(real.key)
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await visit(page, "Usage")
        assert real.key not in page.url
        menu = page.get_by_role("button", name="Open navigation", exact=True)
        if await menu.is_visible():
            await menu.click()
        await expect(page.locator(".organization")).to_have_text(ORGANIZATION)
        for name in ("Keys", "Fleet"):
            await expect(page.get_by_role("link", name=name, exact=True)).to_have_count(0)
        await page.get_by_role("button", name="Sign out").click()
        await expect(field).to_be_visible()
        kept = await page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")
        assert real.key not in kept


@SIZES
async def test_first_key_signs_the_console_in(browser: Browser, size: tuple[int, int]) -> None:
    """On a server of its own, which needs keys from then on."""
    with serve("--served-model-name", "smollm2", "--max-model-len", "512") as server:
        real = RealServer(server.url, "", "")
        async with real.page(browser, size) as (page, _), real.http() as http:
            main = await visit(page, "Keys")
            await expect(main.get_by_role("heading", name="No keys yet")).to_be_visible()
            await create_key(page, "laptop", "acme")
            await page.get_by_role("button", name="Done", exact=True).click()
            await expect(main.get_by_role("button", name="Revoke laptop", exact=True)).to_be_attached()
            await visit(page, "Completions")
            await page.get_by_label("Maximum tokens", exact=True).fill("4")
            await page.get_by_role("button", name="Complete", exact=True).click()
            await expect(page.get_by_role("status").filter(has_text="4 out")).to_be_visible()
            assert (await http.get("/v1/models")).status_code == 401
