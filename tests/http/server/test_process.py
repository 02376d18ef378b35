from __future__ import annotations

import os

import pytest

from syringa.http.server import process


@pytest.mark.parametrize(("now", "wanted"), [(0, -5), (10, -5), (-12, -12)])
def test_the_process_comes_first_where_it_may(monkeypatch: pytest.MonkeyPatch, now: int, wanted: int) -> None:
    asked: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda which, who: now)
    monkeypatch.setattr(os, "setpriority", lambda which, who, priority: asked.append(priority))
    process.come_first()
    assert asked == [wanted]


def test_without_the_privilege_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, who: int, priority: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    process.come_first()
