"""Write the pictures of the console in docs/images: `make screenshots`.

A real server with the default model, and Chromium. Every picture is in light and dark.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from playwright.async_api import Browser, Page, expect

from tests.console.browser import PHONE, chromium, open_page
from tests.e2e.server import serve

IMAGES = Path(__file__).parents[1] / "docs" / "images"
SETTINGS = ("--max-model-len", "2048", "--served-model-name", "SmolLM2-135M-Instruct")
WIDE = (1440, 900)
PAGES = ("completions", "responses", "embeddings", "batches", "models", "status", "usage", "keys")


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()


async def finished(page: Page, count: int = 1) -> None:
    await expect(page.locator(".message.assistant .figures")).to_have_count(count)


async def greedy(page: Page, tokens: int) -> None:
    """Set parameters with which every run of this script gives the same answer."""
    await page.get_by_label("temperature", exact=True).fill("0")
    await page.get_by_label("max_completion_tokens", exact=True).fill(str(tokens))


async def chat(page: Page) -> None:
    await greedy(page, 96)
    await ask(page, "What is the capital of France?")
    await finished(page)
    await ask(page, "Write a Python function that adds two numbers.")
    await finished(page, 2)


async def tokens(page: Page) -> None:
    await greedy(page, 48)
    await page.get_by_role("toolbar").get_by_role("button", name="Tokens", exact=True).click()
    await ask(page, "Write a sentence about a lilac in the rain.")
    await finished(page)
    await page.locator(".token").nth(4).click()


async def compare(page: Page) -> None:
    await greedy(page, 48)
    await page.get_by_role("button", name="Compare", exact=True).click()
    await page.get_by_role("tab", name="Thread B").click()
    await page.get_by_label("temperature", exact=True).fill("0.9")
    await page.get_by_label("seed", exact=True).fill("7")
    await ask(page, "What is the capital of France?")
    await finished(page, 2)


async def tools(page: Page) -> None:
    await greedy(page, 48)
    await page.get_by_role("button", name="Example", exact=True).click()
    await page.get_by_label("Tool choice", exact=True).select_option("get_weather")
    await ask(page, "What is the weather in Paris?")
    await finished(page)


async def phone(page: Page) -> None:
    await page.get_by_role("button", name="Settings", exact=True).click()
    await greedy(page, 48)
    await page.keyboard.press("Escape")
    await ask(page, "What is the capital of France?")
    await finished(page)


async def settled(page: Page) -> None:
    await expect(page.get_by_role("heading", level=1)).to_be_visible()
    await expect(page.locator(".loading")).to_have_count(0)


Scene = Callable[[Page], Awaitable[None]]
SCENES: dict[str, tuple[str, tuple[int, int], Scene]] = {
    "chat": ("/chat", WIDE, chat),
    "chat-tokens": ("/chat", WIDE, tokens),
    "chat-compare": ("/chat", WIDE, compare),
    "chat-tools": ("/chat", WIDE, tools),
    "chat-phone": ("/chat", PHONE, phone),
    **{name: (f"/{name}", WIDE, settled) for name in PAGES},
}


async def shoot(browser: Browser, url: str, name: str, dark: bool, folder: Path) -> None:
    path, size, scene = SCENES[name]
    async with open_page(browser, url, path=path, size=size, dark=dark) as (page, _):
        await scene(page)
        await page.wait_for_timeout(800)  # charts and highlights
        with contextlib.suppress(Exception):
            await page.evaluate("document.fonts.ready")
        await page.screenshot(path=folder / f"console-{name}-{'dark' if dark else 'light'}.png")
        print(f"console-{name}-{'dark' if dark else 'light'}.png")


async def run(names: list[str], folder: Path) -> None:
    with serve(*SETTINGS) as server:
        async with chromium() as browser:
            for dark in (False, True):
                for name in names:
                    await shoot(browser, server.url, name, dark, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(SCENES)}")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(run(arguments.names or list(SCENES), arguments.folder))


if __name__ == "__main__":
    main()
