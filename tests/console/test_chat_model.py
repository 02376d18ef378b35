"""The Chat page with a real model: branches, tools, schemas, comparison, code, keys, and a server that goes away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, Locator, Page, expect

from tests.console.axe import check_page
from tests.console.browser import PHONE, open_page
from tests.e2e.sdk import OPENAI_JS, OPENAI_PYTHON, node_with, python_with
from tests.e2e.server import Server, serve

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = ("--served-model-name", "smollm2", "--max-model-len", "2048", "--requests-per-minute", "0")
BOOLEAN = '{"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}'


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with serve(*SETTINGS) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Browser, shared: Server) -> AsyncIterator[Page]:
    async with open_page(browser, shared.url) as (opened, _):
        await expect(opened.get_by_label("temperature", exact=True)).to_be_visible()
        await opened.get_by_label("temperature", exact=True).fill("0")
        await opened.get_by_label("max_completion_tokens", exact=True).fill("24")
        yield opened


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="smollm2", exact=True)


async def finished(page: Page, count: int = 1) -> None:
    await expect(page.locator(".message.assistant .figures")).to_have_count(count)


async def test_chat_branches_from_another_token(page: Page) -> None:
    await page.get_by_role("toolbar").get_by_role("button", name="Tokens", exact=True).click()
    await ask(page, "What is the capital of France?")
    await finished(page)
    before = await page.locator(".token-text").inner_text()
    await page.locator(".token").nth(2).click()
    other = page.locator(".alternatives button").first
    chosen = (await other.locator("code").inner_text()).replace("␣", " ")
    await other.click()
    await expect(answers(page).get_by_text("2 / 2", exact=True)).to_be_visible()
    await finished(page)
    first = "".join(await page.locator(".token").all_inner_texts())
    assert first != before
    assert (await page.locator(".token").nth(2).inner_text()).strip() == chosen.strip()


async def test_chat_edits_into_a_branch_and_keeps_both(page: Page) -> None:
    await ask(page, "Say one.")
    await finished(page)
    await page.get_by_role("article", name="You", exact=True).get_by_role("button", name="Edit", exact=True).click()
    await page.get_by_label("Edit the message").fill("Say two.")
    await page.get_by_role("button", name="Save as a new branch").click()
    await expect(page.get_by_role("article", name="You", exact=True)).to_contain_text("Say two.")
    await finished(page)
    await page.get_by_role("button", name="Previous branch").click()
    await expect(page.get_by_role("article", name="You", exact=True)).to_contain_text("Say one.")


async def test_chat_compares_two_settings(page: Page) -> None:
    await page.get_by_role("toolbar").get_by_role("button", name="Compare", exact=True).click()
    tab = page.get_by_role("tab", name="Thread B", exact=True)
    await tab.click()
    await expect(tab).to_have_attribute("aria-selected", "true")
    await page.get_by_label("max_completion_tokens", exact=True).fill("2")
    await ask(page, "Count from one to ten.")
    await finished(page, 2)
    second = page.get_by_role("region", name="Thread B", exact=True)
    await expect(second.get_by_text("Out2", exact=True)).to_be_visible()
    first = page.get_by_role("region", name="Thread A", exact=True)
    await expect(first.get_by_text("Out2", exact=True)).to_have_count(0)


async def test_chat_loads_another_model_and_compares_two(page: Page, shared: Server) -> None:
    async with httpx.AsyncClient(base_url=shared.url, timeout=60) as http:
        (await http.put("/admin/models/spare", json={"path": "default", "max_model_len": 256})).raise_for_status()
        try:
            picker = page.get_by_role("toolbar").get_by_label("Model", exact=True)
            await expect(picker.get_by_role("option", name="spare (cold)", exact=True)).to_be_attached()
            await picker.select_option("spare")
            settings, badge = page.get_by_role("complementary", name="Settings"), page.locator(".chat-model .badge")
            await expect(badge).to_have_text("cold")
            await expect(settings.get_by_text("256 tokens of context", exact=True)).to_be_visible()
            await settings.get_by_role("button", name="Load now", exact=True).click()
            await expect(badge).to_have_text("loaded")
            await expect(settings.get_by_role("button", name="Load now", exact=True)).to_have_count(0)

            await page.get_by_role("toolbar").get_by_role("button", name="Compare", exact=True).click()
            await page.get_by_label("Model of thread B", exact=True).select_option("smollm2")
            await ask(page, "What is the capital of France?")
            await finished(page, 2)
            for name, model in (("Thread A", "spare"), ("Thread B", "smollm2")):
                thread = page.get_by_role("region", name=name, exact=True)
                await expect(thread.get_by_role("article", name=model, exact=True)).to_have_count(1)
        finally:
            (await http.delete("/admin/models/spare")).raise_for_status()


async def test_tool_call_is_answered_by_hand(page: Page) -> None:
    await page.get_by_role("button", name="Example", exact=True).click()
    await page.get_by_label("Tool choice", exact=True).select_option("get_weather")
    await ask(page, "What is the weather in Paris?")
    call = page.get_by_role("region", name="Call of get_weather")
    await expect(call).to_contain_text("city")
    await page.get_by_label("Tool choice", exact=True).select_option("none")
    await page.get_by_label(re.compile("Result of")).fill('{"temperature": 21}')
    await page.get_by_role("button", name="Send result", exact=True).click()
    await finished(page, 2)
    await expect(page.get_by_role("article", name="Tool", exact=True)).to_contain_text("21")


async def test_tools_that_are_not_valid_are_named(page: Page) -> None:
    await page.get_by_label("Functions", exact=True).fill('[{"type": "function", "function": {"name": "no spaces!"}}]')
    await expect(page.locator(".field-error")).to_be_visible()


async def test_structured_answer_is_validated(page: Page) -> None:
    await page.get_by_label("Format", exact=True).select_option("json_schema")
    await page.get_by_label("Schema", exact=True).fill(BOOLEAN)
    await ask(page, "Is water wet?")
    await expect(answers(page).get_by_text("Matches the schema", exact=True)).to_be_visible()


async def test_error_has_the_message_and_the_request_id(browser: Browser, shared: Server) -> None:
    async with open_page(browser, shared.url) as (page, watched):
        watched.allow("status of 400")
        await page.get_by_role("button", name="All parameters").click()
        await page.get_by_label("logit_bias", exact=True).fill('{"999999999": 1}')
        await ask(page, "Hello")
        alert = page.get_by_role("article").get_by_role("alert")
        await expect(alert).to_contain_text("logit_bias")
        await expect(alert).to_contain_text("Request id:")


async def test_code_runs_as_it_stands(page: Page, tmp_path: Path) -> None:
    await page.get_by_role("button", name="All parameters").click()
    await page.get_by_label("top_k", exact=True).fill("40")  # which the openai package has no argument for
    await ask(page, "It's a \"test\": say 'yes'.\nThen $HOME `ls` \\n.")
    await finished(page)
    shown = await answers(page).locator(".markdown").inner_text()
    await page.get_by_role("toolbar").get_by_role("button", name="Show code", exact=True).click()
    node, _ = node_with(*OPENAI_JS)
    commands = {
        "curl": (["bash"], "code.sh"),
        "Python": ([str(python_with(*OPENAI_PYTHON))], "code.py"),
        "JavaScript": ([node], "code.mjs"),
    }
    for name, (command, file) in commands.items():
        await page.get_by_role("tab", name=name, exact=True).click()
        code = page.get_by_role("dialog").get_by_role("region", name=name, exact=True).locator("code")
        (tmp_path / file).write_text(await code.inner_text())
        process = await asyncio.create_subprocess_exec(
            *command, str(tmp_path / file), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
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
    await page.get_by_role("toolbar").get_by_role("button", name="Conversations", exact=True).click()
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
    await expect(page.get_by_role("article", name="You", exact=True)).to_contain_text("Remember this.")


@pytest.mark.parametrize("size", [(1280, 800), PHONE], ids=["desktop", "phone"])
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
