"""The Chat page in a browser, with an engine that says what the test wants."""

from __future__ import annotations

import asyncio
import re

import pytest
from playwright.async_api import Browser, Page, Route, expect

from syringa.config import Config
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

# A picture of 64 × 64 pixels, and a paste of it.
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


async def test_chat_stops_and_regenerates(browser: Browser) -> None:
    engine = FakeEngine("word " * 200)
    engine.pause()
    async with (
        server(engine, model=plain_model()) as http,
        open_page(browser, address(http)) as (page, _),
    ):
        await ask(page, "Go on")
        assert await eventually(lambda: engine.requests)  # what has not begun is not aborted
        await page.get_by_role("button", name="Stop", exact=True).click()
        answer = page.get_by_role("article", name="fake", exact=True)
        await expect(answer.get_by_text("Stopped", exact=True)).to_be_visible()
        assert await eventually(lambda: engine.aborted)
        engine.resume()
        await answer.get_by_role("button", name="Regenerate").click()
        await expect(answer.get_by_text("2 / 2", exact=True)).to_be_visible()
        await expect(answer.locator(".markdown")).to_contain_text("word word")
        await answer.get_by_role("button", name="Previous branch").click()
        await expect(answer.get_by_text("Stopped", exact=True)).to_be_visible()


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
    async with (
        server(engine, model=reasoning_model()) as http,
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


@pytest.mark.slow
async def test_image_is_pasted_into_a_message(browser: Browser) -> None:
    async with (
        server(FakeEngine("A picture."), model=vision_model()) as http,
        open_page(browser, address(http)) as (page, _),
    ):
        await expect(page.get_by_role("button", name="Attach images")).to_be_visible()
        await page.get_by_label("Message", exact=True).evaluate(PASTE, PIXEL)
        await expect(page.get_by_role("button", name="Remove image 1")).to_be_visible()
        await ask(page, "What is it?")
        await expect(
            page.get_by_role("article", name="You", exact=True).get_by_role("img", name="Image 1")
        ).to_be_visible()
        await expect(page.get_by_role("article").get_by_text("A picture.", exact=True)).to_be_visible()
