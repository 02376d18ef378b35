"""The Chat page in a browser, with an engine that says what the test wants."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import re
from typing import Any

import pytest
from playwright.async_api import Browser, Page, Route, expect

from syringa.config import Config
from syringa.config.specs import Prices
from syringa.output_formats import ModelFormats
from tests.chat_models import plain_model, reasoning_model, vision_model
from tests.client import eventually, server
from tests.console.browser import PHONE, open_page
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

ANSWER = (
    "# Title\n\nSome **bold** text.\n\n- one\n- two\n\n```python\nprint(1)\n```\n\n| a | b |\n| - | - |\n| 1 | 2 |\n"
)
HOSTILE = (
    "<script>window.harmed = 1</script>\n\n<img src=x onerror='window.harmed = 2'>\n\n"
    "[click](javascript:window.harmed=3) ![remote](https://example.com/pixel.png)\n\n"
    "<p style='position:fixed'>styled</p><form action='https://example.com'><input></form>\n\n"
    "<iframe src='https://example.com'></iframe>\n\n<svg onload='window.harmed = 4'></svg>\n\nThe end."
)

# A picture of 64 × 64 pixels, a paste of it, and a drag of it with a type.
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAIAAAAlC+aJAAAAY0lEQVR4nO3PQQ3AIADAQEAmSpCIrIngcVnSU9DOs+/4s6UDXjWg"
    "NaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgNaA1oDWgfYhzAhorf+GXAAAAAElF"
    "TkSuQmCC"
)
PASTE = """
(input, base64) => {
  const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], 'pixel.png', { type: 'image/png' }));
  input.dispatchEvent(new ClipboardEvent('paste', { clipboardData: data, bubbles: true, cancelable: true }));
}
"""
DRAG = """
(element, [event, base64, type]) => {
  const bytes = Uint8Array.from(atob(base64), (each) => each.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], 'file.image', { type }));
  element.dispatchEvent(new DragEvent(event, { dataTransfer: data, bubbles: true, cancelable: true }));
}
"""
# Whether the browser has stored a finished answer.
STORED = """
() => new Promise((resolve) => {
  const opening = indexedDB.open('syringa');
  opening.onsuccess = () => {
    const reading = opening.result.transaction('conversations').objectStore('conversations').getAll();
    reading.onsuccess = () => resolve(JSON.stringify(reading.result).includes('"finishReason":"stop"'));
    opening.result.close();
  };
})
"""


def address(http: object) -> str:
    return str(getattr(http, "base_url", "")).rstrip("/")


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


@pytest.mark.parametrize("size", [(1280, 800), PHONE], ids=["desktop", "phone"])
async def test_chat_shows_an_answer_with_its_figures(browser: Browser, size: tuple[int, int]) -> None:
    async with (
        server(FakeEngine(ANSWER), model=plain_model()) as http,
        open_page(browser, address(http), size=size) as (page, _),
    ):
        await ask(page, "What is it?")
        answer = page.get_by_role("article", name="fake", exact=True)
        await expect(answer.get_by_role("heading", name="Title", exact=True)).to_be_visible()
        await expect(answer.get_by_role("listitem")).to_have_count(2)
        await expect(answer.locator("pre code")).to_have_text("print(1)")
        await expect(answer.get_by_role("cell", name="2", exact=True)).to_be_visible()
        await expect(answer.get_by_text(f"Out{len(ANSWER) + 1}", exact=True)).to_be_visible()
        assert await page.evaluate("document.documentElement.scrollWidth") <= size[0]
        await page.wait_for_function(STORED)
        await page.reload()  # it is kept in the browser
        await expect(answer.get_by_role("heading", name="Title", exact=True)).to_be_visible()


async def test_model_is_not_called_missing_while_the_list_is_loaded(browser: Browser) -> None:
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, address(http), path="/status") as (page, _),
    ):
        released = asyncio.Event()

        async def hold(route: Route) -> None:
            await released.wait()
            await route.continue_()

        await page.route("**/v1/models", hold)
        await page.goto(f"{address(http)}/#/chat")
        picker = page.get_by_role("toolbar").get_by_label("Model", exact=True)
        await expect(picker).to_have_text("fake")
        released.set()
        await expect(page.locator(".chat-model").get_by_text("loaded", exact=True)).to_be_visible()
        await expect(picker).to_have_text("fake")


class SteppedEngine(FakeEngine):
    """Generates as many tokens as are `allowed`, then waits until more are."""

    allowed = 0

    async def wait_for_step(self, started: float, step: int) -> None:
        while step >= self.allowed:  # noqa: ASYNC110  it can only be polled
            await asyncio.sleep(0.01)


async def test_chat_stops_and_regenerates(browser: Browser) -> None:
    engine = SteppedEngine("word " * 200)
    async with (
        server(engine, model=plain_model()) as http,
        open_page(browser, address(http)) as (page, _),
    ):
        await ask(page, "Go on")
        answer = page.get_by_role("article", name="fake", exact=True)
        for engine.allowed in (4, 19):
            await expect(answer.locator(".markdown")).to_have_text(("word " * 4)[: engine.allowed])
            await asyncio.sleep(0.1)  # between tokens, so that they have a speed
        await page.get_by_role("button", name="Stop", exact=True).click()
        await expect(answer.get_by_text("Stopped", exact=True)).to_be_visible()
        await expect(answer.get_by_text("Out19", exact=True)).to_be_visible()  # those that were received
        await expect(answer.locator(".figures")).to_contain_text(re.compile(r"Speed[\d.]+ tok/s"))
        await expect(answer.locator(".figures")).to_contain_text(re.compile(r"In\d+"))
        assert await eventually(lambda: engine.aborted)
        engine.allowed = 10_000
        await answer.get_by_role("button", name="Regenerate").click()
        await expect(answer.get_by_text("2 / 2", exact=True)).to_be_visible()
        await expect(answer.locator(".markdown")).to_contain_text("word word")
        await answer.get_by_role("button", name="Previous branch").click()
        await expect(answer.get_by_text("Stopped", exact=True)).to_be_visible()


def code_body(language: str, code: str) -> Any:
    """Return the body of the request that the code of `Show code` makes."""
    if language == "curl":
        return json.loads(code.partition("<<'JSON'\n")[2].partition("\nJSON\n")[0])
    if language == "JavaScript":
        return json.loads(code.partition("JSON.stringify(")[2].partition("),\n});")[0])
    calls = [each for each in ast.walk(ast.parse(code)) if isinstance(each, ast.Call)]
    (create,) = (each for each in calls if isinstance(each.func, ast.Attribute) and each.func.attr == "create")
    arguments = {str(each.arg): ast.literal_eval(each.value) for each in create.keywords}
    return arguments | arguments.pop("extra_body", {})


async def test_code_is_the_request_that_send_makes(browser: Browser) -> None:
    formats = ModelFormats(tool_calls="hermes", supports_tools=True)
    config = Config(port=0, drain_timeout=1.0, api_key=("sk-right",))
    async with (
        server(FakeEngine("An answer."), config, model=vision_model(formats=formats)) as http,
        open_page(browser, address(http), key="sk-right") as (page, _),
    ):
        await page.get_by_role("button", name="Example", exact=True).click()
        await page.get_by_label("Tool choice", exact=True).select_option("none")
        await page.get_by_role("button", name="All parameters").click()
        await page.get_by_label("top_k", exact=True).fill("40")
        await ask(page, "First")
        await expect(page.get_by_role("article").get_by_text("An answer.", exact=True)).to_be_visible()
        await expect(page.locator(".figures")).to_have_count(1)
        message = page.get_by_label("Message", exact=True)
        await message.evaluate(PASTE, PIXEL)
        await expect(page.get_by_role("button", name="Remove image 1")).to_be_visible()
        await message.fill(' It\'s "two":\n$HOME `ls` é😀 \\n ')
        await page.get_by_role("toolbar").get_by_role("button", name="Show code", exact=True).click()
        dialog, shown = page.get_by_role("dialog", name="Show code"), {}
        for language in ("curl", "Python", "JavaScript"):
            await dialog.get_by_role("tab", name=language, exact=True).click()
            code = await dialog.get_by_role("region", name=language, exact=True).locator("code").inner_text()
            assert "SYRINGA_API_KEY" in code
            assert "sk-right" not in code
            shown[language] = code_body(language, code)
        await page.keyboard.press("Escape")
        async with page.expect_request("**/v1/chat/completions") as request:
            await page.get_by_role("button", name="Send", exact=True).click()
        sent = (await request.value).post_data_json
        assert [each["role"] for each in sent["messages"]] == ["user", "assistant", "user"]
        assert shown == dict.fromkeys(shown, sent)
        await expect(page.locator(".figures")).to_have_count(2)


async def test_hostile_answer_does_nothing(browser: Browser) -> None:
    async with (
        server(FakeEngine(HOSTILE), model=plain_model()) as http,
        open_page(browser, address(http)) as (page, watched),
    ):
        await ask(page, "Attack!")
        answer = page.get_by_role("article", name="fake", exact=True)
        await expect(answer.get_by_text("The end.")).to_be_visible()
        await expect(answer.get_by_text("[image: remote]")).to_be_visible()
        await expect(answer.locator(".figures")).to_be_visible()  # all of it has arrived
        assert await answer.locator("script, iframe, form, input, svg[onload], [style], [onerror]").count() == 0
        assert await answer.locator("img, a[href^='javascript']").count() == 0
        assert await page.evaluate("window.harmed") is None
        assert watched.faults == []


async def test_sign_in_and_out_with_a_key(browser: Browser) -> None:
    config = Config(port=0, drain_timeout=1.0, api_key=("sk-right",))
    async with (
        server(FakeEngine("Hello!"), config, model=plain_model()) as http,
        open_page(browser, address(http)) as (page, watched),
    ):
        watched.allow("401")
        field = page.get_by_label("API key", exact=True)
        await field.fill("sk-wrong")
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await expect(page.locator(".field-error")).to_contain_text(re.compile("key", re.IGNORECASE))
        await field.fill("sk-right")
        await page.get_by_role("button", name="Sign in", exact=True).click()
        await expect(page.get_by_label("Message", exact=True)).to_be_visible()
        keys = page.get_by_role("link", name="Keys", exact=True)
        await expect(keys).to_have_count(0)  # not an administrator's
        assert "sk-right" not in page.url
        await page.reload()
        await expect(page.get_by_label("Message", exact=True)).to_be_visible()
        await page.get_by_role("button", name="Sign out").click()
        await expect(field).to_be_visible()
        assert await page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])") not in ("", None)
        assert "sk-right" not in await page.evaluate("JSON.stringify([{...sessionStorage}, {...localStorage}])")


async def test_page_says_that_the_server_is_away_and_recovers(browser: Browser) -> None:
    async with (
        server(FakeEngine("I am back."), model=plain_model()) as http,
        open_page(browser, address(http)) as (page, watched),
    ):
        await expect(page.get_by_label("Message", exact=True)).to_be_visible()
        watched.allow("ERR_INTERNET_DISCONNECTED")
        await page.context.set_offline(True)
        await ask(page, "Are you there?")
        await expect(page.get_by_text("The server is away.")).to_be_visible()
        await expect(page.get_by_role("article").get_by_text("The server cannot be reached.")).to_be_visible()
        await page.context.set_offline(False)
        await expect(page.get_by_text("The server is away.")).to_have_count(0)
        await page.get_by_role("article").get_by_role("button", name="Try again").click()
        await expect(page.get_by_role("article").get_by_text("I am back.", exact=True)).to_be_visible()


RENDER = """
async ([text, step]) => {
  const { MarkdownRenderer } = await import('./console/ui/markdown.js');
  const root = document.createElement('div');
  const renderer = new MarkdownRenderer(root);
  for (let end = step; end < text.length; end += step) renderer.update(text.slice(0, end));
  renderer.update(text);
  return root.innerHTML;
}
"""


async def test_markdown_in_steps_is_that_of_the_whole_text(browser: Browser) -> None:
    async with server(FakeEngine("x"), model=plain_model()) as http, open_page(browser, address(http)) as (page, _):
        text = (
            ANSWER
            + "\n> quoted\n> again\n\n1. first\n   - inner\n2. second\n\nA [link](https://example.com).\n\n"
            + HOSTILE
        )
        whole = await page.evaluate(RENDER, [text, len(text)])
        assert "<h1>Title</h1>" in whole
        assert "<ol>" in whole
        for step in (1, 7, 64):
            assert await page.evaluate(RENDER, [text, step]) == whole
        # Long blocks are cut, and nothing of them is lost; deep ones are text.
        rows = "| a |\n| - |\n" + "".join(f"| row {number} |\n" for number in range(3000))
        shown = await page.evaluate(RENDER, [rows, 500])
        assert all(f"<td>row {number}</td>" in shown for number in (0, 1500, 2999))
        assert (await page.evaluate(RENDER, ["> " * 5000, 5000])).count("<blockquote>") < 20


@pytest.mark.slow
async def test_thoughts_are_folded_and_choices_are_branches(browser: Browser) -> None:
    engine = FakeEngine("<think>pondering</think>The answer.")
    model = reasoning_model(prices=Prices(input=0.0, output=1_000_000.0))
    async with (
        server(engine, model=model) as http,
        open_page(browser, address(http)) as (page, _),
    ):
        await page.get_by_role("button", name="All parameters").click()
        await page.get_by_label("n", exact=True).fill("2")
        await ask(page, "Think!")
        answer = page.get_by_role("article", name="fake", exact=True)
        await expect(answer.get_by_text("1 / 2", exact=True)).to_be_visible()
        await expect(answer.get_by_text("The answer.")).to_be_visible()
        await expect(answer.get_by_text("pondering")).to_have_count(0)
        await answer.get_by_role("button", name="Thoughts").click()
        await expect(answer.get_by_text("pondering")).to_be_visible()
        # Tokens and cost of the request are shown once. Each answer is the script and an end token.
        await expect(answer.get_by_text("Out of 2 answers72", exact=True)).to_be_visible()
        await expect(answer.get_by_text("Cost of 2 answers$72.00", exact=True)).to_be_visible()
        await answer.get_by_role("button", name="Next branch").click()
        await expect(answer.get_by_text("2 / 2", exact=True)).to_be_visible()
        await expect(answer.locator(".figures")).to_have_text(re.compile(r"^First token\d[^$]*s$"))


@pytest.mark.slow
async def test_images_are_pasted_dropped_and_chosen(browser: Browser) -> None:
    async with (
        server(FakeEngine("A picture."), model=vision_model()) as http,
        open_page(browser, address(http), messages_stay=True) as (page, _),
    ):
        attach = page.get_by_role("button", name="Attach images")
        await expect(attach).to_be_visible()
        await page.get_by_label("Message", exact=True).evaluate(PASTE, PIXEL)
        await expect(page.locator(".thumbnail")).to_have_count(1)
        messages = page.get_by_role("log", name="Messages")
        await messages.evaluate(DRAG, ["dragover", PIXEL, "image/png"])
        await expect(page.get_by_text("Drop images to attach them.")).to_be_visible()
        await messages.evaluate(DRAG, ["drop", PIXEL, "image/png"])
        await expect(page.get_by_text("Drop images to attach them.")).to_have_count(0)
        await expect(page.locator(".thumbnail")).to_have_count(2)
        await messages.evaluate(DRAG, ["drop", PIXEL, "image/tiff"])
        await expect(page.get_by_role("status").filter(has_text="not file.image")).to_be_visible()
        async with page.expect_file_chooser() as chooser:
            await attach.click()
        picture = {"name": "pixel.png", "mimeType": "image/png", "buffer": base64.b64decode(PIXEL)}
        await (await chooser.value).set_files([picture] * 7)
        await expect(page.get_by_role("status").filter(has_text="at most 8 images")).to_be_visible()
        await expect(page.locator(".thumbnail")).to_have_count(8)
        for number in range(8, 3, -1):
            await page.get_by_role("button", name=f"Remove image {number}").click()
        await ask(page, "What is it?")
        question = page.get_by_role("article", name="You", exact=True)
        await expect(question.get_by_role("img", name="Image 3")).to_be_visible()
        await expect(page.get_by_role("article").get_by_text("A picture.", exact=True)).to_be_visible()
        await expect(page.locator(".thumbnail")).to_have_count(0)


@pytest.mark.slow
async def test_dropped_image_is_refused_for_a_model_that_reads_none(browser: Browser) -> None:
    async with (
        server(FakeEngine("x"), model=plain_model()) as http,
        open_page(browser, address(http), messages_stay=True) as (page, _),
    ):
        await expect(page.locator(".chat-model").get_by_text("loaded", exact=True)).to_be_visible()
        await page.get_by_role("log", name="Messages").evaluate(DRAG, ["drop", PIXEL, "image/png"])
        await expect(page.get_by_role("status").filter(has_text="fake does not read images.")).to_be_visible()
        await expect(page.locator(".thumbnail")).to_have_count(0)
