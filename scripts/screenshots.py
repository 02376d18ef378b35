"""Write the pictures of the console in docs/images: `make screenshots`.

A real server with the default model and the embedding model, requests of several organizations
(`scripts/sample_traffic.py`), and Chromium. The Fleet page is that of a server with a sample cluster
(`scripts/sample_fleet.py`). There are those pictures that the documentation shows. Takes about six minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from playwright.async_api import Browser, Page, expect

from scripts.sample_fleet import sample_fleet
from scripts.sample_traffic import (
    SETTINGS,
    Client,
    add_history,
    create_batches,
    create_keys,
    create_responses,
    send_load,
)
from tests.console.browser import chromium, open_page
from tests.e2e.server import Server, serve

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDE = (1440, 900)
BEFORE_SECONDS, LOAD_SECONDS = 220.0, 260.0  # of load, before the pictures under load and in total
SHORT_LOAD_SECONDS = 20.0  # where none of the pictures is under load


async def ask(page: Page, text: str, answers: int = 1) -> None:
    """Send a message and wait until there are this many complete answers."""
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send", exact=True).click()
    await expect(page.locator(".message.assistant .figures")).to_have_count(answers)


async def greedy(page: Page, tokens: int) -> None:
    """Set parameters with which every run of this script gives the same answer."""
    await page.get_by_label("temperature", exact=True).fill("0")
    await page.get_by_label("max_completion_tokens", exact=True).fill(str(tokens))


async def chat(page: Page) -> None:
    for other in ("Give me three tips for a good night's sleep.", "Explain HTTP in one paragraph."):
        await greedy(page, 256)
        await ask(page, other)
        await page.get_by_role("button", name="New chat", exact=True).first.click()
    await greedy(page, 256)
    await ask(page, "What is the capital of France?")
    await ask(page, "What is it famous for?", 2)


async def tokens(page: Page) -> None:
    await greedy(page, 96)
    await page.get_by_role("toolbar").get_by_role("button", name="Tokens", exact=True).click()
    await ask(page, "Explain HTTP in one paragraph.")
    await page.locator(".token").nth(4).click()


async def compare(page: Page) -> None:
    await greedy(page, 96)
    await page.get_by_role("button", name="Compare", exact=True).click()
    await page.get_by_role("tab", name="Thread B").click()
    await page.get_by_label("temperature", exact=True).fill("0.9")
    await page.get_by_label("seed", exact=True).fill("7")
    await ask(page, "Explain HTTP in one paragraph.", 2)


async def completions(page: Page) -> None:
    await page.get_by_role("textbox", name="Text", exact=True).fill("Photosynthesis is")
    await page.locator("input[type=number]").nth(1).fill("0")
    await page.get_by_role("button", name="Complete", exact=True).click()
    await expect(page.get_by_text("tokens/s")).to_be_visible()
    await page.locator(".heat-text .heat").nth(9).click()


async def responses(page: Page) -> None:
    await page.get_by_role("link", name=re.compile("What is HTTPS")).click()
    await expect(page.get_by_role("heading", name="Output", exact=True)).to_be_visible()


async def embeddings(page: Page) -> None:
    await page.get_by_role("button", name="Compare", exact=True).click()
    await expect(page.get_by_role("region", name="Similarity matrix")).to_be_visible()


async def usage(page: Page) -> None:
    await page.get_by_label("Time", exact=True).select_option("7")
    await page.get_by_label("Group by", exact=True).select_option("organization")
    await page.get_by_label("Show", exact=True).select_option("tokens")


async def loaded(page: Page) -> None:
    await expect(page.get_by_role("heading", level=1)).to_be_visible()


async def fleet(page: Page) -> None:
    await expect(page.get_by_role("table", name="Replicas", exact=True)).to_be_visible()


class Scene(NamedTuple):
    prepare: Callable[[Page], Awaitable[None]] = loaded
    path: str = ""  # default: the name of the scene
    under_load: bool = False
    of_cluster: bool = False
    dark: bool = False  # also in the dark theme


SCENES = {
    "status": Scene(under_load=True, dark=True),
    "models": Scene(under_load=True),
    "chat": Scene(chat),
    "chat-tokens": Scene(tokens, "chat"),
    "chat-compare": Scene(compare, "chat"),
    "completions": Scene(completions),
    "responses": Scene(responses),
    "embeddings": Scene(embeddings),
    "batches": Scene(),
    "usage": Scene(usage),
    "keys": Scene(),
    "fleet": Scene(fleet, of_cluster=True, dark=True),
}


async def shoot(browser: Browser, url: str, name: str, dark: bool, folder: Path, key: str = "") -> None:
    """Write the picture of a scene, signed in with a key."""
    scene = SCENES[name]
    path = folder / f"console-{name}-{'dark' if dark else 'light'}.png"
    address = f"/{scene.path or name}"
    async with open_page(browser, url, path=address, size=WIDE, dark=dark, key=key) as (page, _):
        await scene.prepare(page)
        await expect(page.locator(".loading")).to_have_count(0)
        await page.wait_for_timeout(800)  # charts and highlights
        await page.screenshot(path=path)
    Image.open(path).save(path, optimize=True)
    print(path.name)


async def shoot_all(browser: Browser, url: str, names: Sequence[str], folder: Path, key: str) -> None:
    for name in names:
        for dark in (False, True)[: 1 + SCENES[name].dark]:
            await shoot(browser, url, name, dark, folder, key)


async def run(server: Server, database: str, names: Sequence[str], folder: Path) -> None:
    """Write the pictures of scenes of a server without a cluster."""
    keys = await create_keys(server.url)
    async with Client(server.url, keys["ops"]) as client:
        await create_responses(client)
        await create_batches(client)
    under_load = [name for name in names if SCENES[name].under_load]
    others = [name for name in names if not SCENES[name].under_load]
    async with chromium() as browser:
        async with asyncio.TaskGroup() as group:
            group.create_task(send_load(server.url, keys, LOAD_SECONDS if under_load else SHORT_LOAD_SECONDS))
            if under_load:
                await asyncio.sleep(BEFORE_SECONDS)
                await shoot_all(browser, server.url, under_load, folder, keys["ops"])
        await add_history(database)
        await shoot_all(browser, server.url, others, folder, keys["ops"])


async def run_fleet(data: Path, names: Sequence[str], folder: Path) -> None:
    """Write the pictures of scenes of a cluster."""
    async with sample_fleet(data) as (url, key), chromium() as browser:
        await shoot_all(browser, url, names, folder, key)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(SCENES)}")
    parser.add_argument("--folder", type=Path, default=IMAGES)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    names = arguments.names or list(SCENES)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        if others := [name for name in names if not SCENES[name].of_cluster]:
            settings, database = data / "syringa.toml", str(data / "syringa.db")
            settings.write_text(SETTINGS)
            with serve("--config", str(settings), "--database", database) as server:
                asyncio.run(run(server, database, others, arguments.folder))
        if of_cluster := [name for name in names if SCENES[name].of_cluster]:
            asyncio.run(run_fleet(data, of_cluster, arguments.folder))


if __name__ == "__main__":
    main()
