"""Property tests draw the same examples in any order of the tests, and in any process."""

from __future__ import annotations

from hypothesis.internal.conjecture import providers


def test_hypothesis_draws_no_constants_of_loaded_modules() -> None:
    assert len(providers.HypothesisProvider(None)._local_constants) == 0
