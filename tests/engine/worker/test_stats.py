"""The histograms of an engine: tokens of its steps, and times between tokens."""

from __future__ import annotations

import pytest

from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.worker.stats import EngineCounters, Histogram
from tests.engine.scheduling.model_free_engine import sequence


def test_histogram_counts_a_bound_in_its_own_bucket() -> None:
    histogram = Histogram((1, 8))
    for value in (0.5, 1, 1.5, 8, 9):
        histogram.observe(value)
    histogram.observe(2, count=3)
    assert histogram.counts.counts == (2, 5, 1)
    assert histogram.counts.sum == 26


class Steps:
    """Steps of chosen duration, in which chosen sequences get a token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.counters = EngineCounters()
        monkeypatch.setattr("syringa.engine.worker.stats.time.perf_counter", lambda: self.now)

    def step(self, seconds: float, *sequences: Sequence) -> None:
        started = self.now
        for each in sequences:
            self.counters.record_delta(each)
        self.now += seconds
        self.counters.record_step(started, tokens=len(sequences))

    def gaps(self) -> dict[float, int]:
        """The number of observations by the upper bound of their bucket."""
        found = self.counters.token_gaps.counts
        return {bound: count for bound, count in zip(found.bounds, found.counts, strict=False) if count}


def test_token_gap_is_the_time_between_the_ends_of_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    one, other = sequence([1, 2]), sequence([1, 2])
    steps.step(30.0, one)  # the prompt: no gap
    assert steps.gaps() == {}
    steps.step(0.009, one, other)
    assert steps.gaps() == {0.01: 1}
    steps.step(0.009, one, other)
    assert steps.gaps() == {0.01: 3}
    assert steps.counters.token_gaps.counts.sum == pytest.approx(0.027)


def test_token_gap_covers_steps_without_a_token_of_the_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    preempted, other = sequence([1, 2]), sequence([1, 2])
    steps.step(0.09, preempted, other)
    steps.step(0.09, other)
    steps.step(0.09, other)
    steps.now += 2.0  # idle
    steps.step(0.09, other, preempted)
    assert steps.gaps() == {0.1: 2, 2.5: 2}


def test_two_tokens_of_one_step_have_no_time_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    one = sequence([1, 2])
    steps.step(3.0, one, one)
    assert steps.gaps() == {0.001: 1}
    assert steps.counters.token_gaps.counts.sum == 0


def test_steps_without_tokens_are_not_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch)
    one = sequence([1, 2])
    steps.step(0.01)
    steps.step(0.01, one)
    assert sum(steps.counters.step_tokens.counts.counts) == 1
    assert steps.counters.steps == 2
