"""Chromium, driven by Playwright: pages that note everything that must not happen in them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Download,
    Locator,
    Page,
    TimeoutError,
    async_playwright,
    expect,
)

from tests.tiers import SLOW

_NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
TIMEOUT_MS = 120_000  # generous: it only ends a test that would hang
_MENU_MS = 5_000  # after which a menu that does not open is opened again
DESKTOP, PHONE = (1280, 800), (360, 740)
# Messages are shown for 4 or 8 seconds, and "Copied" on a button for 2.
_MESSAGES_STAY = """
const { setTimeout: begin } = window;
window.setTimeout = (run, wait, ...values) => [2000, 4000, 8000].includes(wait) ? 0 : begin(run, wait, ...values);
"""

expect.set_options(timeout=TIMEOUT_MS)


def find_chromium() -> str:
    """Return the path of Chromium; skip the test without it, or fail it in the slow tier."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        message = "the console is tested with Chromium, which is not installed (Debian: apt-get install chromium)"
        pytest.fail(message) if SLOW else pytest.skip(message)
    return path


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = find_chromium()
    async with async_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--force-color-profile=srgb"]
        browser = await playwright.chromium.launch(executable_path=path, args=arguments, timeout=TIMEOUT_MS)
        try:
            yield browser
        finally:
            await browser.close()


class Watched:
    """What went wrong in a page: errors of scripts and the console, violations of the policy, requests elsewhere."""

    def __init__(self, page: Page, origin: str) -> None:
        self.page, self.origin = page, origin
        self.faults: list[str] = []
        self.allowed: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        page.on("console", self._on_console)
        page.on("request", self._on_request)

    def allow(self, pattern: str) -> None:
        """Accept faults that match a pattern: those that the test itself causes, such as a 401."""
        self.allowed.append(pattern)

    def remaining(self) -> list[str]:
        return [each for each in self.faults if not any(re.search(pattern, each) for pattern in self.allowed)]

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.faults.append(f"console: {message.text} ({message.location.get('url', '')})")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.origin, "data:", "blob:")):
            self.faults.append(f"request to another host: {request.url}")


@contextlib.asynccontextmanager
async def open_page(
    browser: Browser,
    url: str,
    *,
    path: str = "",
    size: tuple[int, int] = DESKTOP,
    dark: bool = False,
    key: str = "",
    messages_stay: bool = False,
    **options: Any,
) -> AsyncIterator[tuple[Page, Watched]]:
    """Open the console of a server in a browser profile of its own. At the end, nothing may have gone wrong in it.

    `path`: of a page, such as "/models". `key`: signed in with it. `messages_stay`: what is shown for a few seconds
    stays, so that a slow machine finds it. `options`: of Playwright's `new_context`.
    """
    context = await browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",  # colors in the middle of a transition have no contrast
        **options,
    )
    context.set_default_timeout(TIMEOUT_MS)
    await context.add_init_script(
        "document.addEventListener('securitypolicyviolation', (event) => console.error("
        "`policy: ${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));"
    )
    if messages_stay:
        await context.add_init_script(_MESSAGES_STAY)
    if key:
        await context.add_init_script(f"sessionStorage.setItem('syringa.key', {key!r})")
    page = await context.new_page()
    watched = Watched(page, url)
    try:
        await page.goto(f"{url}/#{path}" if path else url)
        yield page, watched
        assert watched.remaining() == []
    finally:
        await context.close()


async def open_menu(page: Page, button: Locator) -> Locator:
    """Open the menu of a button and return it. Menus close where something scrolls, which opens it again here."""
    menu = page.get_by_role("menu")
    async with asyncio.timeout(TIMEOUT_MS / 1000):
        while True:
            if await button.get_attribute("aria-expanded") != "true":
                await button.click()
            with contextlib.suppress(TimeoutError):
                await menu.wait_for(timeout=_MENU_MS)
                return menu


async def choose(page: Page, button: Locator, item: str) -> None:
    """Choose an item of the menu of a button."""
    async with asyncio.timeout(TIMEOUT_MS / 1000):
        while True:
            menu = await open_menu(page, button)
            with contextlib.suppress(TimeoutError):
                await menu.get_by_role("menuitem", name=item, exact=True).click(timeout=_MENU_MS)
                return


async def pass_time(page: Page, shown: Locator) -> None:
    """Let time pass in a page, whose clock has been installed, until something is shown."""
    async with asyncio.timeout(TIMEOUT_MS / 1000):
        while await shown.count() == 0:
            await page.clock.fast_forward(5_000)
            await asyncio.sleep(0.1)  # for what it asks the server


async def read_download(download: Download) -> list[str]:
    """Return the lines of a file that a page has saved."""
    path = await download.path()
    return (await asyncio.to_thread(Path(path).read_text)).splitlines()


async def stay_within_a_day() -> None:
    """Wait until midnight UTC has passed, if it is near."""
    left = 86400 - time.time() % 86400
    if left < 120:
        await asyncio.sleep(left + 1)
