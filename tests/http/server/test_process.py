from __future__ import annotations

import os

import pytest

from syringa.http.server import process


@pytest.mark.parametrize(("current", "expected"), [(0, -5), (10, -5), (-12, -12)])
def test_process_raises_its_priority(monkeypatch: pytest.MonkeyPatch, current: int, expected: int) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda which, who: current)
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: set_to.append(priority))
    process.raise_priority()
    assert set_to == [expected]


def test_process_keeps_its_priority_without_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(which: int, who: int, priority: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", reject)
    process.raise_priority()
