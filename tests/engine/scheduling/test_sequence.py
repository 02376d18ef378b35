from __future__ import annotations

from typing import Any

import msgspec
import pytest

from syringa.engine.sampling.sampler_input import NO_TOKEN, SamplerState
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.sequence import Sequence, append_token, check_stop
from syringa.types import EngineRequest, FinishReason, SamplingParams, StopConditions, TokenLogprobs

END, STOP, WORD = 1, 2, 9


class FakeGrammarState:
    """A grammar state that counts its forks."""

    finished = accepting = False
    error = None

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    def accept(self, token: int) -> bool:
        return True

    def fork(self) -> FakeGrammarState:
        return FakeGrammarState(self.depth + 1)


def sequence(prompt: list[int], grammar: FakeGrammarState | None = None, **stopping: object) -> Sequence:
    request = EngineRequest(
        id="r",
        prompt=prompt,
        sampling=SamplingParams(seed=0, presence_penalty=1.0),
        stopping=StopConditions(**({"max_tokens": 5} | stopping)),  # type: ignore[arg-type]
    )
    return Sequence(request, 0, SamplerState(request.sampling, prompt), grammar, tokens=list(prompt))


@pytest.mark.parametrize(
    ("token", "generated", "context_left", "conditions", "reason"),
    [
        (WORD, 1, 10, {}, None),
        (END, 1, 10, {}, "stop"),
        (STOP, 1, 10, {}, "stop"),
        (END, 1, 10, {"ignore_eos": True}, None),
        (STOP, 1, 10, {"ignore_eos": True}, "stop"),  # the request's stop tokens still apply
        (END, 2, 10, {"min_tokens": 3}, None),
        (STOP, 2, 10, {"min_tokens": 3}, None),
        (END, 3, 10, {"min_tokens": 3}, "stop"),
        (WORD, 4, 10, {}, None),
        (WORD, 5, 10, {}, "length"),
        (END, 5, 10, {}, "stop"),  # the last token that fits may be an end token
        (END, 5, 10, {"ignore_eos": True}, "length"),
        (WORD, 1, 1, {}, None),
        (WORD, 1, 0, {}, "length"),  # the context is full
        (END, 1, 0, {}, "stop"),
    ],
)
def test_check_stop(
    token: int, generated: int, context_left: int, conditions: dict[str, object], reason: FinishReason | None
) -> None:
    stopping = StopConditions(max_tokens=5, end_tokens=frozenset({END}), stop_tokens=frozenset({STOP}), **conditions)  # type: ignore[arg-type]
    assert check_stop(stopping, token, generated, context_left) == reason


def test_sequence_counts_follow_its_tokens() -> None:
    one = sequence([5, 6, 7])
    assert (one.prompt_length, one.generated, one.needed) == (3, 0, 3)
    one.computed = 3
    one.tokens.append(8)
    assert (one.prompt_length, one.generated, one.needed) == (3, 1, 1)


def test_sequence_bans_end_tokens_until_min_tokens() -> None:
    one = sequence([5], min_tokens=2, end_tokens=frozenset({END}), stop_tokens=frozenset({STOP}))
    assert one.banned == {END, STOP}
    one.tokens += [8]
    assert one.banned == {END, STOP}
    one.tokens += [8]
    assert one.banned == frozenset()


def test_sequence_missing_blocks() -> None:
    one = sequence([5])
    assert [one.missing_blocks(n) for n in (0, 1, BLOCK_SIZE, BLOCK_SIZE + 1)] == [0, 1, 1, 2]
    one.block_table = [3]
    assert [one.missing_blocks(n) for n in (1, BLOCK_SIZE, BLOCK_SIZE + 1)] == [0, 0, 1]


def test_sequence_scores_prompt_until_every_token_has_logprobs() -> None:
    one = sequence([5, 6, 7])
    assert not one.scoring
    one.prompt_scores = [None]
    assert one.scoring
    one.prompt_scores += [TokenLogprobs(6, -1.0), TokenLogprobs(7, -1.0)]
    assert not one.scoring
    alone = sequence([5])
    alone.prompt_scores = [None]
    assert not alone.scoring


def test_sequence_fork_shares_no_mutable_state() -> None:
    one = sequence([5, 6, 7], FakeGrammarState())
    one.computed, one.block_table, one.block_hashes, one.cached = 3, [4], [b"x"], 2
    fork = one.fork(2)
    assert (fork.choice, fork.arrival, fork.computed, fork.cached) == (2, one.arrival, 3, 2)
    assert (fork.siblings, fork.last_step, fork.prompt_scores) == (0, None, None)
    assert isinstance(fork.grammar, FakeGrammarState)
    assert fork.grammar.depth == 1
    fork.tokens.append(8)
    fork.block_table.append(9)
    fork.block_hashes.append(b"y")
    fork.state.observe(8)
    assert (one.tokens, one.block_table, one.block_hashes) == ([5, 6, 7], [4], [b"x"])
    assert one.state.counts is not None
    assert one.state.counts.generated()[0].tolist() == []


def test_sequence_prefers_opening_while_output_matches_it() -> None:
    request = EngineRequest(
        id="r", prompt=[5], sampling=SamplingParams(seed=0, opening=(7, 8)), stopping=StopConditions(max_tokens=9)
    )
    written = Sequence(request, 0, SamplerState(request.sampling, [5]), tokens=[5])
    found = []
    for token in (7, 8, 7):
        found.append(written.preferred)
        written.tokens.append(token)
    assert found == [7, 8, None]
    diverged = Sequence(request, 0, SamplerState(request.sampling, [5]), tokens=[5, 9])
    assert diverged.preferred is None


@pytest.mark.parametrize(
    "rules", [{"allowed_tokens": frozenset({WORD})}, {"bad_words": ((WORD,),)}, {"logit_bias": {WORD: 1.0}}]
)
def test_sequence_with_token_rules_is_sampled_by_the_host(rules: dict[str, Any]) -> None:
    one = sequence([5])
    one.state = SamplerState(SamplingParams(seed=0))
    assert not one.needs_host
    one.state = SamplerState(SamplingParams(seed=0, **rules))
    assert one.needs_host


def test_append_token_names_the_rules_that_leave_no_token() -> None:
    one = sequence([5])
    assert append_token(one, NO_TOKEN, 10) == ([], "error", "The model gave no usable probabilities.")
    sampling = SamplingParams(seed=0, allowed_tokens=frozenset({WORD}), bad_words=((WORD,),))
    one.request = msgspec.structs.replace(one.request, sampling=sampling)
    tokens, finish, error = append_token(one, NO_TOKEN, 10)
    assert (tokens, finish) == ([], "error")
    assert error is not None
    assert "allowed_token_ids and bad_words" in error
