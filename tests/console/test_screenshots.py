"""The script that takes the pictures of the console, and the pages of the documentation that show them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.async_api import Browser

from scripts.sample_fleet import sample_fleet
from scripts.screenshots import IMAGES, SCENES, shoot
from tests.chat_models import plain_model
from tests.client import server
from tests.fake_engine import FakeEngine

ROOT = IMAGES.parents[1]


def is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_script_takes_a_picture_of_a_page(browser: Browser, tmp_path: Path) -> None:
    async with server(FakeEngine("hello"), model=plain_model()) as http:
        await shoot(browser, str(http.base_url).rstrip("/"), "models", True, tmp_path)
    assert is_picture(tmp_path / "console-models-dark.png")


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_script_takes_a_picture_of_a_cluster(browser: Browser, tmp_path: Path) -> None:
    async with sample_fleet(tmp_path) as (url, key):
        await shoot(browser, url, "fleet", False, tmp_path, key)
    assert is_picture(tmp_path / "console-fleet-light.png")


def test_pictures_of_the_script_are_those_that_the_documentation_shows() -> None:
    shown: set[str] = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        shown.update(re.findall(r"images/(console-[\w-]+\.png)", page.read_text()))
    taken = {f"console-{name}-light.png" for name in SCENES}
    taken |= {f"console-{name}-dark.png" for name, scene in SCENES.items() if scene.dark}
    assert shown == taken
    assert taken == {each.name for each in IMAGES.glob("console-*.png")}
