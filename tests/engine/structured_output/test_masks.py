"""Masks inside a step's time, with rows that cost what the test says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from syringa.engine.structured_output import masks
from syringa.engine.structured_output.masks import TOO_COMPLEX, MaskFiller, too_expensive


class Grammar:
    """In place of a matcher, and of what several have in common."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def is_error(self) -> bool:
        return self.seconds < 0


class MaskRequest:
    def __init__(self, grammar: Grammar) -> None:
        self.grammar: Any = grammar
        self.matcher: Any = grammar
        self.failure = ""

    def fail(self, reason: str) -> None:
        self.failure = reason


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each call computed; 0: one, timed or alone."""
    made: list[int] = []

    def work(matcher: Grammar, table: np.ndarray, at: int) -> None:
        end = time.thread_time() + matcher.seconds
        while time.thread_time() < end:
            pass
        table[at] = 7

    def alone(matcher: Grammar, table: np.ndarray, at: int) -> None:
        made.append(0)
        work(matcher, table, at)

    def together(executor: Any, todo: list[tuple[Grammar, int]], table: np.ndarray) -> None:
        made.append(len(todo))
        for matcher, at in todo:
            work(matcher, table, at)

    monkeypatch.setattr(masks, "fill_next_token_bitmask", alone)
    monkeypatch.setattr(masks, "fill_next_token_bitmask_par", together)
    return made


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    made = MaskFiller(2)
    yield made
    made.close()


def fill(filler: MaskFiller, rows: list[MaskRequest]) -> np.ndarray:
    table = np.full((len(rows), 1), -1, dtype=np.int32)
    filler.fill([(row, at) for at, row in enumerate(rows)], table)
    return table[:, 0]


def test_ordinary_rows_are_not_timed(filler: MaskFiller, calls: list[int]) -> None:
    for count, wanted in ((0, []), (1, [0]), (16, [16]), (40, [16, 16, 8])):
        calls.clear()
        assert (fill(filler, [MaskRequest(Grammar(0)) for _ in range(count)]) == 7).all()
        assert calls == wanted


def test_a_row_in_error_gets_no_token(filler: MaskFiller, calls: list[int]) -> None:
    assert fill(filler, [MaskRequest(Grammar(0)), MaskRequest(Grammar(-1))]).tolist() == [7, 0]


def test_dear_rows_fail_and_the_step_stays_short(filler: MaskFiller, calls: list[int]) -> None:
    dear = Grammar(0.02)
    rows = [MaskRequest(dear) if each % 8 else MaskRequest(Grammar(0)) for each in range(128)]
    started = time.thread_time()
    first = fill(filler, rows)
    # 2.2 s of work, of which the first rows alone were done before anybody looked at the clock.
    assert time.thread_time() - started < 1
    for row, mask in zip(rows, first, strict=True):
        assert (row.failure, mask) in ((TOO_COMPLEX, 0), ("", 7))
        assert not row.failure or row.grammar is dear
    left = [row for row in rows if not row.failure]
    assert len(left) < 48
    fill(filler, left)
    assert {row.failure for row in left if row.grammar is dear} == {TOO_COMPLEX}
    cheap = [row for row in left if row.grammar is not dear]
    assert len(cheap) == 16
    assert not any(row.failure for row in cheap)
    for _ in range(masks.TIMED_STEPS):
        assert (fill(filler, cheap) == 7).all()
    calls.clear()
    fill(filler, cheap)
    assert calls == [16], "all is well again, and nobody is timed"


def test_the_dearest_go_until_the_rest_fit() -> None:
    assert too_expensive([0.001] * 500, 0.2) == [], "many that are cheap are nobody's fault"
    assert too_expensive([0.004, 0.02, 0.009, float("inf")], 0.2) == [3, 1]
    assert len(too_expensive([1 / 256] * 100, 50 / 256)) == 50
    assert too_expensive([0.002] * 99 + [0.009, 0.005], 0.2) == [99, 100]
