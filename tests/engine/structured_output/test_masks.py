"""The time budget of token masks, with rows of a given cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from syringa.engine.structured_output import masks
from syringa.engine.structured_output.masks import TOO_COMPLEX, MaskFiller, too_expensive


class FakeMatcher:
    """A matcher, and the grammar that several rows share."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def is_error(self) -> bool:
        return self.seconds < 0


class FakeMaskRequest:
    def __init__(self, grammar: FakeMatcher) -> None:
        self.grammar: Any = grammar
        self.matcher: Any = grammar
        self.failure = ""

    def fail(self, reason: str) -> None:
        self.failure = reason


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of rows of each call; 0 stands for a single row."""
    made: list[int] = []

    def work(matcher: FakeMatcher, table: np.ndarray, at: int) -> None:
        end = time.thread_time() + matcher.seconds
        while time.thread_time() < end:
            pass
        table[at] = 7

    def fill_one(matcher: FakeMatcher, table: np.ndarray, at: int) -> None:
        made.append(0)
        work(matcher, table, at)

    def fill_many(executor: Any, requests: list[tuple[FakeMatcher, int]], table: np.ndarray) -> None:
        made.append(len(requests))
        for matcher, at in requests:
            work(matcher, table, at)

    monkeypatch.setattr(masks, "fill_next_token_bitmask", fill_one)
    monkeypatch.setattr(masks, "fill_next_token_bitmask_par", fill_many)
    return made


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    made = MaskFiller(2)
    yield made
    made.close()


def fill(filler: MaskFiller, rows: list[FakeMaskRequest]) -> np.ndarray:
    table = np.full((len(rows), 1), -1, dtype=np.int32)
    filler.fill([(row, at) for at, row in enumerate(rows)], table)
    return table[:, 0]


def test_cheap_rows_are_not_timed(filler: MaskFiller, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "STEP_SECONDS", 60.0)
    for count, expected in ((0, []), (1, [0]), (16, [16]), (40, [16, 16, 8])):
        calls.clear()
        assert (fill(filler, [FakeMaskRequest(FakeMatcher(0)) for _ in range(count)]) == 7).all()
        assert calls == expected


def test_row_with_error_gets_empty_mask(filler: MaskFiller, calls: list[int]) -> None:
    assert fill(filler, [FakeMaskRequest(FakeMatcher(0)), FakeMaskRequest(FakeMatcher(-1))]).tolist() == [7, 0]


def test_expensive_rows_fail_within_time_budget(
    filler: MaskFiller, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expensive = FakeMatcher(0.02)
    rows = [FakeMaskRequest(expensive) if each % 8 else FakeMaskRequest(FakeMatcher(0)) for each in range(128)]
    started = time.thread_time()
    first = fill(filler, rows)
    # 2.2 s of work, of which only the first rows are done before the clock is checked.
    assert time.thread_time() - started < 1
    for row, mask in zip(rows, first, strict=True):
        assert (row.failure, mask) in ((TOO_COMPLEX, 0), ("", 7))
        assert not row.failure or row.grammar is expensive
    left = [row for row in rows if not row.failure]
    assert len(left) < 48
    fill(filler, left)
    assert {row.failure for row in left if row.grammar is expensive} == {TOO_COMPLEX}
    cheap = [row for row in left if row.grammar is not expensive]
    assert len(cheap) == 16
    assert not any(row.failure for row in cheap)
    monkeypatch.setattr(masks, "STEP_SECONDS", 60.0)  # a slow machine does not make these rows expensive
    for _ in range(masks.TIMED_STEPS):
        assert (fill(filler, cheap) == 7).all()
    calls.clear()
    fill(filler, cheap)
    assert calls == [16], "rows are no longer timed"


def test_too_expensive_selects_most_expensive_until_rest_fits() -> None:
    assert too_expensive([0.001] * 500, 0.2) == [], "many cheap rows do not fail"
    assert too_expensive([0.004, 0.02, 0.009, float("inf")], 0.2) == [3, 1]
    assert len(too_expensive([1 / 256] * 100, 50 / 256)) == 50
    assert too_expensive([0.002] * 99 + [0.009, 0.005], 0.2) == [99, 100]
