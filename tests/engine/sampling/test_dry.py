from __future__ import annotations

import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.engine.sampling.dry import DryState
from syringa.types import SamplingParams
from tests.tiers import examples


def reference(tokens: list[int], sampling: SamplingParams) -> dict[int, float]:
    """Apply the rule as published, one token at a time."""
    if not tokens or tokens[-1] in sampling.dry_breakers:
        return {}
    longest: dict[int, int] = {}
    for i in range(len(tokens) - 1):
        if tokens[i] != tokens[-1] or tokens[i + 1] in sampling.dry_breakers:
            continue
        length = 1
        while length < 50 and i - length >= 0:
            previous = tokens[-(length + 1)]
            if tokens[i - length] != previous or previous in sampling.dry_breakers:
                break
            length += 1
        longest[tokens[i + 1]] = max(longest.get(tokens[i + 1], 0), length)
    return {
        token: sampling.dry_multiplier * sampling.dry_base ** (length - sampling.dry_allowed_length)
        for token, length in longest.items()
        if length >= sampling.dry_allowed_length
    }


def penalties(state: DryState) -> dict[int, float]:
    ids, amounts = state.penalties()
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), amounts.tolist(), strict=True))


def assert_same(actual: dict[int, float], expected: dict[int, float]) -> None:
    assert actual.keys() == expected.keys()
    for token, amount in expected.items():
        assert np.isclose(actual[token], min(amount, 1e6), rtol=1e-6)


@settings(max_examples=examples(150), deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=120),
    start=st.integers(0, 120),
    breakers=st.frozensets(st.integers(0, 4), max_size=2),
    allowed=st.integers(1, 5),
)
def test_dry_penalties_equal_reference_from_prompt_and_per_token(
    tokens: list[int], start: int, breakers: frozenset[int], allowed: int
) -> None:
    sampling = SamplingParams(seed=0, dry_multiplier=0.8, dry_allowed_length=allowed, dry_breakers=breakers)
    state = DryState(sampling, tokens[:start])
    assert_same(penalties(state), reference(tokens[:start], sampling))
    for i, token in enumerate(tokens[start:], start):
        state.observe(token)
        assert_same(penalties(state), reference(tokens[: i + 1], sampling))


def test_dry_penalizes_token_that_followed_repeated_run() -> None:
    sampling = SamplingParams(seed=0, dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2)
    assert penalties(DryState(sampling, [1, 2, 3, 9, 1, 2, 3])) == {9: 2.0}
    broken = SamplingParams(seed=0, dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2, dry_breakers=frozenset({1}))
    assert penalties(DryState(broken, [1, 2, 3, 9, 1, 2, 3])) == {9: 1.0}


def test_dry_penalty_does_not_overflow() -> None:
    sampling = SamplingParams(seed=0, dry_multiplier=5.0, dry_base=1e30, dry_allowed_length=1)
    assert penalties(DryState(sampling, [7] * 300)) == {7: 1e6}


def test_dry_state_grows_and_forks() -> None:
    sampling = SamplingParams(seed=0, dry_multiplier=0.8)
    state = DryState(sampling, [])
    tokens = [i % 5 for i in range(1500)]
    for token in tokens:
        state.observe(token)
    other = state.fork()
    other.observe(3)
    assert_same(penalties(state), reference(tokens, sampling))
    assert_same(penalties(other), reference([*tokens, 3], sampling))


def test_dry_step_is_fast_with_long_context() -> None:
    state = DryState(SamplingParams(seed=0, dry_multiplier=0.8), [1] * 32_000)
    started = time.process_time()
    for _ in range(10):
        state.observe(1)
        state.penalties()
    assert (time.process_time() - started) / 10 < 0.05
