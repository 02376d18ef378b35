"""Faults of the Chat page that a review found, each as the user met it, and behavior that no other test covers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Locator, Page, Route, expect

import tests.client
from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.config import Config
from tests.chat_models import plain_model, tool_model, vision_model
from tests.client import server
from tests.console.browser import PHONE, open_page
from tests.console.test_chat import PASTE, PIXEL, SteppedEngine, address, ask
from tests.console.test_chat_actions import CALL, answer_of, question_of
from tests.fake_engine import FakeEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

WIDE = (1500, 900)  # with the list of conversations
# Whether the browser has stored a text this many times.
STORES = """
([text, times]) => new Promise((resolve) => {
  const opening = indexedDB.open('syringa');
  opening.onsuccess = () => {
    const reading = opening.result.transaction('conversations').objectStore('conversations').getAll();
    reading.onsuccess = () => resolve(JSON.stringify(reading.result).split(text).length > times);
    opening.result.close();
  };
})
"""
FINISHED = '"finishReason":"stop"'
# Values of types that a message does not have.
ODD = {
    "images": [5],
    "toolCalls": [None],
    "tokens": [{}],
    "error": {"message": {}},
    "stats": {"firstToken": "soon"},
    "state": "streaming",
}


def toolbar_button(page: Page, name: str) -> Locator:
    return page.get_by_role("toolbar", name="Conversation", exact=True).get_by_role("button", name=name, exact=True)


def conversations(page: Page, title: str) -> Locator:
    return page.locator(".conversation", has=page.get_by_text(title, exact=True))


def page_link(page: Page, name: str) -> Locator:
    return page.get_by_role("navigation", name="Pages", exact=True).get_by_role("link", name=name, exact=True)


def delete_of(message: Locator) -> Locator:
    return message.get_by_role("button", name="Delete this and what follows", exact=True)


async def ask_and_finish(page: Page, text: str, answers: int = 1) -> None:
    await ask(page, text)
    await expect(page.locator(".figures")).to_have_count(answers)


async def sign_in(page: Page, key: str) -> None:
    await page.get_by_label("API key", exact=True).fill(key)
    await page.get_by_role("button", name="Sign in", exact=True).click()
    await expect(page.get_by_label("Message", exact=True)).to_be_visible()


async def sign_out(page: Page) -> None:
    await page.get_by_role("button", name="Sign out", exact=True).click()
    await expect(page.get_by_label("API key", exact=True)).to_be_visible()


async def create_key(http: httpx.AsyncClient, organization: str, admin_key: str = "", **values: Any) -> str:
    headers = {"authorization": f"Bearer {admin_key}"} if admin_key else {}
    response = await http.post("/admin/keys", json={"organization": organization, **values}, headers=headers)
    return str(response.raise_for_status().json()["key"])


def with_database(folder: Path) -> Config:
    return Config(port=0, drain_timeout=1.0, database=str(folder / "syringa.db"))


async def test_key_of_some_models_chats_with_one_of_them(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_another(models: list[ServedModel]) -> FixedModels:
        return FixedModels([plain_model(id="first", aliases=()), *models])

    monkeypatch.setattr(tests.client, "FixedModels", with_another)
    async with server(FakeEngine("Yes."), with_database(tmp_path), model=plain_model()) as http:
        assert (await http.get("/v1/me")).json()["server"]["default_model"] == "first"
        admin = await create_key(http, "operators", admin=True)
        key = await create_key(http, "acme", admin, models=["fake"])
        async with open_page(browser, address(http), key=key) as (page, _):
            picker = page.get_by_role("toolbar").get_by_label("Model", exact=True)
            await expect(picker.get_by_role("option")).to_have_text(["fake"])
            await ask(page, "May I?")
            await expect(answer_of(page).get_by_text("Yes.", exact=True)).to_be_visible()


async def test_default_model_and_pages_are_those_of_the_server_that_came_back(browser: Browser) -> None:
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, address(http)) as (page, watched),
    ):
        picker = page.get_by_role("toolbar").get_by_label("Model", exact=True)
        await expect(picker.get_by_role("option")).to_have_text(["fake"])
        await expect(page_link(page, "Fleet")).to_have_count(0)
        me = (await http.get("/v1/me")).json()
        me["server"] |= {"default_model": "other", "cluster": True}
        (entry,) = (await http.get("/v1/models")).json()["data"]

        async def say_who(route: Route) -> None:
            await route.fulfill(json=me)

        async def list_models(route: Route) -> None:
            await route.fulfill(json={"object": "list", "data": [entry, {**entry, "id": "other"}]})

        await page.route("**/v1/me", say_who)
        await page.route("**/v1/models", list_models)
        watched.allow("ERR_INTERNET_DISCONNECTED")
        await page.context.set_offline(True)
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await expect(page.get_by_text("The server is away.", exact=True)).to_be_visible()
        await page.context.set_offline(False)
        await expect(page_link(page, "Fleet")).to_be_visible()
        await expect(picker).to_have_value("other")


async def test_draft_stays_while_another_page_is_shown_and_goes_with_the_key(browser: Browser) -> None:
    config = Config(port=0, drain_timeout=1.0, api_key=("sk-right",))
    async with (
        server(FakeEngine("x"), config, model=vision_model()) as http,
        open_page(browser, address(http), key="sk-right") as (page, watched),
    ):
        watched.allow("401")
        message = page.get_by_label("Message", exact=True)
        await expect(page.get_by_role("button", name="Attach images", exact=True)).to_be_visible()
        await message.evaluate(PASTE, PIXEL)
        await message.fill("Half a thou")
        await expect(page.locator(".thumbnail")).to_have_count(1)
        await page_link(page, "Models").click()
        await expect(message).to_have_count(0)
        await page_link(page, "Chat").click()
        await expect(message).to_have_value("Half a thou")
        await expect(page.locator(".thumbnail")).to_have_count(1)
        await sign_out(page)
        await sign_in(page, "sk-right")
        await expect(message).to_have_value("")
        await expect(page.locator(".thumbnail")).to_have_count(0)


async def test_parameter_that_is_emptied_or_not_valid_yet_stays_in_the_folded_form(browser: Browser) -> None:
    async with server(FakeEngine("x"), model=plain_model()) as http, open_page(browser, address(http)) as (page, _):
        top_k = page.get_by_label("top_k", exact=True)
        bias = page.get_by_label("logit_bias", exact=True)
        await page.get_by_role("button", name=re.compile(r"^All parameters \(\d+\)$")).click()
        await top_k.fill("4")
        await bias.fill('{"1": 1}')
        await page.get_by_role("button", name="Show fewer parameters", exact=True).click()
        await expect(page.get_by_label("top_p", exact=True)).to_be_visible()
        await expect(page.get_by_label("min_p", exact=True)).to_have_count(0)
        await top_k.press("Backspace")
        await expect(top_k).to_have_value("")
        await top_k.press_sequentially("7")
        await expect(top_k).to_have_value("7")
        await bias.press("End")
        await bias.press("Backspace")
        await expect(bias).to_have_value('{"1": 1')
        await expect(bias).to_have_attribute("aria-invalid", "true")
        await bias.press_sequentially("}")
        await expect(bias).to_have_value('{"1": 1}')


async def test_conversation_whose_first_message_is_deleted_stays_deleted(browser: Browser) -> None:
    async with (
        server(FakeEngine("Hello!"), model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE) as (page, _),
    ):
        await ask_and_finish(page, "Forget this")
        await expect(conversations(page, "Forget this")).to_have_count(1)
        await delete_of(question_of(page)).click()
        await expect(conversations(page, "Forget this")).to_have_count(0)
        await page.reload()
        await expect(
            page.get_by_text("Conversations are kept in this browser and appear here.", exact=True)
        ).to_be_visible()
        await expect(page.get_by_role("article")).to_have_count(0)


async def test_deleted_messages_come_back_by_undo(browser: Browser) -> None:
    async with (
        server(FakeEngine("Hello!"), model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE) as (page, _),
    ):
        undo = page.get_by_role("button", name="Undo", exact=True)
        await ask_and_finish(page, "One")
        await ask_and_finish(page, "Two", 2)
        await delete_of(answer_of(page).last).click()
        await expect(page.get_by_text("A message was deleted.", exact=True)).to_be_visible()
        await expect(page.get_by_role("article")).to_have_count(3)
        await delete_of(question_of(page).first).click()
        await expect(page.get_by_text("3 messages were deleted.", exact=True)).to_be_visible()
        await expect(page.get_by_role("article")).to_have_count(0)
        await expect(conversations(page, "One")).to_have_count(0)
        await undo.click()
        await expect(undo).to_have_count(0)
        await expect(question_of(page).locator(".user-text")).to_have_text(["One", "Two"])
        await expect(conversations(page, "One")).to_have_count(1)
        await page.reload()
        await expect(question_of(page).locator(".user-text")).to_have_text(["One", "Two"])
        await expect(page.get_by_role("article")).to_have_count(3)
        # What is asked next takes the offer away.
        await delete_of(question_of(page).last).click()
        await expect(undo).to_be_visible()
        await ask_and_finish(page, "Three", 2)
        await expect(undo).to_have_count(0)


async def test_second_thread_is_kept_while_comparing_is_off(browser: Browser) -> None:
    async with (
        server(FakeEngine("The same."), model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE) as (page, _),
    ):
        second = page.get_by_role("region", name="Thread B", exact=True)
        limit = page.get_by_label("max_completion_tokens", exact=True)

        async def compare() -> None:
            await toolbar_button(page, "Compare").click()
            await expect(second).to_be_visible()
            await page.get_by_role("tab", name="Thread B", exact=True).click()

        async def stop_comparing() -> None:
            await toolbar_button(page, "Compare").click()
            await expect(second).to_have_count(0)

        await compare()
        await limit.fill("3")
        await stop_comparing()
        await ask_and_finish(page, "Alone")
        await compare()  # what the second thread lacks is added, and its settings are its own
        await expect(second.locator(".markdown")).to_have_text(["The same."])
        await expect(limit).to_have_value("3")
        await ask_and_finish(page, "Together", 4)
        await expect(second.locator(".markdown")).to_have_text(["The same.", "The"])
        await stop_comparing()
        await compare()
        await expect(second.locator(".markdown")).to_have_text(["The same.", "The"])
        await expect(limit).to_have_value("3")


async def test_imported_message_is_shown_without_the_values_that_it_cannot_have(browser: Browser) -> None:
    message = {"id": "a", "parent": None, "role": "assistant", "text": "An odd answer", **ODD}
    thread = {"messages": [message], "chosen": {"root": "a"}}
    good = {"format": "syringa-conversation-1", "title": "Odd", "threads": [thread]}
    twice = {**good, "threads": [{**thread, "messages": [message, {**message, "parent": "a"}]}]}
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE, messages_stay=True) as (page, _),
    ):
        picker = page.get_by_label("Import a conversation", exact=True)
        for data, said in ((twice, "an id of its own"), (good, "was imported")):
            await picker.set_input_files(
                {"name": "odd.json", "mimeType": "application/json", "buffer": json.dumps(data).encode()}
            )
            await expect(page.get_by_role("status").filter(has_text=said)).to_be_visible()
        answer = page.get_by_role("article", name="Assistant", exact=True)
        await expect(answer.get_by_text("An odd answer", exact=True)).to_be_visible()
        await expect(conversations(page, "Odd")).to_have_count(1)
        await page.reload()
        await expect(answer.get_by_text("An odd answer", exact=True)).to_be_visible()
        await expect(answer.get_by_role("button", name="Regenerate", exact=True)).to_be_enabled()


async def test_conversation_that_two_tabs_change_becomes_two(browser: Browser) -> None:
    async with (
        server(FakeEngine("Hello!"), model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE, messages_stay=True) as (page, _),
    ):
        await ask_and_finish(page, "Begin")
        await page.wait_for_function(STORES, arg=[FINISHED, 1])
        other = await page.context.new_page()
        await other.goto(address(http))
        await conversations(other, "Begin").click()
        await ask_and_finish(other, "From the other tab", 2)
        await other.wait_for_function(STORES, arg=["From the other tab", 1])
        await ask_and_finish(page, "From this tab", 2)
        await expect(page.get_by_role("status").filter(has_text="goes on as a copy")).to_be_visible()
        await expect(conversations(page, "Begin")).to_have_count(2)
        await expect(question_of(page).locator(".user-text")).to_have_text(["Begin", "From this tab"])
        await (
            page.locator("li:not(.active)", has=page.get_by_text("Begin", exact=True)).locator(".conversation").click()
        )
        await expect(question_of(page).locator(".user-text")).to_have_text(["Begin", "From the other tab"])
        await other.close()


async def test_tab_that_is_seen_again_shows_what_another_one_has_stored(browser: Browser) -> None:
    async with (
        server(FakeEngine("Hello!"), model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE) as (page, _),
    ):
        await ask_and_finish(page, "Begin")
        await page.wait_for_function(STORES, arg=[FINISHED, 1])
        other = await page.context.new_page()
        await other.goto(address(http))
        await conversations(other, "Begin").click()
        await ask_and_finish(other, "From the other tab", 2)
        await other.wait_for_function(STORES, arg=[FINISHED, 2])
        await page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        await expect(question_of(page).locator(".user-text")).to_have_text(["Begin", "From the other tab"])
        await ask_and_finish(page, "From this tab", 3)
        await page.wait_for_function(STORES, arg=[FINISHED, 3])
        await expect(conversations(page, "Begin")).to_have_count(1)
        await other.close()


async def test_conversations_without_a_key_are_those_of_whoever_goes_on_with_them(
    browser: Browser, tmp_path: Path
) -> None:
    async with (
        server(FakeEngine("Hello!"), with_database(tmp_path), model=plain_model()) as http,
        open_page(browser, address(http), size=WIDE) as (page, watched),
    ):
        watched.allow("401")
        await ask_and_finish(page, "Before there were keys")
        await expect(conversations(page, "Before there were keys")).to_have_count(1)
        admin = await create_key(http, "operators", admin=True)
        lilac, privet = [await create_key(http, each, admin) for each in ("lilac", "privet")]
        await expect(page.get_by_label("API key", exact=True)).to_be_visible()  # by the next request of the page
        for key in (privet, lilac):
            await sign_in(page, key)
            await expect(conversations(page, "Before there were keys")).to_have_count(1)
            if key == lilac:
                await conversations(page, "Before there were keys").click()
                await ask_and_finish(page, "With a key", 2)
                await page.wait_for_function(STORES, arg=["With a key", 1])
            await sign_out(page)
        await sign_in(page, privet)
        await expect(
            page.get_by_text("Conversations are kept in this browser and appear here.", exact=True)
        ).to_be_visible()


async def test_tool_that_is_renamed_stays_chosen(browser: Browser) -> None:
    async with server(FakeEngine("x"), model=tool_model()) as http, open_page(browser, address(http)) as (page, _):
        functions = page.get_by_label("Functions", exact=True)
        choice = page.get_by_label("Tool choice", exact=True)
        await page.get_by_role("button", name="Example", exact=True).click()
        await choice.select_option("get_weather")
        text = await functions.input_value()
        await functions.fill(text.replace("get_weather", "get_time"))
        await expect(choice).to_have_value("get_time")
        await functions.fill(text[:-1])
        await functions.fill(text)
        await expect(choice).to_have_value("auto")


async def test_phone_shows_the_state_of_the_model_and_a_new_chat(browser: Browser) -> None:
    async with (
        server(FakeEngine("Hello!"), model=plain_model()) as http,
        open_page(browser, address(http), size=PHONE) as (page, _),
    ):
        await expect(page.locator(".chat-model .dot")).to_be_visible()
        await ask_and_finish(page, "Hello")
        assert await page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]
        await toolbar_button(page, "New chat").click()
        await expect(page.get_by_role("article")).to_have_count(0)


async def test_arguments_of_a_tool_call_are_shown_while_they_stream(browser: Browser) -> None:
    engine = SteppedEngine(CALL)
    engine.allowed = CALL.index("ris")
    async with server(engine, model=tool_model()) as http, open_page(browser, address(http)) as (page, _):
        await page.get_by_role("button", name="Example", exact=True).click()
        await ask(page, "What is the weather in Paris?")
        arguments = page.get_by_role("region", name="Call of get_weather", exact=True).locator("pre")
        await expect(arguments).to_have_text(re.compile(r'^\{"city": ?"P?a?$'))
        engine.allowed = len(CALL) + 1
        await expect(arguments).to_have_text(re.compile(r'^\{\s*"city": "Paris"\s*\}$'))


async def test_tokens_are_moved_through_and_branched_from_by_keyboard(browser: Browser) -> None:
    async with (
        server(FakeEngine("Hello!"), model=plain_model()) as http,
        open_page(browser, address(http)) as (page, _),
    ):
        await toolbar_button(page, "Tokens").click()
        await ask_and_finish(page, "Say it")
        answer = answer_of(page)
        tokens = answer.get_by_role("application", name=re.compile("^Tokens of the answer"))
        chosen = page.get_by_role("group", name="Alternatives", exact=True).locator(".chosen code")
        await tokens.focus()
        for key, shown in (("ArrowRight", "H"), ("ArrowRight", "e"), ("ArrowRight", "l"), ("ArrowLeft", "e")):
            await tokens.press(key)
            await expect(chosen).to_have_text(shown)
        await tokens.press("Escape")
        await expect(chosen).to_have_count(0)
        await tokens.press("ArrowRight")
        await expect(chosen).to_have_text("H")
        await tokens.press("Enter")
        alternatives = page.get_by_role("group", name="Alternatives", exact=True).get_by_role("button")
        await expect(alternatives.first).to_be_visible()
        taken = await alternatives.first.locator("code").inner_text()
        await page.keyboard.press("Tab")
        await expect(alternatives.first).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(answer.get_by_text("2 / 2", exact=True)).to_be_visible()
        await expect(answer.locator(".token").first).to_have_text(taken)


async def test_parameter_that_the_server_gets_is_in_the_form_and_sent(browser: Browser) -> None:
    async with server(FakeEngine("x"), model=plain_model()) as http, open_page(browser, address(http)) as (page, _):
        document = (await http.get("/openapi.json")).json()
        body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
        name = body["schema"]["$ref"].rpartition("/")[2]
        document["components"]["schemas"][name]["properties"]["sparkle"] = {
            "type": "integer",
            "description": "How much the answer sparkles.",
        }
        sent: list[Any] = []

        async def describe(route: Route) -> None:
            await route.fulfill(json=document)

        async def receive(route: Route) -> None:
            sent.append(route.request.post_data_json)
            await route.fulfill(body="data: [DONE]\n\n", content_type="text/event-stream")

        await page.route("**/openapi.json", describe)
        await page.route("**/v1/chat/completions", receive)
        await page.reload()
        await page.get_by_role("button", name=re.compile(r"^All parameters \(\d+\)$")).click()
        await page.get_by_label("Search parameters", exact=True).fill("sparkles")
        await page.get_by_label("sparkle", exact=True).fill("3")
        await expect(page.get_by_text("How much the answer sparkles.", exact=True)).to_be_visible()
        await ask(page, "Shine")
        await expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        await expect(answer_of(page).get_by_role("button", name="Regenerate", exact=True)).to_be_visible()
        assert [each["sparkle"] for each in sent] == [3]
