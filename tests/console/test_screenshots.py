"""The script that takes the pictures of the console."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.async_api import Browser

from scripts.screenshots import shoot
from tests.chat_models import plain_model
from tests.client import server
from tests.fake_engine import FakeEngine

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


async def test_script_takes_a_picture_of_a_page(browser: Browser, tmp_path: Path) -> None:
    async with server(FakeEngine("hello"), model=plain_model()) as http:
        await shoot(browser, str(http.base_url).rstrip("/"), "models", True, tmp_path)
    assert (tmp_path / "console-models-dark.png").read_bytes().startswith(b"\x89PNG")
