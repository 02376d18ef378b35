from __future__ import annotations

import pytest

from syringa.engine.sampling.rows import SamplerState
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.sequence import Sequence, check_stop
from syringa.types import EngineRequest, FinishReason, Sampling, Stopping, TokenLogprobs

END, STOP, WORD = 1, 2, 9


class Grammar:
    """A grammar state that only knows how often it was forked."""

    finished = accepting = False
    error = None

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth

    def accept(self, token: int) -> bool:
        return True

    def fork(self) -> Grammar:
        return Grammar(self.depth + 1)


def sequence(prompt: list[int], grammar: Grammar | None = None, **stopping: object) -> Sequence:
    request = EngineRequest(
        id="r",
        prompt=prompt,
        sampling=Sampling(seed=0, presence_penalty=1.0),
        stopping=Stopping(**({"max_tokens": 5} | stopping)),  # type: ignore[arg-type]
    )
    return Sequence(request, 0, SamplerState(request.sampling, prompt), grammar, tokens=list(prompt))


@pytest.mark.parametrize(
    ("token", "generated", "room", "rules", "reason"),
    [
        (WORD, 1, 10, {}, None),
        (END, 1, 10, {}, "stop"),
        (STOP, 1, 10, {}, "stop"),
        (END, 1, 10, {"ignore_eos": True}, None),
        (STOP, 1, 10, {"ignore_eos": True}, "stop"),  # the request's own stop tokens still count
        (END, 2, 10, {"min_tokens": 3}, None),
        (STOP, 2, 10, {"min_tokens": 3}, None),
        (END, 3, 10, {"min_tokens": 3}, "stop"),
        (WORD, 4, 10, {}, None),
        (WORD, 5, 10, {}, "length"),
        (END, 5, 10, {}, "stop"),  # the last token that fits may still be the end
        (END, 5, 10, {"ignore_eos": True}, "length"),
        (WORD, 1, 1, {}, None),
        (WORD, 1, 0, {}, "length"),  # the context is full
        (END, 1, 0, {}, "stop"),
    ],
)
def test_check_stop(
    token: int, generated: int, room: int, rules: dict[str, object], reason: FinishReason | None
) -> None:
    stopping = Stopping(max_tokens=5, end_tokens=frozenset({END}), stop_tokens=frozenset({STOP}), **rules)  # type: ignore[arg-type]
    assert check_stop(stopping, token, generated, room) == reason


def test_counts_follow_the_tokens() -> None:
    one = sequence([5, 6, 7])
    assert (one.prompt_length, one.generated, one.needed) == (3, 0, 3)
    one.computed = 3
    one.tokens.append(8)
    assert (one.prompt_length, one.generated, one.needed) == (3, 1, 1)


def test_ends_are_banned_until_the_answer_is_long_enough() -> None:
    one = sequence([5], min_tokens=2, end_tokens=frozenset({END}), stop_tokens=frozenset({STOP}))
    assert one.banned == {END, STOP}
    one.tokens += [8]
    assert one.banned == {END, STOP}
    one.tokens += [8]
    assert one.banned == frozenset()


def test_blocks_for() -> None:
    one = sequence([5])
    assert [one.blocks_for(n) for n in (0, 1, BLOCK_SIZE, BLOCK_SIZE + 1)] == [0, 1, 1, 2]
    one.blocks = [3]
    assert [one.blocks_for(n) for n in (1, BLOCK_SIZE, BLOCK_SIZE + 1)] == [0, 0, 1]


def test_a_prompt_is_scored_until_every_token_is() -> None:
    one = sequence([5, 6, 7])
    assert not one.scoring
    one.prompt_scores = [None]
    assert one.scoring
    one.prompt_scores += [TokenLogprobs(6, -1.0), TokenLogprobs(7, -1.0)]
    assert not one.scoring
    alone = sequence([5])
    alone.prompt_scores = [None]
    assert not alone.scoring


def test_a_fork_shares_nothing_that_changes() -> None:
    one = sequence([5, 6, 7], Grammar())
    one.computed, one.blocks, one.names, one.cached = 3, [4], [b"x"], 2
    fork = one.fork(2)
    assert (fork.choice, fork.arrival, fork.computed, fork.cached) == (2, one.arrival, 3, 2)
    assert (fork.siblings, fork.started, fork.prompt_scores) == (0, False, None)
    assert isinstance(fork.grammar, Grammar)
    assert fork.grammar.depth == 1
    fork.tokens.append(8)
    fork.blocks.append(9)
    fork.names.append(b"y")
    fork.state.observe(8)
    assert (one.tokens, one.blocks, one.names) == ([5, 6, 7], [4], [b"x"])
    assert one.state.counts is not None
    assert one.state.counts.generated()[0].tolist() == []


def test_an_opening_is_favoured_as_long_as_it_is_followed() -> None:
    request = EngineRequest(
        id="r", prompt=[5], sampling=Sampling(seed=0, opening=(7, 8)), stopping=Stopping(max_tokens=9)
    )
    written = Sequence(request, 0, SamplerState(request.sampling, [5]), tokens=[5])
    found = []
    for token in (7, 8, 7):
        found.append(written.favoured)
        written.tokens.append(token)
    assert found == [7, 8, None]
    elsewhere = Sequence(request, 0, SamplerState(request.sampling, [5]), tokens=[5, 9])
    assert elsewhere.favoured is None
