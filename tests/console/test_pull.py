"""Models that are pulled in a browser: transferred, listed, loaded, answering, and removed with their files.

On a desktop without keys, and on a phone with the key of an administrator.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from syringa.modelfiles import locate
from tests.console.browser import DESKTOP, PHONE, choose
from tests.console.real_server import RealServer, create_key
from tests.console.test_pages_model import card_of, visit
from tests.e2e.server import serve
from tests.engine.embedding.tiny_encoders import save_encoder
from tests.modelfiles.fake_hub import FakeHub, fake_hub

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.asyncio(loop_scope="module")]

SOURCE, FILE = "lilac/small-GGUF", "small-Q4_1.gguf"
SIZES = pytest.mark.parametrize(
    ("size", "real"), [(DESKTOP, False), (PHONE, True)], ids=["desktop-no keys", "phone-keys"], indirect=["real"]
)
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
def embedding(tmp_path: Path) -> Path:
    """The folder of a small embedding model, in the place of the catalog's in the directory of models."""
    folder = tmp_path / "home" / "models" / "all-MiniLM-L6-v2"
    folder.mkdir(parents=True)
    save_encoder(folder, "Bert", pooling="mean_tokens")
    return folder


@pytest.fixture
def real(
    request: pytest.FixtureRequest, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RealServer]:
    settings = tmp_path / "models.toml"
    settings.write_text(f'[[models]]\nid = "smollm2"\npath = "{locate("default").path}"\nmax_model_len = 256\n')
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with serve("--config", str(settings), "--requests-per-minute", "0") as running:
        yield RealServer(running.url, "", create_key(running.url, "operators", admin=True) if request.param else "")


@SIZES
async def test_pulled_model_is_transferred_listed_loaded_and_answers(
    browser: Browser, real: RealServer, size: tuple[int, int], hub: FakeHub, tmp_path: Path
) -> None:
    async with real.page(browser, size, path="/models", admin=True) as (page, _):
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


@SIZES
async def test_model_of_the_catalog_is_added_and_removed_with_its_files(
    browser: Browser, embedding: Path, real: RealServer, size: tuple[int, int]
) -> None:
    async with real.page(browser, size, path="/models", admin=True) as (page, _):
        await page.get_by_role("button", name="Pull a model").first.click()
        await page.get_by_role("dialog").get_by_role("button", name="Add embedding", exact=True).click()
        await expect(page.locator(".pull").get_by_text("completed", exact=True)).to_be_visible()
        await expect(card_of(page, "embedding")).to_be_visible()
        await choose(page, page.get_by_role("button", name="More about embedding", exact=True), "Remove")
        dialog = page.get_by_role("dialog", name="Remove embedding?")
        await dialog.get_by_role("switch", name="Delete its files too").press("Space")
        await dialog.get_by_role("button", name="Remove", exact=True).click()
        await expect(card_of(page, "embedding")).to_have_count(0)
    assert not list(embedding.parent.iterdir())
