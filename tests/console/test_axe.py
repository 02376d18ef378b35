"""Accessibility is never left out unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.console import axe


@pytest.mark.parametrize(("slow", "outcome"), [(True, pytest.fail.Exception), (False, pytest.skip.Exception)])
def test_missing_axe_fails_the_slow_tier_and_skips_the_fast_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow: bool, outcome: type[BaseException]
) -> None:
    monkeypatch.setattr(axe, "_SCRIPT", tmp_path / "axe.min.js")
    monkeypatch.setattr(axe, "SLOW", slow)
    with pytest.raises(outcome, match="npm ci"):
        axe.find_axe()
