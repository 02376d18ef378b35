"""Actions of a conversation, most of them at the width of a phone, with an engine that says what the test wants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Browser, Locator, Page, expect

from syringa.config.specs import Prices
from tests.chat_models import plain_model, tool_model
from tests.client import eventually, server
from tests.console.browser import PHONE, open_page
from tests.console.test_chat import SteppedEngine, address, ask
from tests.fake_engine import FakeEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

BOOLEAN = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
# Text that is added to a conversation before its scroll event.
GROW = """
(messages) => {
  const text = document.createElement('p');
  text.style.paddingTop = '600px';
  text.textContent = 'More text';
  messages.firstElementChild.append(text);
  messages.dispatchEvent(new Event('scroll'));
}
"""
ALL_TOKENS = 10**6


def answer_of(page: Page) -> Locator:
    return page.get_by_role("article", name="fake", exact=True)


def question_of(page: Page) -> Locator:
    return page.get_by_role("article", name="You", exact=True)


async def open_settings(page: Page) -> Locator:
    await page.get_by_role("toolbar").get_by_role("button", name="Settings", exact=True).click()
    dialog = page.get_by_role("dialog", name="Settings", exact=True)
    await expect(dialog.get_by_label("Format", exact=True)).to_be_visible()
    return dialog


async def close_dialog(page: Page) -> None:
    await page.get_by_role("dialog").get_by_role("button", name="Close", exact=True).click()
    await expect(page.get_by_role("dialog")).to_have_count(0)


async def check_width(page: Page) -> None:
    """Assert that nothing makes the page wider than a phone."""
    assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


async def test_phone_stops_regenerates_edits_and_deletes(browser: Browser) -> None:
    engine = SteppedEngine("word " * 50)
    engine.allowed = 4
    async with (
        server(engine, model=plain_model()) as http,
        open_page(browser, address(http), size=PHONE) as (page, _),
    ):
        answer, question = answer_of(page), question_of(page)
        await ask(page, "Go on")
        await expect(answer.locator(".markdown")).to_have_text("word")
        await page.get_by_role("button", name="Stop", exact=True).click()
        await expect(answer.get_by_text("Stopped", exact=True)).to_be_visible()
        await expect(answer.get_by_text("Out4", exact=True)).to_be_visible()
        assert await eventually(lambda: engine.aborted)
        engine.allowed = ALL_TOKENS
        await answer.get_by_role("button", name="Regenerate").click()
        await expect(answer.get_by_text("2 / 2", exact=True)).to_be_visible()
        await expect(answer.get_by_text("Out251", exact=True)).to_be_visible()
        await check_width(page)

        await question.get_by_role("button", name="Edit", exact=True).click()
        await page.get_by_label("Edit the message").fill("Go on, please")
        await page.get_by_role("button", name="Save as a new branch").click()
        await expect(question.get_by_text("2 / 2", exact=True)).to_be_visible()
        await expect(answer.get_by_text("Out251", exact=True)).to_be_visible()
        await check_width(page)
        await question.get_by_role("button", name="Previous branch").click()
        await expect(question.locator(".user-text")).to_have_text("Go on")
        await expect(answer.get_by_text("2 / 2", exact=True)).to_be_visible()

        # What is deleted has the previous branch in its place, and nothing where there is none.
        await answer.get_by_role("button", name="Delete this and what follows").click()
        await expect(answer.get_by_text("Stopped", exact=True)).to_be_visible()
        await expect(answer.get_by_role("button", name="Previous branch")).to_have_count(0)
        await question.get_by_role("button", name="Delete this and what follows").click()
        await expect(question.locator(".user-text")).to_have_text("Go on, please")
        await question.get_by_role("button", name="Delete this and what follows").click()
        await expect(page.get_by_role("article")).to_have_count(0)
        await expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()


async def test_phone_answers_tool_calls_and_checks_schemas(browser: Browser) -> None:
    engine = FakeEngine(CALL)
    async with (
        server(engine, model=tool_model(prices=Prices(input=0.0, output=1_000_000.0))) as http,
        open_page(browser, address(http), size=PHONE) as (page, _),
    ):
        settings = await open_settings(page)
        await settings.get_by_role("button", name="Example", exact=True).click()
        await close_dialog(page)
        await ask(page, "What is the weather in Paris?")
        await expect(page.get_by_role("region", name="Call of get_weather")).to_contain_text('"city": "Paris"')
        engine.script = b"It is mild."
        await page.get_by_label(re.compile("Result of")).fill('{"temperature": 21}')
        await page.get_by_role("button", name="Send result", exact=True).click()
        await expect(page.get_by_role("article", name="Tool", exact=True)).to_contain_text("21")
        last = answer_of(page).last
        await expect(last.get_by_text("It is mild.", exact=True)).to_be_visible()
        await expect(last.get_by_text("Cost$12.00", exact=True)).to_be_visible()  # and an end token
        await check_width(page)

        settings = await open_settings(page)
        await settings.get_by_label("Functions", exact=True).fill("")
        await settings.get_by_label("Format", exact=True).select_option("json_schema")
        await settings.get_by_label("Schema", exact=True).fill(BOOLEAN)
        await close_dialog(page)
        for script, verdict in (('{"ok": true}', "Matches the schema"), ('{"ok": 1}', "Does not match the schema")):
            engine.script = script.encode()
            await ask(page, "Is it?")
            await expect(last.get_by_text(verdict, exact=True)).to_be_visible()
        await expect(last.locator(".schema-check")).to_contain_text("boolean")
        await check_width(page)

        await page.get_by_role("toolbar").get_by_role("button", name="Show code", exact=True).click()
        code = page.get_by_role("dialog").get_by_role("region", name="curl", exact=True)
        await expect(code).to_contain_text('"json_schema"')
        await check_width(page)


async def test_phone_compares_exports_and_imports(browser: Browser, tmp_path: Path) -> None:
    async with (
        server(FakeEngine("The same."), model=plain_model()) as http,
        open_page(browser, address(http), size=PHONE) as (page, _),
    ):
        toolbar = page.get_by_role("toolbar")
        await toolbar.get_by_role("button", name="Compare", exact=True).click()
        settings = await open_settings(page)
        tab = settings.get_by_role("tab", name="Thread B", exact=True)
        await tab.click()
        await expect(tab).to_have_attribute("aria-selected", "true")
        await settings.get_by_label("max_completion_tokens", exact=True).fill("3")
        await close_dialog(page)
        await ask(page, "Compare yourself")
        for name, text in (("Thread A", "The same."), ("Thread B", "The")):
            thread = page.get_by_role("region", name=name, exact=True)
            await thread.scroll_into_view_if_needed()
            await expect(thread.get_by_role("article", name="fake").locator(".markdown")).to_have_text(text)
        await expect(page.locator(".figures")).to_have_count(2)
        await check_width(page)

        await toolbar.get_by_role("button", name="Conversations", exact=True).click()
        dialog = page.get_by_role("dialog", name="Conversations", exact=True)
        async with page.expect_download() as download:
            await dialog.get_by_role("button", name="Export", exact=True).click()
        path = tmp_path / "exported.json"
        await (await download.value).save_as(path)
        await dialog.get_by_role("button", name="Delete Compare yourself", exact=True).click()
        sure = page.get_by_role("dialog", name="Delete this conversation?", exact=True)
        await sure.get_by_role("button", name="Delete", exact=True).click()
        await expect(page.get_by_role("article")).to_have_count(0)
        await dialog.get_by_label("Import a conversation", exact=True).set_input_files(path)
        await expect(question_of(page)).to_have_text([re.compile("Compare yourself")] * 2)
        await check_width(page)


async def test_tokens_show_alternatives_on_hover_and_are_laid_out_in_blocks(browser: Browser) -> None:
    text = "A line of text.\n" * 40
    async with (
        server(FakeEngine(text), model=plain_model()) as http,
        open_page(browser, address(http)) as (page, _),
    ):
        await page.get_by_role("toolbar").get_by_role("button", name="Tokens", exact=True).click()
        await ask(page, "Write")
        await expect(page.locator(".figures")).to_be_visible()
        tokens = page.locator(".token")
        assert "".join(await tokens.all_inner_texts()).replace("↵", "") == text + "<end>"
        blocks = page.locator(".token-text > div")  # of 200 tokens, up to the end of a line
        assert [await each.locator(".token").count() for each in await blocks.all()] == [208, 208, 208, 17]
        alternatives = page.get_by_role("group", name="Alternatives", exact=True)
        await tokens.nth(613).hover()
        await expect(alternatives.locator(".chosen code")).to_have_text(text[613])
        await expect(alternatives.get_by_role("listitem")).to_have_count(5)
        await expect(alternatives.get_by_role("button")).to_have_count(0)  # only once a click keeps them open
        await page.get_by_label("Message", exact=True).hover()
        await expect(alternatives).to_have_count(0)


async def test_answer_of_a_hundred_thousand_tokens_is_shown_whole_and_followed(browser: Browser) -> None:
    lines = [f"Line {number} has **bold** words, and `code`.\n\n" for number in range(2500)]
    text = "".join(lines)[:99_990] + "\n\nThe end."
    engine = FakeEngine(text, at_once=50)
    async with (
        server(engine, model=plain_model(max_model_len=200_000)) as http,
        open_page(browser, address(http)) as (page, _),
    ):
        await ask(page, "Write a book")
        answer = answer_of(page)
        await expect(answer.get_by_text("Out100,001", exact=True)).to_be_visible()
        await expect(answer.get_by_text("The end.", exact=True)).to_be_in_viewport()
        # A scroll event that comes after more text is not the reader's.
        end, messages = page.get_by_role("button", name="Go to the end"), page.get_by_role("log", name="Messages")
        await messages.evaluate(GROW)
        await expect(page.get_by_text("More text", exact=True)).to_be_in_viewport()
        await expect(end).to_have_count(0)
        await messages.hover()
        await page.mouse.wheel(0, -2000)
        await end.click()
        await expect(page.get_by_text("More text", exact=True)).to_be_in_viewport()
        await expect(answer.locator("p").first).to_have_text("Line 0 has bold words, and code.")
        await expect(answer.locator("p")).to_have_count(text.count("\n\n") + 1)
