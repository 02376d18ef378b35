"""A request that is cut off anywhere and resumed in another engine ends like one that was not disturbed."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.structured_output import masks
from syringa.engine.worker.core import EngineCore
from syringa.prompt.grammar.lark import LarkVocabulary
from syringa.prompt.grammar.output_grammar import ReasoningOptions, build_output_grammar
from syringa.types import EngineRequest, Grammar
from tests.engine.conftest import Answer, Answers, Driver, drive, request
from tests.engine.execution.test_overlap import SlowDevice
from tests.engine.worker.resuming import choices_of, cut_answer, join_answers, outcome, resume
from tests.engine.worker.tiny_llama import EOS, SPECIAL, VOCABULARY, tiny_tokenizer, token_id
from tests.tiers import examples

LETTERS = [token_id(text) for text in "abc12 ,"]
END = frozenset({token_id(EOS)})
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
REASONING = build_output_grammar(
    LarkVocabulary({text: token_id(text) for text in SPECIAL}),
    reasoning=ReasoningOptions(format="think", opened=True, budget=6),
    constraint=JSON,
)
assert REASONING is not None
GRAMMARS = [
    Grammar("regex", "[a-c]{2,9}( [0-9]{1,4}){0,6}"),
    Grammar("lark", 'start: item ("," item)*\nitem: /[abc]+/ | "(" start ")"'),
    JSON,
    REASONING,
]

letters = st.sampled_from(LETTERS)
sampling_options = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.7, 1.0, 2.0]), "seed": st.integers(0, 2**64 - 1)},
    optional={
        "top_k": st.integers(1, 40),
        "top_p": st.floats(0.3, 0.99),
        "min_p": st.floats(0.001, 0.3),
        "frequency_penalty": st.floats(-1, 2),
        "presence_penalty": st.floats(-1, 2),
        "repetition_penalty": st.floats(0.7, 1.8),
        "logit_bias": st.dictionaries(letters, st.floats(-5, 5), min_size=1, max_size=4),
        "allowed_tokens": st.just(frozenset(LETTERS) | END),
        "bad_words": st.lists(st.lists(letters, min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple),
        "dry_multiplier": st.floats(0.5, 3),
        "dry_allowed_length": st.integers(1, 3),
        "dry_breakers": st.frozensets(letters, max_size=2),
        "opening": st.lists(letters, min_size=1, max_size=4).map(tuple),
        "grammar": st.sampled_from(GRAMMARS),
    },
)
stop_conditions = st.fixed_dictionaries(
    {"end_tokens": st.just(END)},
    optional={
        "min_tokens": st.integers(1, 12),
        "ignore_eos": st.booleans(),
        "stop_tokens": st.frozensets(letters, min_size=1, max_size=2),
    },
)
request_options = st.fixed_dictionaries(
    {
        "prompt": st.lists(letters | st.integers(0, VOCABULARY - 1), min_size=1, max_size=70),
        "max_tokens": st.integers(0, 24),
        "choices": st.sampled_from([1, 1, 2, 4]),
        "stopping": stop_conditions,
        "logprobs": st.sampled_from([None, 0, 3]),
    },
    optional={
        "logprob_tokens": st.just(tuple(LETTERS[:3])),
        "prompt_logprobs": st.sampled_from([0, 2]),
        "use_cache": st.booleans(),
        "tenant": st.sampled_from(["a", "b"]),
        "priority": st.integers(-1, 1),
    },
)
workloads = st.lists(st.tuples(request_options, sampling_options), min_size=1, max_size=4)


def others(count: int) -> list[EngineRequest]:
    """Return requests that keep an engine busy beside those of a test."""
    rng = random.Random(count)
    prompts = [[rng.choice(LETTERS) for _ in range(rng.randint(3, 60))] for _ in range(count)]
    return [
        request(f"other {i}", prompt, seed=i, max_tokens=6 + 2 * i, stopping={"ignore_eos": True}, tenant="ab"[i % 2])
        for i, prompt in enumerate(prompts)
    ]


def run_among_others(core: EngineCore, requests: list[EngineRequest]) -> Answers:
    driver = Driver(core)
    beside = others(6)
    driver.submit(*beside[:4])
    driver.step(2)
    for each, other in zip(requests, [*beside[4:], *[None] * 4], strict=False):
        driver.submit(each, *([other] if other else []))
        driver.step()
    return driver.finish()


def run_overlapped(core: EngineCore, requests: list[EngineRequest]) -> Answers:
    device = SlowDevice(core)
    core.use_runner(device)
    answers = drive(core, requests)
    assert not device.live
    return answers


SMALL_STEPS = SchedulerLimits(step_tokens=16, max_running=5)
SCENARIOS: dict[str, tuple[dict[str, Any], Callable[[EngineCore, list[EngineRequest]], Answers]]] = {
    "cold": ({}, drive),
    "uncached": ({"prefix_caching": False}, drive),
    "among others": ({"limits": SMALL_STEPS}, run_among_others),
    "preempted": ({"limits": SMALL_STEPS, "kv_cache_tokens": 160, "prefix_caching": False}, run_among_others),
    "overlapped": ({}, run_overlapped),
}


@pytest.fixture(scope="module", autouse=True)
def _no_time_budget_of_masks() -> Iterator[None]:
    """Whether a mask is too expensive depends on the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "STEP_SECONDS", 60)
        yield


@contextlib.contextmanager
def open_core(loaded: LoadedModel, **options: Any) -> Iterator[EngineCore]:
    """Yield an engine, and check that nothing is left in it."""
    options = {"kv_cache_tokens": 2048, "tokenizer_json": tiny_tokenizer().to_str} | options
    core = EngineCore(loaded, **options)
    try:
        yield core
        stats = core.stats()
        assert not core.busy
        assert stats.running == stats.waiting == 0
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    finally:
        core.close()


def cut_requests(requests: list[EngineRequest], answers: Answers, rng: random.Random) -> dict[str, dict[int, Answer]]:
    """Cut each choice of each request off at a random delta. One choice of each request at least is not finished."""
    parts = {}
    for each in requests:
        lengths = [len(answers[each.id, choice].deltas) for choice in range(each.choices)]
        cuts = [rng.choice([0, length, rng.randint(0, length)]) for length in lengths]
        if cuts == lengths:
            cuts[rng.randrange(len(cuts))] -= 1
        parts[each.id] = {choice: cut_answer(answers[each.id, choice], cut) for choice, cut in enumerate(cuts)}
    return parts


@settings(max_examples=examples(120))
@given(
    workload=workloads,
    scenario=st.sampled_from(sorted(SCENARIOS)),
    dtype=st.sampled_from(["int8", "fp32"]),
    warm=st.booleans(),
    cut_seed=st.integers(0, 1000),
)
def test_resumed_requests_equal_undisturbed_ones(
    load_tiny: Callable[[str], LoadedModel],
    workload: list[tuple[dict[str, Any], dict[str, Any]]],
    scenario: str,
    dtype: str,
    warm: bool,
    cut_seed: int,
) -> None:
    """Each is cut off twice; the second engine is the first one, if `warm`, or one that has seen none of it."""
    requests = [request(f"request {i}", **own, **sampling) for i, (own, sampling) in enumerate(workload)]
    rng = random.Random(cut_seed)
    loaded = load_tiny(dtype)
    options, run = SCENARIOS[scenario]
    with open_core(loaded) as first, open_core(loaded) as cold, open_core(loaded, **options) as last:
        expected = drive(first, requests)
        parts = cut_requests(requests, expected, rng)
        driver = Driver(first if warm else cold)
        driver.submit(*(resume(each, parts[each.id]) for each in requests))
        driver.step(rng.randint(0, 12))
        for each in requests:
            driver.core.abort(each.id)
            for choice, answer in choices_of(each, driver.answers).items():
                parts[each.id][choice] = join_answers(parts[each.id][choice], answer)
        driver.step()  # what was prepared meanwhile is dropped
        left = [each for each in requests if any(part.finish is None for part in parts[each.id].values())]
        event(f"resumed twice: {len(left)}")
        resumed = run(last, [resume(each, parts[each.id]) for each in left])
    for each in requests:
        for choice in range(each.choices):
            part, rest = parts[each.id][choice], resumed.get((each.id, choice), Answer())
            assert (part.finish is not None) == (rest.finish is None), "a finished choice is not run again"
            assert outcome(join_answers(part, rest)) == outcome(expected[each.id, choice])
            assert not any(delta.cached_tokens or delta.queued_ms or delta.prompt_tokens for delta in rest.deltas)


@pytest.mark.parametrize("dtype", ["int8", "fp32"])
@pytest.mark.parametrize("grammar", GRAMMARS, ids=["regex", "lark", "schema", "reasoning"])
def test_grammar_is_resumed_at_every_token(
    load_tiny: Callable[[str], LoadedModel], grammar: Grammar, dtype: str
) -> None:
    whole = request(
        "whole",
        LETTERS,
        seed=3,
        temperature=1.5,
        max_tokens=60,
        grammar=grammar,
        logprobs=2,
        stopping={"end_tokens": END},
    )
    with open_core(load_tiny(dtype)) as first, open_core(load_tiny(dtype), prefix_caching=False) as second:
        expected = drive(first, [whole])["whole", 0]
        requests = []
        for cut in range(len(expected.deltas)):
            resumed = resume(whole, {0: cut_answer(expected, cut)})
            requests.append(msgspec.structs.replace(resumed, id=f"cut {cut}"))
        answers = drive(second, requests)
    for cut in range(len(expected.deltas)):
        assert outcome(join_answers(cut_answer(expected, cut), answers[f"cut {cut}", 0])) == outcome(expected)
