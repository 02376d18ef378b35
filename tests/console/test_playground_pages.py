"""Completions, responses, batches and embeddings in a browser."""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from syringa.config import Config
from tests.chat_models import plain_model, reasoning_model
from tests.client import server
from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, choose, open_page, pass_time, read_download
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
SIZES = pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))


def address(http: httpx.AsyncClient) -> str:
    return str(http.base_url).rstrip("/")


# Completions


@SIZES
async def test_completion_has_a_heat_map_of_prompt_and_answer(
    browser: Browser, config: Config, size: tuple[int, int]
) -> None:
    async with (
        server(FakeEngine(" in May"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions", size=size) as (page, _),
    ):
        await page.get_by_role("textbox", name="Text", exact=True).fill("Lilacs bloom")
        await page.get_by_role("button", name="Complete", exact=True).click()
        tokens = page.get_by_role("group", name="Tokens; arrow keys choose one")
        await expect(tokens).to_have_text("Lilacs bloom in May<end>")
        await expect(page.get_by_role("status").filter(has_text="tokens in")).to_contain_text("out")
        detail = page.locator(".heat-detail")
        await expect(detail).to_contain_text("Perplexity")
        await tokens.press("ArrowRight")
        await expect(detail).to_contain_text("is the first token")
        await tokens.press("ArrowRight")
        await expect(detail).to_contain_text("log-probability")
        await expect(detail.get_by_role("listitem").first).to_be_visible()
        await check_page(page)
        await page.get_by_role("switch", name="Echo the prompt", exact=True).press("Space")
        await page.get_by_role("button", name="Complete", exact=True).click()
        await expect(tokens).to_have_text(" in May<end>")


async def test_completion_is_stopped(browser: Browser, config: Config) -> None:
    engine = FakeEngine("word " * 100)
    engine.pause()
    async with (
        server(engine, config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions") as (page, _),
    ):
        await page.get_by_role("textbox", name="Text", exact=True).press("Control+Enter")
        await page.get_by_role("button", name="Stop", exact=True).click()
        await expect(page.get_by_role("button", name="Complete", exact=True)).to_be_enabled()


async def test_text_is_filled_in_at_the_cursor(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("a + b"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions") as (page, _),
    ):
        await page.get_by_role("tab", name="Fill in the middle", exact=True).click()
        area = page.get_by_role("textbox", name="Text, with the cursor")
        await area.fill("add = \nprint(add)")
        await area.press("Control+Home")
        await area.press("End")
        await page.get_by_role("button", name="Fill in at the cursor").click()
        await expect(area).to_have_value("add = a + b\nprint(add)")
        await expect(page.get_by_text("This model has no fill-in-the-middle tokens")).to_be_visible()
        await page.wait_for_function("() => getSelection().toString() === 'a + b'")


async def test_error_of_a_completion_has_message_and_request_id(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions") as (page, watched),
    ):
        watched.allow("400")
        await page.get_by_label("Maximum tokens", exact=True).fill("-3")
        await page.get_by_role("button", name="Complete", exact=True).click()
        alert = page.get_by_role("alert").filter(has_text="max_tokens")
        await expect(alert).to_be_visible()
        await expect(alert).to_contain_text("Request id:")


# Responses


@pytest_asyncio.fixture(loop_scope="module")
async def stored(config: Config) -> AsyncIterator[httpx.AsyncClient]:
    """A server with a chain of responses that branches, and a conversation."""
    async with server(FakeEngine("Lilacs."), config, model=plain_model()) as http:

        async def respond(text: str, **more: object) -> str:
            answer = await http.post("/v1/responses", json={"input": text, **more})
            assert answer.status_code == 200, answer.text
            return str(answer.json()["id"])

        first = await respond("Which shrub?")
        second = await respond("And in June?", previous_response_id=first)
        await respond("And in July?", previous_response_id=first)
        await respond("Shorter!", previous_response_id=second)
        conversation = (await http.post("/v1/conversations", json={"metadata": {"topic": "plants"}})).json()["id"]
        await respond("Hello there", conversation=conversation)
        yield http


@SIZES
async def test_responses_are_a_tree_with_items(
    browser: Browser, stored: httpx.AsyncClient, size: tuple[int, int]
) -> None:
    async with open_page(browser, address(stored), path="/responses", size=size) as (page, _):
        rows = page.locator(".tree-row")
        await expect(rows).to_have_count(5)
        names = [(await row.locator(".tree-text").first.inner_text()).split("\n")[-1] for row in await rows.all()]
        depths = [re.findall(r"depth-(\d)", await row.get_attribute("class") or "")[0] for row in await rows.all()]
        expected = {"Hello there": "0", "Which shrub?": "0", "And in June?": "1", "Shorter!": "2", "And in July?": "1"}
        assert dict(zip(names, depths, strict=True)) == expected
        assert names.index("Shorter!") == names.index("And in June?") + 1
        await check_page(page)
        await page.get_by_role("link", name="And in June?").click()
        detail = page.locator("section", has=page.get_by_role("heading", name="Response", exact=True))
        await expect(detail.locator(".item")).to_have_count(2)
        await expect(detail.locator(".item").nth(0)).to_contain_text("And in June?")
        await expect(detail.locator(".item").nth(1)).to_contain_text("Lilacs.")
        await expect(detail.get_by_text("Continues")).to_be_visible()
        await check_page(page)
        await detail.get_by_role("button", name="Delete", exact=True).click()
        await page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        await expect(rows).to_have_count(4)


async def test_responses_are_filtered(browser: Browser, stored: httpx.AsyncClient) -> None:
    async with open_page(browser, address(stored), path="/responses") as (page, _):
        await expect(page.locator(".tree-row")).to_have_count(5)
        await page.get_by_label("Status", exact=True).select_option("failed")
        await expect(page.get_by_role("heading", name="None is like that")).to_be_visible()
        await page.get_by_label("Status", exact=True).select_option("completed")
        await expect(page.locator(".tree-row")).to_have_count(5)


@SIZES
async def test_conversations_are_listed_and_deleted(
    browser: Browser, stored: httpx.AsyncClient, size: tuple[int, int]
) -> None:
    async with open_page(browser, address(stored), path="/responses", size=size) as (page, _):
        await page.get_by_role("tab", name="Conversations", exact=True).click()
        await expect(page.get_by_text("topic: plants", exact=True)).to_be_attached()
        await check_page(page)
        await page.get_by_role("link", name=re.compile("^conv_")).click()
        await expect(page.locator(".item")).to_have_count(2)
        await expect(page.locator(".item").first).to_contain_text("Hello there")
        await page.get_by_role("button", name=re.compile("^Delete conv_")).click()
        await page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        await expect(page.get_by_role("heading", name="No conversations")).to_be_visible()


async def test_background_response_keeps_reasoning_apart_from_the_answer(browser: Browser, config: Config) -> None:
    engine = FakeEngine("<think>Which one?</think>" + "word " * 5000, delay=0.05, at_once=5)
    async with (
        server(engine, config, model=reasoning_model()) as http,
        open_page(browser, address(http), path="/responses") as (page, _),
    ):
        body = {"input": "Write a story", "max_output_tokens": 4000, "background": True}
        id = (await http.post("/v1/responses", json=body)).json()["id"]
        await page.goto(f"{address(http)}/#/responses/responses/{id}")
        await expect(page.get_by_text("pieces of text so far")).to_be_visible()
        items = page.locator("section", has=page.get_by_role("heading", name="Output", exact=True)).locator(".item")
        reasoning = items.filter(has_text="reasoning")
        answer = items.filter(has_text="assistant")
        await expect(answer.locator(".item-text")).to_contain_text("word word")
        await expect(reasoning.locator(".item-text")).to_have_text("Which one?")
        await expect(answer).not_to_contain_text("Which")
        assert (await http.post(f"/v1/responses/{id}/cancel")).status_code == 200
        await expect(page.get_by_role("progressbar")).to_have_count(0)


async def test_items_that_a_conversation_gets_are_shown(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions") as (page, _),
    ):
        id = (await http.post("/v1/conversations", json={})).json()["id"]
        await page.clock.install()
        await page.goto(f"{address(http)}/#/responses/conversations/{id}")
        await expect(page.get_by_text("None.", exact=True)).to_be_visible()
        item = {"type": "message", "role": "user", "content": "Are you there?"}
        added = await http.post(f"/v1/conversations/{id}/items", json={"items": [item]})
        assert added.status_code == 200, added.text
        await pass_time(page, page.get_by_text("Are you there?"))


# Batches


async def create_batch(page: Page, prompts: str) -> None:
    await page.get_by_role("button", name="Create batch").first.click()
    dialog = page.get_by_role("dialog", name="Create a batch")
    await dialog.get_by_role("textbox", name="Prompts").fill(prompts)
    await expect(dialog.get_by_text("2 requests", exact=True)).to_be_visible()
    await check_page(page)
    await dialog.get_by_role("button", name="Create", exact=True).click()
    await expect(dialog).to_have_count(0)


@SIZES
async def test_batch_of_prompts_runs_and_its_output_is_downloaded(
    browser: Browser, config: Config, size: tuple[int, int]
) -> None:
    async with (
        server(FakeEngine("Done."), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/batches", size=size) as (page, _),
    ):
        await expect(page.get_by_role("heading", name="No batches yet")).to_be_visible()
        await create_batch(page, "First\n\nSecond")
        await expect(page.get_by_text("completed", exact=True)).to_be_attached()
        await expect(page.get_by_text("2 of 2", exact=True)).to_be_attached()
        await check_page(page)
        async with page.expect_download() as download:
            await choose(page, page.get_by_role("button", name="Actions of batch_"), "Output")
        lines = [json.loads(line) for line in await read_download(await download.value)]
        assert [line["custom_id"] for line in lines] == ["1", "2"]
        assert lines[0]["response"]["body"]["choices"][0]["message"]["content"] == "Done."
        await page.get_by_role("tab", name="Files", exact=True).click()
        actions = page.get_by_role("button", name="Actions of prompts.jsonl", exact=True)
        await choose(page, actions, "Delete")
        await page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        await expect(actions).to_have_count(0)


async def test_batch_of_an_uploaded_file_shows_why_it_failed(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("Done."), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/batches") as (page, _),
    ):
        await page.get_by_role("button", name="Create batch").first.click()
        await page.get_by_role("tab", name="Upload a file", exact=True).click()
        files = {"name": "bad.jsonl", "mimeType": "text/plain", "buffer": b"{not json\n"}
        await page.get_by_label("File of requests").set_input_files(files)  # type: ignore[arg-type]
        await page.get_by_role("dialog").get_by_role("button", name="Create", exact=True).click()
        await expect(page.get_by_text("failed", exact=True)).to_be_visible()
        await expect(page.locator(".field-error").first).not_to_be_empty()


# Embeddings


@SIZES
async def test_lines_are_compared_in_a_matrix(browser: Browser, config: Config, size: tuple[int, int]) -> None:
    async with (
        server(FakeEngine(), config, model=embedding_model()) as http,
        open_page(browser, address(http), path="/embeddings", size=size) as (page, _),
    ):
        lines = ["ab", "ba", "abc"]
        await page.get_by_label("Texts, one on each line").fill("\n".join([*lines, ""]))
        await page.get_by_role("button", name="Compare", exact=True).click()
        cells = page.locator(".matrix tbody td")
        await expect(cells).to_have_count(9)
        answer = (await http.post("/v1/embeddings", json={"input": lines})).json()["data"]
        vectors = [each["embedding"] for each in answer]
        expected = [f"{sum(map(math.prod, zip(a, b, strict=True))):.2f}" for a in vectors for b in vectors]
        assert [float(text) for text in await cells.all_inner_texts()] == pytest.approx(
            [*map(float, expected)], abs=0.011
        )
        await expect(page.get_by_text("Most similar", exact=True)).to_be_visible()
        colors = [await cells.nth(each).evaluate("(cell) => getComputedStyle(cell).backgroundColor") for each in (0, 1)]
        assert colors[0] == "rgba(0, 0, 0, 0)"  # of a line with itself
        assert colors[1] != colors[0]
        await check_page(page)


async def test_embeddings_page_without_a_model_says_what_to_do(browser: Browser, config: Config) -> None:
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http), path="/embeddings") as (page, _),
    ):
        await expect(page.get_by_role("heading", name="No embedding model")).to_be_visible()
        await expect(page.get_by_text("--embedding-model embedding", exact=True)).to_be_visible()
