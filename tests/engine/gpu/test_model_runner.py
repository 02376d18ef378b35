"""The whole engine on the GPU's decoder, by the kernels' references: graphs' places and padding, lanes, lookahead."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from syringa.engine.gpu.graphs import StepGraphs, bucket_sizes
from syringa.engine.gpu.input_batch import Lanes
from syringa.engine.gpu.model_runner import GpuRunner
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.gpu.transfer import upload
from syringa.engine.loading.loader import LoadOptions, load_model
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.scheduling.scheduler_output import Scheduled
from syringa.engine.worker.core import EngineCore
from syringa.types import EngineRequest
from tests.engine.conftest import Driver, request
from tests.engine.gpu.small_gpu import CPU, load_small
from tests.engine.models.small import SIZES, save
from tests.engine.scheduling.builders import sequence

KINDS: list[dict[str, Any]] = [
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


def requests(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    found = []
    for i in range(16):
        stopping: dict[str, Any] = {"ignore_eos": True, "min_tokens": rng.choice([0, 0, 4])}
        if rng.random() < 0.5:
            stopping["stop_tokens"] = frozenset(rng.sample(range(160), 8))
        found.append(
            request(
                str(i),
                [rng.randrange(3, 160) for _ in range(rng.randint(1, 60))],
                seed=rng.choice([i, -i, (1 << 64) - 1 - i]),
                max_tokens=rng.randint(0, 40),
                choices=rng.choice([1, 1, 3]),
                stopping=stopping,
                **rng.choice(KINDS),
            )
        )
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_tokens_are_those_of_the_cpu_engine(folder: Path, seed: int) -> None:
    limits = Limits(step_tokens=40, max_running=11)
    answers = []
    for loaded in (
        load_model(LoadOptions(model=str(folder), dtype="fp32", threads=1, device="cpu")),
        load_small(folder),
    ):
        core = EngineCore(loaded, limits, kv_cache_tokens=320)
        driver = Driver(core)
        driver.submit(*requests(seed))
        answers.append(driver.finish())
        assert core.stats().preemptions
        if core.ahead:
            assert isinstance(core.ahead.runner, GpuRunner)
            assert not len(core.ahead.runner.lanes)
        stats = core.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        core.close()
    plain, ahead = answers
    assert plain.keys() == ahead.keys()
    for key, answer in plain.items():
        assert (answer.tokens, answer.finish) == (ahead[key].tokens, ahead[key].finish), key
        for ours, theirs in zip(answer.logprobs, ahead[key].logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_rows_that_fill_up_a_graph_disturb_nobody(folder: Path) -> None:
    """Five sequences in a graph for eight: the cache and the draws beyond stay as they were."""
    core = EngineCore(load_small(folder), Limits(max_running=8), kv_cache_tokens=320)
    assert core.ahead
    runner = core.ahead.runner
    assert isinstance(runner, GpuRunner)
    driver = Driver(core)
    driver.submit(*(request(str(i), [5 + i] * 9, max_tokens=12, stopping={"ignore_eos": True}) for i in range(5)))
    driver.step(2)
    core.cache.keys.nan_to_num_(0.0)
    before = core.cache.keys.clone()
    driver.step()
    changed = (core.cache.keys != before).any(-1).any(2)[0].nonzero().tolist()
    held = {(s.blocks[(s.computed - 1) // 16], (s.computed - 1) % 16) for s in core.scheduler.running}
    assert {tuple(at) for at in changed} == held
    assert len(held) == 5
    driver.finish()


def test_a_step_from_which_nobody_draws(folder: Path) -> None:
    """The middle of a long prompt, alone: kernels for products expect a row, be it for nothing."""
    loaded = load_small(folder)
    assert loaded.gpu
    rows: list[int] = []

    class Watched(ReferenceOps):
        def head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            rows.append(len(x))
            return super().head(x, weight, out)

    loaded.gpu.decoder.ops = Watched()
    driver = Driver(EngineCore(loaded, Limits(step_tokens=16, max_running=4), kv_cache_tokens=320))
    driver.submit(request("a", [7] * 60, max_tokens=2, stopping={"ignore_eos": True}))
    driver.finish()
    assert rows[:4] == [1, 1, 1, 1]
    assert min(rows) == 1
    assert len(driver.answers["a", 0].tokens) == 2


def test_sizes_reach_the_most() -> None:
    assert bucket_sizes(256)[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert bucket_sizes(256)[-1] == 256
    assert bucket_sizes(5) == [1, 2, 4, 5]
    assert bucket_sizes(300)[-2:] == [288, 300]
    graphs = StepGraphs([1, 2, 4, 8], lambda _: None, CPU)
    assert [graphs.size_for(n) for n in (1, 3, 8, 9)] == [1, 4, 8, None]


def test_lanes_follow_blocks() -> None:
    lanes = Lanes(100, count=2)
    assert lanes.tables.shape[1] == 16
    one, two, three = (sequence([1] * 40) for _ in range(3))
    one.blocks, two.blocks, three.blocks = [4, 5, 6], [7], [1, 2]
    found = lanes.place([Scheduled(one, 0, 40), Scheduled(two, 3, 1), Scheduled(three, 17, 1)])  # grows
    assert [lanes.tables[lane, :n].tolist() for lane, n in zip(found, (3, 1, 2), strict=True)] == [
        [4, 5, 6],
        [7],
        [1, 2],
    ]
    one.blocks.append(9)
    two.blocks[0] = 3  # somebody else kept its block, and it got a copy
    again = lanes.place([Scheduled(one, 48, 1), Scheduled(two, 4, 1)])
    assert again.tolist() == found[:2].tolist()
    assert lanes.tables[found[0], :4].tolist() == [4, 5, 6, 9]
    assert lanes.tables[found[1], 0] == 3
    one.blocks = [10, 11, 12, 13]  # sent back, and begun anew
    lanes.place([Scheduled(one, 48, 1)])
    assert lanes.tables[found[0], :4].tolist() == [10, 11, 12, 13]
    for each in (one, two, three):
        lanes.forget(each)
    assert not len(lanes)


def test_arrays_arrive_whole_and_aligned() -> None:
    arrays = [np.arange(3, dtype=np.int32), np.array([-1], dtype=np.int64), np.array([[0.5], [2.0]]), np.float32([[7]])]
    for array, sent in zip(arrays, upload(arrays, CPU), strict=True):
        assert torch.equal(sent, torch.from_numpy(array))
        assert sent.data_ptr() % 16 == 0
