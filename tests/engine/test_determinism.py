"""The same request gives the same tokens and log-probabilities, to the bit, whatever goes on around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest
from tests.engine.conftest import Answers, Driver, drive, request

pytestmark = pytest.mark.model
Make = Callable[..., EngineCore]

STORY = (
    "The lighthouse keeper had counted 214 ships that winter, and he wrote each of them into a ledger with a steel "
    "pen. On the last night of February, a ship came that was not in any register. Its sails were black, its lamps "
    "were out, and the only sound that reached the shore was a bell that somebody rang slowly, as if to count the "
    "waves. The keeper"
)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "logprobs": 3},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "logprobs": 0},
    "penalised": {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.1, "dry_multiplier": 0.8, "logprobs": 1},
    "greedy": {"temperature": 0.0, "frequency_penalty": 0.3, "logprobs": 20},
}
TOKENS = 20


@pytest.fixture(params=["int8", "bf16"])
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
    """Each request alone in a fresh engine, in one chunk."""
    if dtype not in baselines:
        baselines[dtype] = {
            name: bits(drive(engine(dtype, prefix_caching=False), [target(name, prompt)]), name) for name in SAMPLINGS
        }
    return baselines[dtype]


def target(name: str, prompt: list[int], choices: int = 2) -> EngineRequest:
    return request(name, prompt, seed=1234, max_tokens=TOKENS, choices=choices, **SAMPLINGS[name])


def bits(answers: Answers, name: str, choices: int = 2) -> Any:
    found = [answers[name, choice] for choice in range(choices)]
    assert all(len(a.tokens) == len(a.logprobs) == TOKENS for a in found)
    # Floats compare by value and none of these is NaN or a zero of either sign: equal means the same bits.
    return [(a.tokens, a.logprobs) for a in found]


def all_bits(answers: Answers) -> dict[str, Any]:
    return {name: bits(answers, name) for name in SAMPLINGS}


def test_the_choices_differ_and_the_seed_matters(baseline: dict[str, Any]) -> None:
    assert baseline["plain"][0] != baseline["plain"][1]
    assert baseline["greedy"][0] == baseline["greedy"][1]
    assert len({tuple(tokens) for choices in baseline.values() for tokens, _ in choices}) == 7


def others(prompt: list[int], count: int = 32) -> list[EngineRequest]:
    return [
        request(f"other {i}", prompt[i : 10 + 3 * i] or [1], seed=i, temperature=0.5 + i / 20, max_tokens=5 + i)
        for i in range(count)
    ]


def test_among_32_others(dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any]) -> None:
    driver = Driver(engine(dtype, Limits(step_tokens=300)))
    before, between, after = others(prompt)[:14], others(prompt)[14:18], others(prompt)[18:]
    driver.submit(*before)
    driver.step(3)
    for name, other in zip(SAMPLINGS, between, strict=True):
        driver.submit(target(name, prompt), other)
        driver.step()
    driver.submit(*after)
    assert all_bits(driver.finish()) == baseline


def test_with_a_cached_prefix(dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any]) -> None:
    core = engine(dtype)
    drive(core, [request("first", [*prompt[:50], 7, 7, 7], max_tokens=3)])
    part = drive(core, [target("plain", prompt)])
    assert part["plain", 0].deltas[0].cached_tokens == 48
    whole = drive(core, [target(name, prompt) for name in SAMPLINGS])
    assert whole["plain", 0].deltas[0].cached_tokens == (len(prompt) - 1) // 16 * 16
    assert bits(part, "plain") == baseline["plain"]
    assert all_bits(whole) == baseline


@pytest.mark.parametrize("step_tokens", [1, 13, 40])
def test_in_chunks(dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any], step_tokens: int) -> None:
    core = engine(dtype, Limits(step_tokens=step_tokens, max_running=8), prefix_caching=step_tokens == 13)
    answers = drive(core, [target(name, prompt) for name in SAMPLINGS])
    assert core.stats().steps > TOKENS + 5  # as against one step for the prompts and one for each further token
    assert all_bits(answers) == baseline


@pytest.mark.parametrize("caching", [False, True])
def test_preempted(dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any], caching: bool) -> None:
    """The youngest gives way, so the targets do; without the cache everything is computed again."""
    length = len(prompt) + TOKENS
    core = engine(dtype, kv_cache_tokens=3 * length, prefix_caching=caching)
    driver = Driver(core)
    driver.submit(request("old", prompt[:20], max_tokens=100, stopping={"ignore_eos": True}))
    driver.step()
    driver.submit(*(target(name, prompt) for name in SAMPLINGS))
    answers = driver.finish()
    assert core.stats().preemptions > 0
    assert all_bits(answers) == baseline


def test_a_choice_is_the_same_whatever_the_number_of_choices(
    dtype: str, engine: Make, prompt: list[int], baseline: dict[str, Any]
) -> None:
    core = engine(dtype)
    for choices in (1, 5):
        answers = drive(core, [target("plain", prompt, choices)])
        assert bits(answers, "plain", choices)[:2] == baseline["plain"][:choices]


def test_prompt_scores(dtype: str, engine: Make, prompt: list[int]) -> None:
    """Alone, in other chunks, among others, after a preemption, and with the cache warm."""
    scored = request("scored", prompt, max_tokens=1, prompt_logprobs=3)

    def scores(core: EngineCore, *company: EngineRequest) -> Any:
        return drive(core, [*company, scored])["scored", 0].deltas[0].prompt_logprobs

    expected = scores(engine(dtype))
    assert len(expected) == len(prompt)
    assert expected[0] is None
    assert all(one.token == token for one, token in zip(expected[1:], prompt[1:], strict=True))
    core = engine(dtype)
    assert scores(core, *others(prompt, 12)) == expected
    assert scores(core) == expected
    assert scores(engine(dtype, Limits(step_tokens=11, max_running=4)), *others(prompt, 3)) == expected
