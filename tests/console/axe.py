"""axe-core, which looks for what keeps people with disabilities from using a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page

from tests.tiers import SLOW

_SCRIPT = Path(__file__).resolve().parents[2] / "node_modules" / "axe-core" / "axe.min.js"
_RUN = "axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations)"


def find_axe() -> str:
    """Return axe-core's script; skip the test without it, or fail it in the slow tier."""
    if not _SCRIPT.exists():
        message = "the console's accessibility is tested with axe-core, which is not installed: run 'npm ci'"
        pytest.fail(message) if SLOW else pytest.skip(message)
    return _SCRIPT.read_text()


async def serious_violations(page: Page) -> list[str]:
    """Return the violations of a page that are serious or critical, each with its elements."""
    await page.evaluate(find_axe())
    found: list[dict[str, Any]] = await page.evaluate(_RUN)
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]} {node['failureSummary']}"
        for each in found
        for node in each["nodes"][:3]
        if each["impact"] in ("serious", "critical")
    ]


async def check_page(page: Page) -> None:
    """Assert that a page has no serious violation, and does not scroll sideways."""
    assert await serious_violations(page) == []
    width = await page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], f"the page is {width[0]} px wide, the window {width[1]} px"
