"""The whole engine on the GPU decoder with reference operations: graph buffers and padding, overlapped steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from syringa.engine.gpu.model_runner import GpuModelRunner
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest
from tests.engine.conftest import Driver, drive, request
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.tiny_models import SIZES, save
from tests.engine.worker.resuming import cut_answer, join_answers, resume

SAMPLING_VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.8, "top_k": 30},
    {"min_p": 0.1, "temperature": 1.5},
    {"repetition_penalty": 1.3, "logprobs": 2},
    {"frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"logit_bias": {11: 4.0, 28: -100.0}},
    {"dry_multiplier": 0.8},
    {"prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save(folder, AutoConfig.for_model("qwen3", **(SIZES | {"head_dim": 32})))
    return folder


def make_requests(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    requests = []
    for i in range(16):
        stopping: dict[str, Any] = {"ignore_eos": True, "min_tokens": rng.choice([0, 0, 4])}
        if rng.random() < 0.5:
            stopping["stop_tokens"] = frozenset(rng.sample(range(160), 8))
        requests.append(
            request(
                str(i),
                [rng.randrange(3, 160) for _ in range(rng.randint(1, 60))],
                seed=rng.choice([i, -i, (1 << 64) - 1 - i]),
                max_tokens=rng.randint(0, 40),
                choices=rng.choice([1, 1, 3]),
                stopping=stopping,
                **rng.choice(SAMPLING_VARIANTS),
            )
        )
    return requests


@pytest.mark.parametrize("seed", range(4))
def test_gpu_engine_generates_tokens_of_cpu_engine(folder: Path, seed: int) -> None:
    limits = SchedulerLimits(step_tokens=40, max_running=11)
    answers = []
    for loaded in (
        load_model(LoadOptions(model=str(folder), dtype="fp32", threads=1, device="cpu")),
        load_tiny_gpu_model(folder),
    ):
        core = EngineCore(loaded, limits, kv_cache_tokens=320)
        driver = Driver(core)
        driver.submit(*make_requests(seed))
        answers.append(driver.finish())
        assert core.stats().preemptions
        if core.runner:
            assert isinstance(core.runner, GpuModelRunner)
            assert not len(core.runner.input_batch)
        stats = core.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        core.close()
    cpu, gpu = answers
    assert cpu.keys() == gpu.keys()
    for key, answer in cpu.items():
        assert (answer.tokens, answer.finish) == (gpu[key].tokens, gpu[key].finish), key
        for expected, actual in zip(answer.logprobs, gpu[key].logprobs, strict=True):
            assert actual.logprob == pytest.approx(expected.logprob, abs=1e-3)


def test_gpu_engine_resumes_requests(folder: Path) -> None:
    """With a warm cache some choices need one token only, and go on in a decode step."""
    stopping = {"ignore_eos": True}
    requests = [
        request(str(i), [7 + i] * (15 + i), seed=i, max_tokens=20, choices=1 + i % 2, stopping=stopping, **each)
        for i, each in enumerate(SAMPLING_VARIANTS)
    ]
    loaded = load_tiny_gpu_model(folder)
    warm, cold = (EngineCore(loaded, SchedulerLimits(max_running=24), kv_cache_tokens=1024) for _ in range(2))
    expected = drive(warm, requests)
    rng = random.Random(1)
    parts = {key: cut_answer(answer, rng.choice([1, 2, rng.randint(3, 19)])) for key, answer in expected.items()}
    resumed = [resume(each, {choice: parts[each.id, choice] for choice in range(each.choices)}) for each in requests]
    for core in (warm, cold):
        answers = drive(core, resumed)
        assert answers.keys() == expected.keys()
        for key, answer in answers.items():
            whole = join_answers(parts[key], answer)
            assert (whole.tokens, whole.finish) == (expected[key].tokens, expected[key].finish), key
        core.close()


def test_padding_rows_of_a_graph_have_no_effect(folder: Path) -> None:
    """Five sequences in a graph for eight: only their five cache slots are written."""
    core = EngineCore(load_tiny_gpu_model(folder), SchedulerLimits(max_running=8), kv_cache_tokens=320)
    assert core.runner
    runner = core.runner
    assert isinstance(runner, GpuModelRunner)
    driver = Driver(core)
    driver.submit(*(request(str(i), [5 + i] * 9, max_tokens=12, stopping={"ignore_eos": True}) for i in range(5)))
    driver.step(2)
    core.cache.keys.nan_to_num_(0.0)
    before = core.cache.keys.clone()
    driver.step()
    changed = (core.cache.keys != before).any(-1).any(2)[0].nonzero().tolist()
    written = {(s.block_table[(s.computed - 1) // 16], (s.computed - 1) % 16) for s in core.scheduler.running}
    assert {tuple(at) for at in changed} == written
    assert len(written) == 5
    driver.finish()


def test_step_without_sampled_rows_computes_one_logits_row(folder: Path) -> None:
    """The middle of a long prompt, alone: matmul kernels need at least one row."""
    loaded = load_tiny_gpu_model(folder)
    assert loaded.gpu
    rows: list[int] = []

    class RecordingOps(ReferenceOps):
        def compute_logits(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            rows.append(len(x))
            return super().compute_logits(x, weight, out)

    loaded.gpu.decoder.ops = RecordingOps()
    driver = Driver(EngineCore(loaded, SchedulerLimits(step_tokens=16, max_running=4), kv_cache_tokens=320))
    driver.submit(request("a", [7] * 60, max_tokens=2, stopping={"ignore_eos": True}))
    driver.finish()
    assert rows[:4] == [1, 1, 1, 1]
    assert min(rows) == 1
    assert len(driver.answers["a", 0].tokens) == 2
