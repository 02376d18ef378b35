"""The Chat page with a real model: every action, on a desktop and on a phone, without keys and with them.

SmolLM2 neither thinks nor reads images: `real_server.py` has models for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from tests.console.axe import check_page
from tests.console.browser import DESKTOP, PHONE, open_page
from tests.console.real_server import RealServer
from tests.console.test_chat import DRAG, PASTE, PIXEL
from tests.e2e.sdk import OPENAI_JS, OPENAI_PYTHON, node_with, python_with
from tests.e2e.server import Server, serve

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = ("--served-model-name", "smollm2", "--max-model-len", "2048", "--requests-per-minute", "0")
BOOLEAN = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'
WIDE = 1180  # px, from which on the settings are beside the messages
LONG = "3000"  # tokens, which take so long that an answer is stopped before
# A function whose arguments take as long.
ESSAY = """[{"type": "function", "function": {"name": "save_essay", "parameters": {
    "type": "object", "properties": {"text": {"type": "string", "minLength": 8000}}, "required": ["text"]
}}}]"""
# Parameters of sampling that one request can have: what is typed, and what is sent.
SAMPLING: dict[str, tuple[str, Any]] = {
    "temperature": ("0.8", 0.8),
    "top_p": ("0.9", 0.9),
    "max_completion_tokens": ("12", 12),
    "seed": ("7", 7),
    "top_k": ("40", 40),
    "min_p": ("0.05", 0.05),
    "frequency_penalty": ("0.5", 0.5),
    "presence_penalty": ("-0.5", -0.5),
    "repetition_penalty": ("1.1", 1.1),
    "logit_bias": ('{"100": -5}', {"100": -5}),
    "stop": ("END", ["END"]),
    "bad_words": ("lilac\nshrub", ["lilac", "shrub"]),
    "dry_multiplier": ("0.8", 0.8),
    "dry_base": ("2", 2),
    "dry_allowed_length": ("3", 3),
    "dry_sequence_breakers": ("\\n\n.", ["\n", "."]),
    "min_tokens": ("3", 3),
    "stop_token_ids": ("[1]", [1]),
    "n": ("2", 2),
}
LEVELS_AND_COLORS = """
(all) => all.map((each) => [each.className.match(/level-\\d/)[0], getComputedStyle(each).backgroundColor])
"""
CHOSEN = {"ignore_eos": "false", "include_stop_str_in_output": "true", "skip_special_tokens": "false"}


@contextlib.asynccontextmanager
async def settings_of(page: Page) -> AsyncIterator[Locator]:
    """The settings: beside the messages, or in a dialog where there is no room."""
    is_wide = page.viewport_size is not None and page.viewport_size["width"] >= WIDE
    settings = page.get_by_role("complementary" if is_wide else "dialog", name="Settings", exact=True)
    if not is_wide:
        await toolbar_button(page, "Settings").click()
    await expect(settings.get_by_label("temperature", exact=True)).to_be_visible()
    yield settings
    if not is_wide:
        await settings.get_by_role("button", name="Close", exact=True).click()
        await expect(settings).to_have_count(0)


async def set_up(page: Page) -> None:
    """Make answers short and the same each time."""
    async with settings_of(page) as settings:
        await settings.get_by_label("temperature", exact=True).fill("0")
        await settings.get_by_label("max_completion_tokens", exact=True).fill("24")


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, real: RealServer, size: tuple[int, int]) -> AsyncIterator[Page]:
    async with real.page(browser, size) as (opened, _):
        await set_up(opened)
        yield opened
        await check_width(opened)


def toolbar_button(page: Page, name: str) -> Locator:
    return page.get_by_role("toolbar").get_by_role("button", name=name, exact=True)


async def check_width(page: Page) -> None:
    """Assert that nothing makes the page wider than its window."""
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


async def ask_at_length(page: Page, text: str, tokens: str = LONG) -> None:
    """Ask for an answer that does not end by itself before it has so many tokens."""
    async with settings_of(page) as settings:
        await settings.get_by_label("max_completion_tokens", exact=True).fill(tokens)
        await settings.get_by_role("button", name="All parameters").click()
        await settings.get_by_label("ignore_eos", exact=True).select_option("true")
    await ask(page, text)


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="smollm2", exact=True)


def questions(page: Page) -> Locator:
    return page.get_by_role("article", name="You", exact=True)


async def finished(page: Page, count: int = 1) -> None:
    await expect(page.locator(".message.assistant .figures")).to_have_count(count)


async def figure(page: Page, name: str) -> str:
    """Return a figure below the only answer."""
    shown = page.locator(".figures div", has=page.locator("dt", has_text=re.compile(f"^{name}$")))
    return await shown.locator("dd").inner_text()


async def test_answer_streams_is_stopped_regenerated_and_deleted(page: Page) -> None:
    await ask_at_length(page, "Tell me a story.")
    answer = answers(page)
    await expect(answer).to_have_attribute("aria-busy", "true")
    await expect(answer.locator(".markdown")).not_to_be_empty()
    await page.get_by_role("button", name="Stop", exact=True).click()
    await expect(answer.get_by_text("Stopped", exact=True)).to_be_visible()
    assert 0 < int((await figure(page, "Out")).replace(",", "")) < int(LONG)
    assert await page.get_by_text(re.compile("^Cost")).count() == 0
    async with settings_of(page) as settings:
        await settings.get_by_label("max_completion_tokens", exact=True).fill("8")
    await answer.get_by_role("button", name="Regenerate", exact=True).click()
    await expect(answer.get_by_text("2 / 2", exact=True)).to_be_visible()
    await finished(page)
    await expect(answer.get_by_text("Cut at the maximum length", exact=True)).to_be_visible()
    await answer.get_by_role("button", name="Previous branch").click()
    await expect(answer.get_by_text("Stopped", exact=True)).to_be_visible()
    await questions(page).get_by_role("button", name="Delete this and what follows").click()
    await expect(page.get_by_role("article")).to_have_count(0)
    await page.get_by_role("button", name="Undo", exact=True).click()
    await expect(answer.get_by_text("1 / 2", exact=True)).to_be_visible()


async def test_answer_has_tokens_cost_and_times(page: Page) -> None:
    await ask_at_length(page, "Tell me a story.", "300")  # those of a short answer may arrive at once
    await finished(page)
    tokens = [int(await figure(page, name)) for name in ("In", "Out")]
    assert tokens[1] == 300
    assert await figure(page, "Cost") == f"${tokens[0] + 2 * tokens[1]:.2f}"
    assert re.fullmatch(r"[\d.]+ m?s", await figure(page, "First token"))
    assert re.fullmatch(r"[\d,.]+ tok/s", await figure(page, "Speed"))


async def test_system_prompt_is_sent_and_counted(page: Page) -> None:
    await ask(page, "Who are you?")
    await finished(page)
    before = int(await figure(page, "In"))
    async with settings_of(page) as settings:
        await settings.get_by_label("System prompt", exact=True).fill(" ".join(["You are a gardener."] * 40))
    await answers(page).get_by_role("button", name="Regenerate", exact=True).click()
    await expect(answers(page).get_by_text("2 / 2", exact=True)).to_be_visible()
    await finished(page)
    assert int(await figure(page, "In")) > before + 100


async def test_every_sampling_parameter_is_sent_and_accepted(page: Page) -> None:
    async with settings_of(page) as settings:
        await settings.get_by_role("button", name="All parameters").click()
        for name, (typed, _) in SAMPLING.items():
            await settings.get_by_label(name, exact=True).fill(typed)
        for name, value in CHOSEN.items():
            await settings.get_by_label(name, exact=True).select_option(value)
    async with page.expect_request("**/v1/chat/completions") as request:
        await ask(page, "Name a tree.")
    sent = (await request.value).post_data_json
    expected = {name: value for name, (_, value) in SAMPLING.items()}
    expected |= {name: value == "true" for name, value in CHOSEN.items()}
    assert {name: sent[name] for name in expected} == expected
    await finished(page)
    await expect(answers(page).get_by_text("1 / 2", exact=True)).to_be_visible()  # n
    await expect(page.get_by_role("article").get_by_role("alert")).to_have_count(0)


async def test_answer_of_a_seed_is_the_same_again(page: Page) -> None:
    async with settings_of(page) as settings:
        await settings.get_by_label("temperature", exact=True).fill("1")
        await settings.get_by_label("seed", exact=True).fill("7")
    texts = []
    await ask(page, "Tell me a story.")
    for branch in (1, 2, 3):
        if branch > 1:
            await answers(page).get_by_role("button", name="Regenerate", exact=True).click()
            await expect(answers(page).get_by_text(f"{branch} / {branch}", exact=True)).to_be_visible()
        await finished(page)
        texts.append(await answers(page).locator(".markdown").inner_text())
        if branch == 2:
            async with settings_of(page) as settings:
                await settings.get_by_label("seed", exact=True).fill("8")
    assert texts[0] == texts[1] != texts[2]


async def test_tokens_have_colors_and_alternatives_to_branch_from(page: Page) -> None:
    await toolbar_button(page, "Tokens").click()
    await ask(page, "What is the capital of France?")
    await finished(page)
    tokens = page.locator(".token")
    before = await page.locator(".token-text").inner_text()
    shown = await page.locator(".token:not(.control)").evaluate_all(LEVELS_AND_COLORS)
    levels, colors = ({each[at] for each in shown} for at in (0, 1))
    assert len({*map(tuple, shown)}) == len(levels) == len(colors) > 1

    alternatives = page.get_by_role("group", name="Alternatives", exact=True)
    await tokens.nth(2).hover()
    await expect(alternatives.get_by_role("listitem")).to_have_count(5)
    await expect(alternatives.locator(".chosen .probability")).to_have_text(re.compile(r"^[\d.]+%$"))
    await tokens.nth(2).click()
    other = alternatives.get_by_role("button").first
    chosen = await other.locator("code").inner_text()
    await other.click()
    await expect(answers(page).get_by_text("2 / 2", exact=True)).to_be_visible()
    await finished(page)
    assert "".join(await tokens.all_inner_texts()) != before
    shown_there = await tokens.nth(2).inner_text()  # where spaces are not made visible, and lines are broken
    assert "".join(shown_there.split()) == "".join(chosen.replace("␣", " ").split())


async def test_question_is_edited_into_a_branch_and_both_are_kept(page: Page) -> None:
    await ask(page, "Say one.")
    await finished(page)
    await questions(page).get_by_role("button", name="Edit", exact=True).click()
    await page.get_by_label("Edit the message").fill("Say two.")
    await page.get_by_role("button", name="Save as a new branch").click()
    await expect(questions(page)).to_contain_text("Say two.")
    await finished(page)
    await page.get_by_role("button", name="Previous branch").click()
    await expect(questions(page)).to_contain_text("Say one.")


async def test_two_settings_are_compared(page: Page) -> None:
    await toolbar_button(page, "Compare").click()
    async with settings_of(page) as settings:
        tab = settings.get_by_role("tab", name="Thread B", exact=True)
        await tab.click()
        await expect(tab).to_have_attribute("aria-selected", "true")
        await settings.get_by_label("max_completion_tokens", exact=True).fill("2")
    await ask(page, "Count from one to ten.")
    await finished(page, 2)
    second = page.get_by_role("region", name="Thread B", exact=True)
    await expect(second.get_by_text("Out2", exact=True)).to_be_visible()
    first = page.get_by_role("region", name="Thread A", exact=True)
    await expect(first.get_by_text("Out2", exact=True)).to_have_count(0)


async def test_cold_model_is_chosen_loaded_and_compared_with_another(
    browser: Browser, real: RealServer, size: tuple[int, int]
) -> None:
    async with real.http() as http:
        (await http.post("/admin/models/thinking/unload")).raise_for_status()
    async with real.page(browser, size, admin=True) as (page, _):
        await set_up(page)
        picker = page.get_by_role("toolbar").get_by_label("Model", exact=True)
        await expect(picker.get_by_role("option", name="thinking (cold)", exact=True)).to_be_attached()
        await picker.select_option("thinking")
        badge = page.locator(".chat-model .badge")
        await expect(badge).to_have_text("cold")
        async with settings_of(page) as settings:
            await expect(settings.get_by_text("256 tokens of context", exact=True)).to_be_visible()
            await settings.get_by_role("button", name="Load now", exact=True).click()
            await expect(settings.locator(".badge", has_text="loaded")).to_be_visible()
            await expect(settings.get_by_role("button", name="Load now", exact=True)).to_have_count(0)
        await expect(badge).to_have_text("loaded")
        await toolbar_button(page, "Compare").click()
        await page.get_by_label("Model of thread B", exact=True).select_option("smollm2")
        await ask(page, "What is the capital of France?")
        await finished(page, 2)
        for name, model in (("Thread A", "thinking"), ("Thread B", "smollm2")):
            thread = page.get_by_role("region", name=name, exact=True)
            await expect(thread.get_by_role("article", name=model, exact=True)).to_have_count(1)


async def test_thoughts_are_folded(page: Page) -> None:
    """Of SmolLM2 with markers of reasoning, which it is made to write."""
    await page.get_by_role("toolbar").get_by_label("Model", exact=True).select_option("thinking")
    async with settings_of(page) as settings:
        await settings.get_by_role("button", name="All parameters").click()
        await settings.get_by_label("chat_template_kwargs", exact=True).fill('{"enable_thinking": true}')
        await settings.get_by_label("thinking_token_budget", exact=True).fill("8")
        await settings.get_by_label("min_tokens", exact=True).fill("20")
    await ask(page, "What is the capital of France?")
    await finished(page)
    answer = page.get_by_role("article", name="thinking", exact=True)
    toggle = answer.get_by_role("button", name="Thoughts", exact=True)
    await expect(toggle).to_have_attribute("aria-expanded", "false")
    await expect(answer.locator(".thoughts-text")).to_have_count(0)
    await expect(answer.locator(".markdown")).not_to_be_empty()
    await toggle.click()
    await expect(answer.locator(".thoughts-text")).not_to_be_empty()


async def test_images_are_pasted_dropped_and_read(browser: Browser, real: RealServer, size: tuple[int, int]) -> None:
    """By a small model of random weights. SmolLM2 reads none, and says so."""
    async with real.page(browser, size, messages_stay=True) as (page, _):
        await set_up(page)
        await attach_and_send(page)
        await check_width(page)


async def attach_and_send(page: Page) -> None:
    messages, message = page.get_by_role("log", name="Messages"), page.get_by_label("Message", exact=True)
    await expect(page.locator(".chat-model .badge")).to_have_text("loaded")
    await messages.evaluate(DRAG, ["drop", PIXEL, "image/png"])
    await expect(page.get_by_role("status").filter(has_text="smollm2 does not read images.")).to_be_visible()
    await expect(page.locator(".thumbnail")).to_have_count(0)
    await page.get_by_role("toolbar").get_by_label("Model", exact=True).select_option("vision")
    await expect(page.get_by_role("button", name="Attach images")).to_be_visible()
    await message.evaluate(PASTE, PIXEL)
    await expect(page.locator(".thumbnail")).to_have_count(1)
    await messages.evaluate(DRAG, ["drop", PIXEL, "image/png"])
    await expect(page.locator(".thumbnail")).to_have_count(2)
    await page.get_by_role("button", name="Remove image 2").click()
    await expect(page.locator(".thumbnail")).to_have_count(1)
    await ask(page, "What is it?")
    await expect(questions(page).get_by_role("img", name="Image 1")).to_be_visible()
    await finished(page)
    await expect(page.get_by_role("article", name="vision", exact=True).get_by_role("alert")).to_have_count(0)


async def test_tool_call_is_answered_by_hand(page: Page) -> None:
    async with settings_of(page) as settings:
        await settings.get_by_role("button", name="Example", exact=True).click()
        await settings.get_by_label("Tool choice", exact=True).select_option("get_weather")
    await ask(page, "What is the weather in Paris?")
    call = page.get_by_role("region", name="Call of get_weather")
    await expect(call).to_contain_text("city")
    await finished(page)
    async with settings_of(page) as settings:
        await settings.get_by_label("Tool choice", exact=True).select_option("none")
    await page.get_by_label(re.compile("Result of")).fill('{"temperature": 21}')
    await page.get_by_role("button", name="Send result", exact=True).click()
    await finished(page, 2)
    await expect(page.get_by_role("article", name="Tool", exact=True)).to_contain_text("21")


async def test_arguments_of_a_call_are_shown_while_they_stream(page: Page) -> None:
    async with settings_of(page) as settings:
        await settings.get_by_label("Functions", exact=True).fill('[{"type": "function", "function": {"name": "no!"}}]')
        await expect(settings.locator(".field-error")).to_be_visible()
        await settings.get_by_label("Functions", exact=True).fill(ESSAY)
        await expect(settings.locator(".field-error")).to_have_count(0)
        await settings.get_by_label("Tool choice", exact=True).select_option("save_essay")
        await settings.get_by_label("max_completion_tokens", exact=True).fill(LONG)
    await ask(page, "Save an essay on lilacs.")
    busy = page.locator("article[aria-busy=true]")
    await expect(busy.get_by_role("region", name="Call of save_essay").locator("pre")).to_contain_text("text")
    await page.get_by_role("button", name="Stop", exact=True).click()
    await expect(answers(page).get_by_text("Stopped", exact=True)).to_be_visible()
    await expect(page.get_by_label(re.compile("Result of"))).to_have_count(0)  # the call is not complete


async def test_structured_answer_is_validated(page: Page) -> None:
    async with settings_of(page) as settings:
        await settings.get_by_label("Format", exact=True).select_option("json_schema")
        await settings.get_by_label("Schema", exact=True).fill("{not JSON")
        await expect(settings.locator(".field-error")).to_be_visible()
        await settings.get_by_label("Schema", exact=True).fill(BOOLEAN)
        await expect(settings.locator(".field-error")).to_have_count(0)
    await ask(page, "Is water wet?")
    await expect(answers(page).get_by_text("Matches the schema", exact=True)).to_be_visible()


async def test_error_has_the_message_and_the_request_id(
    browser: Browser, real: RealServer, size: tuple[int, int]
) -> None:
    async with real.page(browser, size) as (page, watched):
        watched.allow("status of 400")
        async with settings_of(page) as settings:
            await settings.get_by_role("button", name="All parameters").click()
            await settings.get_by_label("logit_bias", exact=True).fill('{"999999999": 1}')
        await ask(page, "Hello")
        alert = page.get_by_role("article").get_by_role("alert")
        await expect(alert).to_contain_text("logit_bias")
        await expect(alert).to_contain_text("Request id:")


async def test_code_runs_as_it_stands(page: Page, real: RealServer, tmp_path: Path) -> None:
    async with settings_of(page) as settings:
        await settings.get_by_role("button", name="All parameters").click()
        await settings.get_by_label("top_k", exact=True).fill("40")  # which the openai package has no argument for
    await ask(page, "It's a \"test\": say 'yes'.\nThen $HOME `ls` \\n.")
    await finished(page)
    shown = await answers(page).locator(".markdown").inner_text()
    await toolbar_button(page, "Show code").click()
    node, _ = await asyncio.to_thread(node_with, *OPENAI_JS)
    python = await asyncio.to_thread(python_with, *OPENAI_PYTHON)
    commands = {
        "curl": (["bash"], "code.sh"),
        "Python": ([str(python)], "code.py"),
        "JavaScript": ([node], "code.mjs"),
    }
    variables = {"SYRINGA_API_KEY": real.key} if real.key else {}
    for name, (command, file) in commands.items():
        await page.get_by_role("tab", name=name, exact=True).click()
        code = page.get_by_role("dialog").get_by_role("region", name=name, exact=True).locator("code")
        written = await code.inner_text()
        assert not real.key or real.key not in written
        (tmp_path / file).write_text(written)
        process = await asyncio.create_subprocess_exec(
            *command,
            str(tmp_path / file),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | variables,
        )
        output, errors = await process.communicate()
        assert process.returncode == 0, (name, errors.decode())
        text = output.decode()
        if name == "curl":
            events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            text = "".join(
                each["delta"].get("content") or "" for event in events for each in json.loads(event)["choices"]
            )
        assert re.sub(r"\W+", "", text) == re.sub(r"\W+", "", shown), name


async def test_conversation_is_exported_and_imported(page: Page, tmp_path: Path) -> None:
    await ask(page, "Remember this.")
    await finished(page)
    await toolbar_button(page, "Conversations").click()
    dialog = page.get_by_role("dialog", name="Conversations", exact=True)
    await expect(dialog.get_by_text("Remember this.", exact=True)).to_be_visible()
    async with page.expect_download() as download:
        await dialog.get_by_role("button", name="Export", exact=True).click()
    path = tmp_path / "exported.json"
    await (await download.value).save_as(path)
    assert json.loads(path.read_text())["format"] == "syringa-conversation-1"
    await dialog.get_by_role("button", name="Delete Remember this.", exact=True).click()
    question = page.get_by_role("dialog", name="Delete this conversation?", exact=True)
    await question.get_by_role("button", name="Delete", exact=True).click()
    await expect(page.get_by_role("article")).to_have_count(0)
    await dialog.get_by_label("Import a conversation", exact=True).set_input_files(path)
    await expect(questions(page)).to_contain_text("Remember this.")
    await expect(answers(page)).to_have_count(1)


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with serve(*SETTINGS) as server:
        yield server


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_chat_is_accessible(browser: Browser, shared: Server, size: tuple[int, int], dark: bool) -> None:
    async with open_page(browser, shared.url, size=size, dark=dark) as (page, _):
        await expect(page.get_by_label("Message", exact=True)).to_be_visible()
        await check_page(page)
        await ask(page, "Hello")
        stop = page.get_by_role("button", name="Stop", exact=True)
        await stop.or_(page.locator(".figures")).first.wait_for()
        await stop.evaluate_all("(all) => all.forEach((each) => each.click())")  # the answer may have ended just now
        await expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        await check_page(page)
        await page.get_by_role("toolbar").get_by_role("button", name="Show code", exact=True).click()
        await expect(page.get_by_role("dialog", name="Show code").locator(".code-block")).to_be_visible()
        await check_page(page)


async def test_cold_model_is_loaded_by_the_first_message(browser: Browser) -> None:
    with serve(*SETTINGS) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            (await http.post("/admin/models/smollm2/unload", json={})).raise_for_status()
        async with open_page(browser, server.url) as (page, _):
            await expect(page.locator(".chat-model .badge")).to_have_text("cold")
            await page.evaluate(
                "new MutationObserver(() => {if (document.querySelector('.model-loading')) window.loadingShown = true})"
                ".observe(document.body, {subtree: true, childList: true})"
            )
            await page.get_by_label("max_completion_tokens", exact=True).fill("4")
            await ask(page, "Wake up")
            await finished(page)
            assert await page.evaluate("window.loadingShown")
            await expect(page.locator(".chat-model .badge")).to_have_text("loaded")


async def test_server_that_is_killed_and_comes_back(browser: Browser, tmp_path: Path) -> None:
    database = ("--database", str(tmp_path / "syringa.db"))
    with serve(*SETTINGS, *database) as server:
        port = server.url.rpartition(":")[2]
        async with open_page(browser, server.url) as (page, watched):
            watched.allow(
                "ERR_CONNECTION_REFUSED|ERR_CONNECTION_RESET|ERR_EMPTY_RESPONSE|ERR_INCOMPLETE_CHUNKED|ERR_SOCKET"
            )
            await ask(page, "Tell me a very long story.")
            await expect(page.locator(".caret")).to_be_visible()
            server.process.kill()
            await asyncio.to_thread(server.process.wait)
            await expect(page.get_by_text("The server is away.")).to_be_visible()
            await expect(page.get_by_role("article").get_by_role("alert")).to_be_visible()
            with serve(*SETTINGS, *database, "--port", port):
                await expect(page.get_by_text("The server is away.")).to_have_count(0)
                await page.get_by_label("max_completion_tokens", exact=True).fill("8")
                await page.get_by_role("article").get_by_role("button", name="Try again").click()
                await expect(answers(page).get_by_text("2 / 2", exact=True)).to_be_visible()
                await finished(page)


async def test_keys_of_two_organizations_and_a_revoked_one(browser: Browser) -> None:
    with serve(*SETTINGS) as server:
        async with (
            httpx.AsyncClient(base_url=server.url, timeout=60) as admin,
            open_page(browser, server.url) as (page, watched),
        ):
            watched.allow("401")
            await expect(page.get_by_label("Message", exact=True)).to_be_visible()
            keys = {}
            for organization in ("operators", "lilac", "privet"):
                body = {"organization": organization, "name": "browser", "admin": organization == "operators"}
                created = await admin.post("/admin/keys", json=body)
                keys[organization] = created.raise_for_status().json()
                admin.headers["authorization"] = f"Bearer {keys['operators']['key']}"
            # From its first key on, the server needs one: the page asks for it by itself.
            await expect(page.get_by_label("API key", exact=True)).to_be_visible()
            await page.get_by_label("API key", exact=True).fill(keys["lilac"]["key"])
            await page.get_by_role("button", name="Sign in", exact=True).click()
            await expect(page.locator(".organization")).to_have_text("lilac")
            await page.get_by_label("max_completion_tokens", exact=True).fill("4")
            await ask(page, "A secret of lilac")
            await finished(page)
            await page.get_by_role("button", name="Sign out").click()
            await page.get_by_label("API key", exact=True).fill(keys["privet"]["key"])
            await page.get_by_role("button", name="Sign in", exact=True).click()
            await expect(page.locator(".organization")).to_have_text("privet")
            await expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
            await page.get_by_role("toolbar").get_by_role("button", name="Conversations", exact=True).click()
            await expect(page.get_by_role("dialog").get_by_text("Conversations are kept")).to_be_visible()
            await page.keyboard.press("Escape")
            (await admin.delete(f"/admin/keys/{keys['privet']['id']}")).raise_for_status()
            await expect(page.get_by_label("API key", exact=True)).to_be_visible()  # by the next request of the page
            await expect(page.locator(".field-error")).to_be_visible()
