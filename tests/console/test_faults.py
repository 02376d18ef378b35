"""Faults that a review of the console found, each as the user met it."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, Page, Route, expect

from syringa.config import Config
from tests.chat_models import plain_model
from tests.client import eventually, server, until
from tests.console.browser import open_page, stay_within_a_day
from tests.fake_engine import FakeEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

WIDE = (1500, 900)  # with the list of conversations
# How often a text has left the page.
COUNT_REMOVALS = """
(text) => {
  window.removals = 0;
  new MutationObserver((records) => {
    for (const each of records.flatMap((record) => [...record.removedNodes])) {
      if (each.textContent.includes(text)) window.removals += 1;
    }
  }).observe(document.body, { childList: true, subtree: true });
}
"""
# A page that is not served over HTTPS has no clipboard; the test reads what was copied with the real one.
WITHOUT_CLIPBOARD = """
window.realClipboard = navigator.clipboard;
Object.defineProperty(navigator, 'clipboard', { value: undefined });
"""


def address(http: httpx.AsyncClient) -> str:
    return str(http.base_url).rstrip("/")


def with_database(tmp_path: Path) -> Config:
    return Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


async def test_number_input_keeps_the_digits_as_they_are_typed(browser: Browser) -> None:
    async with server(FakeEngine("x"), model=plain_model()) as http, open_page(browser, address(http)) as (page, _):
        field = page.get_by_label("temperature", exact=True)
        for typed in ("1.05", "0.007"):
            await field.fill("")
            await field.press_sequentially(typed)
            await expect(field).to_have_value(typed)


async def test_deleted_conversation_stays_deleted_while_it_was_streaming(browser: Browser) -> None:
    engine = FakeEngine("word " * 50)
    engine.pause()
    async with (
        server(engine, model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE) as (page, _),
    ):
        await ask(page, "Go on")
        conversation = page.get_by_role("button", name=re.compile("^Go on"))
        await expect(conversation).to_be_visible()
        await page.get_by_role("button", name="Delete Go on").click()
        await page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
        assert await eventually(lambda: engine.aborted)
        engine.resume()
        await expect(page.get_by_text("What would you like to know?")).to_be_visible()
        await ask(page, "Another")
        await expect(page.get_by_role("button", name=re.compile("^Another"))).to_be_visible()
        await expect(conversation).to_have_count(0)


async def test_conversation_that_streams_is_the_same_when_it_is_opened_again(browser: Browser) -> None:
    engine = FakeEngine("word " * 20)
    engine.pause()
    async with (
        server(engine, model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE) as (page, _),
    ):
        await ask(page, "Go on")
        conversation = page.get_by_role("button", name=re.compile("^Go on"))
        await expect(conversation).to_be_visible()
        await page.get_by_role("complementary").get_by_role("button", name="New chat").click()
        await expect(page.get_by_role("article")).to_have_count(0)
        await conversation.click()
        await expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
        await expect(page.get_by_text("Stopped")).to_have_count(0)
        engine.resume()
        await expect(page.get_by_role("article", name="fake").get_by_text("word word")).to_be_visible()


async def test_message_is_not_saved_as_a_branch_while_another_answer_streams(browser: Browser) -> None:
    engine = FakeEngine("Hello!")
    async with server(engine, model=plain_model()) as http, open_page(browser, address(http)) as (page, _):
        await ask(page, "First")
        await expect(page.get_by_text("Hello!")).to_be_visible()
        await page.get_by_role("article", name="You").get_by_role("button", name="Edit", exact=True).click()
        engine.pause()
        await ask(page, "Second")
        await expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
        await expect(page.get_by_role("button", name="Save as a new branch")).to_be_disabled()
        await page.get_by_label("Edit the message").press("Control+Enter")
        await expect(page.get_by_label("Edit the message")).to_be_visible()
        engine.resume()


async def test_imported_conversation_with_a_cycle_is_refused(browser: Browser) -> None:
    message = {"id": "a", "parent": None, "role": "user", "text": "Hi"}
    thread = {"messages": [message], "chosen": {"root": "a", "a": "a"}, "settings": {"tools": 5}}
    good = {"format": "syringa-conversation-1", "title": "Odd", "threads": [thread]}
    bad = {**good, "threads": [{**thread, "messages": [{**message, "parent": "b"}, {**message, "id": "b"}]}]}
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE, messages_stay=True) as (page, _),
    ):
        picker = page.get_by_label("Import a conversation")
        for data, said in ((bad, "before the one that it follows"), (good, "was imported")):
            await picker.set_input_files(
                {"name": "odd.json", "mimeType": "application/json", "buffer": json.dumps(data).encode()}
            )
            await expect(page.get_by_role("status").filter(has_text=said)).to_be_visible()
        await expect(page.get_by_role("article", name="You")).to_have_count(1)


async def test_address_that_cannot_be_decoded_has_a_page(browser: Browser) -> None:
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, address(http), path="/100%") as (page, _),
    ):
        await expect(page.get_by_role("heading", name="There is no page /100%")).to_be_visible()


async def test_server_error_at_the_start_is_shown_and_can_be_retried(browser: Browser) -> None:
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, address(http)) as (page, watched),
    ):
        watched.allow("500")

        async def fail(route: Route) -> None:
            await route.fulfill(status=500, json={"error": {"message": "The database is gone."}, "request_id": "req_7"})

        await page.route("**/v1/me", fail)
        await page.reload()
        alert = page.get_by_role("alert").filter(has_text="The database is gone.")
        await expect(alert).to_contain_text("Request id: req_7")
        await page.unroute("**/v1/me")
        await page.get_by_role("button", name="Try again", exact=True).click()
        await expect(page.get_by_label("Message", exact=True)).to_be_visible()


async def test_key_that_no_header_can_carry_is_refused_by_name(browser: Browser) -> None:
    config = Config(port=0, drain_timeout=1.0, api_key=("sk-right",))
    async with (
        server(FakeEngine("x"), config, model=plain_model()) as http,
        open_page(browser, address(http)) as (page, watched),
    ):
        watched.allow("401")
        await page.get_by_label("API key", exact=True).fill("sk-righ…")
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await expect(page.locator(".field-error")).to_contain_text("characters")
        await page.get_by_label("API key", exact=True).fill("sk-wrong")
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await expect(page.locator(".field-error")).to_contain_text("Request id: ")
        await expect(page.get_by_text("The server is away.")).to_have_count(0)


async def test_proxy_without_a_server_does_not_count_as_one(browser: Browser) -> None:
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, address(http)) as (page, watched),
    ):
        await expect(page.get_by_label("Message", exact=True)).to_be_visible()
        watched.allow("502")
        asked = 0

        async def refuse(route: Route) -> None:
            nonlocal asked
            asked += route.request.url.endswith("/health")
            await route.fulfill(status=502, body="Bad Gateway")

        await page.route(re.compile("/(v1|health)"), refuse)
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        away = page.get_by_text("The server is away.")
        await expect(away).to_be_visible()
        await page.evaluate(COUNT_REMOVALS, "The server is away.")
        before = asked
        assert await eventually(lambda: asked >= before + 2)
        assert await page.evaluate("window.removals") == 0
        await page.unroute_all()
        await expect(away).to_have_count(0)


async def test_key_is_copied_without_a_clipboard_and_focus_returns(browser: Browser, tmp_path: Path) -> None:
    async with (
        server(FakeEngine("x"), with_database(tmp_path), model=plain_model()) as http,
        open_page(browser, address(http), messages_stay=True, permissions=["clipboard-read", "clipboard-write"]) as (
            page,
            _,
        ),
    ):
        await page.add_init_script(WITHOUT_CLIPBOARD)
        await page.goto(f"{address(http)}/#/keys")
        await page.reload()
        create = page.get_by_role("button", name="Create key").first
        await create.click()
        await page.get_by_role("dialog").get_by_label("Organization", exact=True).press("Escape")
        await expect(page.get_by_role("dialog")).to_have_count(0)
        await expect(create).to_be_focused()
        await create.click()
        await page.get_by_role("dialog").get_by_label("Organization", exact=True).fill("acme")
        await page.get_by_role("button", name="Create", exact=True).click()
        dialog = page.get_by_role("dialog", name="Copy the key now")
        key = await dialog.get_by_role("textbox").input_value()
        await dialog.get_by_role("button", name="Copy", exact=True).click()
        await expect(dialog.get_by_role("button", name="Copied")).to_be_focused()
        assert await page.evaluate("window.realClipboard.readText()") == key


async def test_usage_chart_is_by_day_of_utc_and_in_the_unit_of_its_measure(browser: Browser, tmp_path: Path) -> None:
    await stay_within_a_day()
    async with (
        server(FakeEngine("Hi!"), with_database(tmp_path), model=plain_model()) as http,
        open_page(browser, address(http), timezone_id="America/Los_Angeles") as (page, _),
    ):
        await http.post("/v1/completions", json={"prompt": "Hi"})

        async def is_written() -> bool:
            return bool((await http.get("/admin/usage")).json()["data"])

        await until(is_written)
        await page.goto(f"{address(http)}/#/usage")
        legend = page.locator(".u-legend")
        today = datetime.now(UTC)
        await expect(legend).to_contain_text(f"{today:%b} {today.day}, {today.year}")
        await expect(legend.locator(".u-series").nth(1).locator(".u-value")).to_have_text("1")
        await page.get_by_label("Show", exact=True).select_option("cost")
        await expect(legend.locator(".u-series").nth(1).locator(".u-value")).to_have_text("$0")


async def test_completion_ends_when_its_page_is_left(browser: Browser) -> None:
    engine = FakeEngine("word " * 50)
    engine.pause()
    async with (
        server(engine, model=plain_model()) as http,
        open_page(browser, address(http), path="/completions") as (page, _),
    ):
        await page.get_by_role("button", name="Complete", exact=True).click()
        await expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
        await page.get_by_role("link", name="Status", exact=True).click()
        assert await eventually(lambda: engine.aborted)
        engine.resume()


async def test_times_and_prices_are_rounded_to_what_is_read(browser: Browser) -> None:
    async with server(FakeEngine("x"), model=plain_model()) as http, open_page(browser, address(http)) as (page, _):
        shown = await page.evaluate(
            """async () => {
              const { money, seconds } = await import('./console/format.js');
              return [seconds(0.9996), seconds(59.97), seconds(119.7), money(5e-7), money(12345.6)];
            }"""
        )
        assert shown == ["1.00 s", "1 min 0 s", "2 min 0 s", "$0.0000005", "$12,345.60"]
