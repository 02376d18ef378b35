"""Batch invariance: a request gives bit-equal tokens and log-probabilities, whatever else the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest, ResumedChoice
from tests.engine.conftest import Answers, Driver, drive, request
from tests.tiers import slow

pytestmark = pytest.mark.model
Make = Callable[..., EngineCore]

STORY = (
    "The lighthouse keeper had counted 214 ships that winter, and he wrote each of them into a ledger with a steel "
    "pen. On the last night of February, a ship came that was not in any register. Its sails were black, its lamps "
    "were out, and the only sound that reached the shore was a bell that somebody rang slowly, as if to count the "
    "waves. The keeper"
)
SAMPLING_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "logprobs": 3},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "logprobs": 0},
    "penalized": {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.1, "dry_multiplier": 0.8, "logprobs": 1},
    "greedy": {"temperature": 0.0, "frequency_penalty": 0.3, "logprobs": 20},
}
TOKENS = 20


@pytest.fixture(params=["int8", "bf16", *slow("gguf")])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(STORY).ids)


@pytest.fixture(scope="module")
def baselines() -> dict[str, dict[str, Any]]:
    return {}


@pytest.fixture
def baseline(dtype: str, engine: Make, prompt: list[int], baselines: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the results of each request alone in a fresh engine, in one chunk."""
    if dtype not in baselines:
        baselines[dtype] = {
            name: bits(drive(engine(dtype, prefix_caching=False), [target(name, prompt)]), name)
            for name in SAMPLING_OPTIONS
        }
    return baselines[dtype]


def target(name: str, prompt: list[int], choices: int = 2) -> EngineRequest:
    return request(name, prompt, seed=1234, max_tokens=TOKENS, choices=choices, **SAMPLING_OPTIONS[name])


def bits(answers: Answers, name: str, choices: int = 2) -> Any:
    found = [answers[name, choice] for choice in range(choices)]
    assert all(len(a.tokens) == len(a.logprobs) == TOKENS for a in found)
    # Floats compare by value; none of these is NaN or zero, so equal values have equal bits.
    return [(a.tokens, a.logprobs) for a in found]


def all_bits(answers: Answers) -> dict[str, Any]:
    return {name: bits(answers, name) for name in SAMPLING_OPTIONS}


def test_choices_differ_by_seed_and_position(baseline: dict[str, Any]) -> None:
    assert baseline["plain"][0] != baseline["plain"][1]
    assert baseline["greedy"][0] == baseline["greedy"][1]
    assert len({tuple(tokens) for choices in baseline.values() for tokens, _ in choices}) == 7


def others(prompt: list[int], count: int = 32) -> list[EngineRequest]:
    return [
        request(f"other {i}", prompt[i : 10 + 3 * i] or [1], seed=i, temperature=0.5 + i / 20, max_tokens=5 + i)
        for i in range(count)
    ]


def test_bits_are_equal_in_a_batch_of_32_others(
    dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any]
) -> None:
    driver = Driver(engine(dtype, SchedulerLimits(step_tokens=300)))
    before, between, after = others(prompt)[:14], others(prompt)[14:18], others(prompt)[18:]
    driver.submit(*before)
    driver.step(3)
    for name, other in zip(SAMPLING_OPTIONS, between, strict=True):
        driver.submit(target(name, prompt), other)
        driver.step()
    driver.submit(*after)
    assert all_bits(driver.finish()) == baseline


def test_bits_are_equal_with_cached_prefix(
    dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any]
) -> None:
    core = engine(dtype)
    drive(core, [request("first", [*prompt[:50], 7, 7, 7], max_tokens=3)])
    part = drive(core, [target("plain", prompt)])
    assert part["plain", 0].deltas[0].cached_tokens == 48
    whole = drive(core, [target(name, prompt) for name in SAMPLING_OPTIONS])
    assert whole["plain", 0].deltas[0].cached_tokens == (len(prompt) - 1) // 16 * 16
    assert bits(part, "plain") == baseline["plain"]
    assert all_bits(whole) == baseline


@pytest.mark.parametrize("step_tokens", [13, *slow(1, 40)])
def test_bits_are_equal_in_chunks(
    dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any], step_tokens: int
) -> None:
    core = engine(dtype, SchedulerLimits(step_tokens=step_tokens, max_running=8), prefix_caching=step_tokens == 13)
    answers = drive(core, [target(name, prompt) for name in SAMPLING_OPTIONS])
    assert core.stats().steps > TOKENS + 5  # one step for the prompts and one for each token would be the minimum
    assert all_bits(answers) == baseline


@pytest.mark.parametrize("caching", [False, True])
def test_bits_are_equal_after_preemption(
    dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any], caching: bool
) -> None:
    """The youngest sequences are preempted, which are the targets; without the cache all is recomputed."""
    length = len(prompt) + TOKENS
    core = engine(dtype, kv_cache_tokens=3 * length, prefix_caching=caching)
    driver = Driver(core)
    driver.submit(request("old", prompt[:20], max_tokens=100, stopping={"ignore_eos": True}))
    driver.step()
    driver.submit(*(target(name, prompt) for name in SAMPLING_OPTIONS))
    answers = driver.finish()
    assert core.stats().preemptions > 0
    assert all_bits(answers) == baseline


def test_bits_are_equal_when_another_engine_resumes(
    dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any]
) -> None:
    driver = Driver(engine(dtype, SchedulerLimits(step_tokens=100)))
    driver.submit(*others(prompt)[:6])
    driver.step(2)
    cuts = dict(zip(SAMPLING_OPTIONS, [(1, 19), (7, 0), (16, 3), (12, 12)], strict=True))
    for name, cut in cuts.items():
        choices = tuple(ResumedChoice(tokens[:end]) for (tokens, _), end in zip(baseline[name], cut, strict=True))
        driver.submit(msgspec.structs.replace(target(name, prompt), resumed=choices))
    answers = driver.finish()
    for name, cut in cuts.items():
        for choice, end in enumerate(cut):
            tokens, logprobs = baseline[name][choice]
            answer = answers[name, choice]
            assert (answer.tokens, answer.logprobs) == (tokens[end:], logprobs[end:])


def test_bits_of_a_choice_do_not_depend_on_number_of_choices(
    dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any]
) -> None:
    core = engine(dtype)
    for choices in (1, 5):
        answers = drive(core, [target("plain", prompt, choices)])
        assert bits(answers, "plain", choices)[:2] == baseline["plain"][:choices]


def test_prompt_logprobs_are_bit_equal_in_any_batch(dtype: str, engine: Make, prompt: list[int]) -> None:
    """Alone, in other chunks, in a batch, after a preemption, and with a warm cache."""
    scored = request("scored", prompt, max_tokens=1, prompt_logprobs=3)

    def scores(core: EngineCore, *other_requests: EngineRequest) -> Any:
        return drive(core, [*other_requests, scored])["scored", 0].deltas[0].prompt_logprobs

    expected = scores(engine(dtype))
    assert len(expected) == len(prompt)
    assert expected[0] is None
    assert all(one.token == token for one, token in zip(expected[1:], prompt[1:], strict=True))
    core = engine(dtype)
    assert scores(core, *others(prompt, 12)) == expected
    assert scores(core) == expected
    assert scores(engine(dtype, SchedulerLimits(step_tokens=11, max_running=4)), *others(prompt, 3)) == expected
