from __future__ import annotations

import ctypes

import pytest

from syringa.heap import trim_heap


def test_trim_heap_asks_the_c_library_to_return_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Library:
        malloc_trim = staticmethod(asked.append)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    trim_heap()
    assert asked == [0]


def test_trim_heap_does_nothing_where_the_c_library_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    trim_heap()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    trim_heap()
