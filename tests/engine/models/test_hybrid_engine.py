"""The engine with a tiny hybrid model: reuse of prefixes, choices, preemption, aborts and memory, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.execution.batch import StepTensors
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions, state_slots
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.memory_plan import MemorySettings, plan_memory, program_bytes
from syringa.engine.loading.model_size import read_model_size
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.scheduling.state_cache import MIN_SLOTS, SNAPSHOT_SLOTS
from syringa.engine.worker.core import EngineCore
from syringa.modelfiles import describe, locate
from tests.engine.conftest import Answers, Driver, drive, request
from tests.engine.models.hybrid_models import LONG_PROMPTS, make_config, save_hybrid
from tests.engine.models.tiny_models import reference

ENDLESS = {"ignore_eos": True}
PROMPT = LONG_PROMPTS[-1]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("hybrid")
    return folder, save_hybrid(folder, make_config("qwen3_next"))


@pytest.fixture(scope="module")
def loaded(hybrid: tuple[Path, Any]) -> LoadedModel:
    return load_model(LoadOptions(model=str(hybrid[0]), dtype="fp32", threads=1))


def tokens_of(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: answer.tokens for key, answer in answers.items()}


def assert_idle(core: EngineCore) -> None:
    stats = core.stats()
    assert stats.running == stats.waiting == 0
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.state_slots > 0
    assert stats.state_slots_free + stats.state_snapshots == stats.state_slots


def test_hybrid_greedy_tokens_match_transformers(hybrid: tuple[Path, Any], loaded: LoadedModel) -> None:
    core = EngineCore(loaded, SchedulerLimits(step_tokens=40, max_running=3), kv_cache_tokens=1024)
    requests = [
        request(str(i), prompt, max_tokens=8, temperature=0.0, stopping=ENDLESS)
        for i, prompt in enumerate(LONG_PROMPTS)
    ]
    answers = drive(core, requests)
    for i, prompt in enumerate(LONG_PROMPTS):
        tokens = list(prompt)
        for _ in range(8):
            tokens.append(int(reference(hybrid[1], tokens)[-1].argmax()))
        assert answers[str(i), 0].tokens == tokens[len(prompt) :]
    assert_idle(core)
    core.close()


def test_hybrid_reuses_prefix_with_the_same_tokens(loaded: LoadedModel) -> None:
    follow_up = [*PROMPT, 9, 8, 7, 6]
    cold = EngineCore(loaded, kv_cache_tokens=1024, prefix_caching=False)
    expected = drive(cold, [request("x", follow_up, max_tokens=12, stopping=ENDLESS, seed=3)])
    assert cold.stats().state_snapshots == 0
    warm = EngineCore(loaded, kv_cache_tokens=1024)
    drive(warm, [request("a", PROMPT, max_tokens=2, stopping=ENDLESS)])
    answers = drive(warm, [request("x", follow_up, max_tokens=12, stopping=ENDLESS, seed=3)])
    assert answers["x", 0].tokens == expected["x", 0].tokens
    assert answers["x", 0].deltas[0].cached_tokens == 128
    for core in (cold, warm):
        assert_idle(core)
        core.close()


def test_hybrid_choices_equal_those_of_separate_requests_with_their_seed(loaded: LoadedModel) -> None:
    """Choices share the prompt's state; with more of them than slots, some are computed again."""
    options: dict[str, Any] = {"max_tokens": 10, "stopping": ENDLESS, "seed": 5}
    answers = []
    for running in (16, 2):
        core = EngineCore(loaded, SchedulerLimits(max_running=running), kv_cache_tokens=2048)
        answers.append(tokens_of(drive(core, [request("x", PROMPT, choices=5, **options)])))
        assert_idle(core)
        core.close()
    assert len(answers[0]) == 5
    assert len({tuple(tokens) for tokens in answers[0].values()}) > 1
    assert answers[0] == answers[1]


def test_hybrid_output_does_not_depend_on_preemption_or_chunks(loaded: LoadedModel) -> None:
    requests = [
        request(str(i), prompt, max_tokens=25, stopping=ENDLESS, seed=i) for i, prompt in enumerate(LONG_PROMPTS)
    ]
    found = []
    for limits, cache in ((SchedulerLimits(), 2048), (SchedulerLimits(step_tokens=23, max_running=4), 208)):
        core = EngineCore(loaded, limits, kv_cache_tokens=cache)
        found.append(tokens_of(drive(core, requests)))
        preemptions = core.stats().preemptions
        assert_idle(core)
        core.close()
    assert preemptions > 0
    assert found[0] == found[1]


class FailingModel:
    """A model that runs out of memory in some calls, after all layers have advanced their states."""

    def __init__(self, model: Any, failures: set[int]) -> None:
        self.model, self.failures, self.calls = model, failures, 0

    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(step, cache)
        self.calls += 1
        if self.calls in self.failures:
            raise MemoryError
        return logits


def test_hybrid_output_does_not_depend_on_steps_out_of_memory(loaded: LoadedModel) -> None:
    requests = [
        request(str(i), prompt, max_tokens=9, stopping=ENDLESS, seed=i, choices=1 + i % 2)
        for i, prompt in enumerate(LONG_PROMPTS)
    ]
    found = []
    for failures in (set[int](), {1, 3, 9, 10, 20}):
        model = FailingModel(loaded.model, failures)
        core = EngineCore(replace(loaded, model=model), SchedulerLimits(step_tokens=100), kv_cache_tokens=2048)
        found.append(tokens_of(drive(core, requests)))
        assert model.calls > max(failures, default=0)
        assert_idle(core)
        core.close()
    assert found[0] == found[1]


def test_hybrid_output_does_not_depend_on_copies_of_states_out_of_memory(loaded: LoadedModel) -> None:
    requests = [
        request(str(i), prompt, max_tokens=9, stopping=ENDLESS, seed=i, choices=3)
        for i, prompt in enumerate([*LONG_PROMPTS, *LONG_PROMPTS])
    ]
    found = []
    for failing in (False, True):
        core = EngineCore(loaded, SchedulerLimits(step_tokens=100), kv_cache_tokens=2048)
        copy, calls = core.cache.states.copy, []

        def fail_at_times(pairs: Any, copy: Any = copy, calls: list[Any] = calls) -> None:
            calls.append(pairs)
            if len(calls) % 2:
                raise MemoryError
            copy(pairs)

        if failing:
            core.cache.states.copy = fail_at_times
        found.append(tokens_of(drive(core, requests)))
        assert len(calls) > 2 or not failing
        assert_idle(core)
        core.close()
    assert found[0] == found[1]


def test_hybrid_abort_frees_slots(loaded: LoadedModel) -> None:
    core = EngineCore(loaded, SchedulerLimits(step_tokens=64), kv_cache_tokens=1024)
    driver = Driver(core)
    driver.submit(*(request(str(i), PROMPT[i:], choices=2, max_tokens=50) for i in range(3)))
    driver.step(4)
    assert core.stats().state_slots_free < core.stats().state_slots
    for i in range(3):
        core.abort(str(i))
    assert_idle(core)
    core.close()


def test_hybrid_scores_prompts_like_transformers(hybrid: tuple[Path, Any], loaded: LoadedModel) -> None:
    core = EngineCore(loaded, SchedulerLimits(step_tokens=50), kv_cache_tokens=1024)
    answers = drive(core, [request("x", PROMPT, max_tokens=1, prompt_logprobs=0, stopping=ENDLESS)])
    scores = answers["x", 0].deltas[0].prompt_logprobs
    expected = reference(hybrid[1], PROMPT).log_softmax(-1)
    assert scores is not None
    for i, score in enumerate(scores[1:]):
        assert score is not None
        assert score.logprob == pytest.approx(float(expected[i, PROMPT[i + 1]]), abs=2e-3)
    core.close()


def test_state_cache_is_part_of_the_memory_plan(hybrid: tuple[Path, Any], loaded: LoadedModel) -> None:
    files = locate(str(hybrid[0]))
    size = read_model_size(files, describe(files))
    assert loaded.cache.states is not None
    assert size.state_bytes == loaded.cache.states.bytes_per_slot
    assert size.cache_numbers == 2 * 1 * 2 * 32  # of the one layer with attention
    settings = MemorySettings(dtype="fp32", max_running=100)
    short = program_bytes(size, settings) + size.weights["fp32"] + (1 << 20)
    ample, tight = (plan_memory(size, settings, free=free, kernels="base", cores=1) for free in (8 << 30, short))
    assert ample.states == (100 + SNAPSHOT_SLOTS) * size.state_bytes
    assert MIN_SLOTS * size.state_bytes <= tight.states < ample.states
    assert tight.total <= tight.free
    assert state_slots(loaded, SchedulerLimits(max_running=100)) == 100 + SNAPSHOT_SLOTS
