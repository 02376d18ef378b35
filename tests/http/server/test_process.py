from __future__ import annotations

import os

import pytest

from syringa.http.server import process


@pytest.mark.parametrize(("now", "wanted"), [(0, -5), (10, -5), (-12, -12)])
def test_process_raises_its_priority(monkeypatch: pytest.MonkeyPatch, now: int, wanted: int) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda which, who: now)
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: asked.append(priority))
    process.raise_priority()
    assert asked == [wanted]


def test_process_keeps_its_priority_without_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, priority: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    process.raise_priority()
