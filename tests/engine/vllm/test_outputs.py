"""Deltas from vLLM's outputs have what the deltas of Syringa's own engine have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from syringa.engine.vllm.outputs import to_delta
from syringa.types import EngineDelta, ResumedChoice, TokenLogprobs
from tests.engine.vllm.test_requests import SCHEMA, request
from tests.engine.vllm.vllm_outputs import logprobs, output


def delta(given: Any, choice: int = 0, *, first: bool = True, **fields: Any) -> EngineDelta:
    return to_delta(request(**fields), choice, given, first=first)


def test_tokens_of_a_step() -> None:
    assert delta(output(5), first=False) == EngineDelta("r", 0, [5])


@pytest.mark.parametrize(
    ("finish", "expected"), [("stop", "stop"), ("length", "length"), ("abort", "abort"), ("repetition", "error")]
)
def test_finish_reasons(finish: str, expected: str) -> None:
    found = delta(output(5, finish=finish))
    assert found.finish == expected
    assert found.stop_token == (5 if finish == "stop" else None)
    assert bool(found.error) == (expected == "error")


def test_error_of_a_request_with_a_grammar_is_the_grammars() -> None:
    assert delta(output(finish="error"), sampling={"grammar": SCHEMA}).error_kind == "grammar"
    assert delta(output(finish="error")).error_kind == "engine"


def test_token_that_is_not_allowed_ends_the_choice() -> None:
    """vLLM takes any token where other rules leave none of those that are allowed."""
    assert delta(output(5), sampling={"allowed_tokens": frozenset({5, 6})}).tokens == [5]
    found = delta(output(0), sampling={"allowed_tokens": frozenset({5}), "bad_words": ((5,),)})
    assert (found.tokens, found.finish, found.error_kind) == ([], "error", "no_token")
    assert found.error == "No token is left to continue the output under allowed_token_ids and bad_words."


def test_grammar_whose_tokens_are_excluded_is_named() -> None:
    found = delta(output(0, finish="error"), sampling={"grammar": SCHEMA, "bad_words": ((5,),)})
    assert found.error_kind == "grammar"
    assert found.error == "No token is left to continue the output under the constraint and bad_words."


def test_cached_tokens_and_queue_time_are_on_the_first_delta_of_the_first_choice() -> None:
    given = output(5, num_cached_tokens=2, metrics=SimpleNamespace(queued_ts=10.0, scheduled_ts=10.25))
    found = delta(given, choices=2)
    assert (found.cached_tokens, found.queued_ms) == (2, 250)
    for other in (
        delta(given, first=False, choices=2),
        delta(given, 1, choices=2),
        delta(given, resumed=(ResumedChoice([5]),)),
    ):
        assert (other.cached_tokens, other.queued_ms) == (0, 0)


def test_logprobs_have_the_best_alternatives_by_value_and_id() -> None:
    position = logprobs(t9=-5.0, t7=-1.0, t3=-1.0, t4=-2.0)  # token 9 was sampled, and is not among the best
    found = delta(output(9, logprobs=[position]), logprobs=2)
    assert found.logprobs == [TokenLogprobs(9, -5.0, [(3, -1.0), (7, -1.0)])]
    assert delta(output(9, logprobs=[position]), logprobs=0).logprobs == [TokenLogprobs(9, -5.0)]


def test_logprobs_of_given_tokens() -> None:
    position = logprobs(t9=-1.0, t7=-3.0, t3=float("-inf"))
    found = delta(output(9, logprobs=[position]), logprobs=2, logprob_tokens=(3, 7))
    assert found.logprobs == [TokenLogprobs(9, -1.0, [(7, -3.0), (3, -9999.0)])]


def test_prompt_logprobs_are_on_the_first_delta_of_the_first_choice() -> None:
    rows = [None, logprobs(t2=-1.0, t5=-0.5), logprobs(t3=-0.1)]
    expected = [None, TokenLogprobs(2, -1.0, [(5, -0.5)], 2), TokenLogprobs(3, -0.1, [(3, -0.1)], 1)]
    given = output(5, prompt_logprobs=rows)
    assert delta(given, prompt_logprobs=1).prompt_logprobs == expected
    assert delta(given, 1, prompt_logprobs=1, choices=2).prompt_logprobs is None
    assert delta(given, first=False, prompt_logprobs=1).prompt_logprobs is None


def test_prompt_logprobs_of_a_resumed_request_end_with_its_prompt() -> None:
    rows = [None, logprobs(t2=-1.0), logprobs(t3=-0.1), logprobs(t5=-0.2)]  # the last is of its output
    found = delta(output(6, prompt_logprobs=rows), prompt_logprobs=0, resumed=(ResumedChoice([5]),))
    assert found.prompt_logprobs == [None, TokenLogprobs(2, -1.0, [], 1), TokenLogprobs(3, -0.1, [], 1)]


def test_request_without_output_gets_no_token() -> None:
    rows = [None, logprobs(t2=-1.0), logprobs(t3=-0.1)]
    found = delta(output(5, finish="length", prompt_logprobs=rows), stopping={"max_tokens": 0}, prompt_logprobs=0)
    assert (found.tokens, found.logprobs, found.finish) == ([], [], "length")
    assert found.prompt_logprobs is not None
