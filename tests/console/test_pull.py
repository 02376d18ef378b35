"""A model that is pulled in a browser: its bytes are transferred, then it is listed, loaded and answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from syringa.modelfiles import locate
from tests.console.browser import open_page
from tests.console.test_pages_model import card_of, visit
from tests.e2e.server import Server, serve
from tests.modelfiles.fake_hub import FakeHub, fake_hub

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SOURCE, FILE = "lilac/small-GGUF", "small-Q4_1.gguf"
SLOW_AFTER = 40_000_000  # bytes; more than are read to see which model it is


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A Hub with the default model, which sends a part of its file at once, and the rest slowly until it is told to."""
    with fake_hub() as running:
        running.repositories[SOURCE] = {FILE: Path(locate("default").path).read_bytes()}
        running.slow_after[FILE] = SLOW_AFTER
        try:
            yield running
        finally:
            running.released.set()


@pytest.fixture
def server(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    settings = tmp_path / "models.toml"
    settings.write_text(f'[[models]]\nid = "smollm2"\npath = "{locate("default").path}"\nmax_model_len = 256\n')
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serve("--config", str(settings), "--requests-per-minute", "0") as running:
        yield running


async def test_pulled_model_is_transferred_listed_loaded_and_answers(
    browser: Browser, server: Server, hub: FakeHub, tmp_path: Path
) -> None:
    async with open_page(browser, server.url, path="/models") as (page, _):
        await page.get_by_role("button", name="Pull a model", exact=True).click()
        dialog = page.get_by_role("dialog", name="Pull a model", exact=True)
        await dialog.get_by_label("From the Hugging Face Hub", exact=True).fill(f"{SOURCE}:Q4_1")
        await dialog.get_by_label("Serve as", exact=True).fill("lilac")
        await dialog.get_by_role("button", name="Pull", exact=True).click()
        progress = page.get_by_role("progressbar", name=f"Download of {SOURCE}:Q4_1", exact=True)
        total = len(hub.repositories[SOURCE][FILE])
        await expect(progress).to_have_attribute("max", str(total))
        shown = page.locator(".pull-figures")
        await expect(shown).to_contain_text(f"of {total / 1e6:.1f} MB")
        bar = await progress.element_handle()
        await page.wait_for_function("([bar, least]) => bar.value >= least", arg=[bar, SLOW_AFTER])
        assert await progress.evaluate("(bar) => bar.value") < total
        await expect(card_of(page, "lilac")).to_have_count(0)
        hub.released.set()
        await expect(page.locator(".pull").get_by_text("completed", exact=True)).to_be_visible()
        (file,) = (tmp_path / "hub").rglob(f"snapshots/*/{FILE}")
        assert file.read_bytes() == hub.repositories[SOURCE][FILE]
        card = card_of(page, "lilac")
        await expect(card.get_by_text("cold", exact=True)).to_be_visible()
        await card.get_by_role("button", name="Load lilac", exact=True).click()
        await expect(card.get_by_text("loaded", exact=True)).to_be_visible()
        main = await visit(page, "Completions")
        await main.get_by_label("Model", exact=True).select_option("lilac")
        await main.get_by_label("Maximum tokens", exact=True).fill("4")
        await main.get_by_role("button", name="Complete", exact=True).click()
        await expect(main.get_by_role("status").filter(has_text="4 out")).to_be_visible()
        await expect(main.get_by_role("group", name="Tokens; arrow keys choose one", exact=True)).to_be_visible()
