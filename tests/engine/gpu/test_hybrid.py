"""Hybrid models on the GPU decoder with reference operations: against `transformers`, and against the CPU's engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.precision import check_deterministic_gpu
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ConfigError
from tests.engine.conftest import drive, request
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.hybrid_models import HYBRIDS, LONG_PROMPTS, make_config, save_hybrid
from tests.engine.models.tiny_models import difference, reference, run
from tests.tiers import slow


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp("hybrid")
            made[name] = folder, save_hybrid(folder, make_config(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", ["qwen3_next", *slow(*(name for name in HYBRIDS if name != "qwen3_next"))])
def test_gpu_hybrid_logits_match_transformers(hybrid_model: Any, name: str) -> None:
    folder, hf_model = hybrid_model(name)
    loaded = load_tiny_gpu_model(folder)
    expected = [reference(hf_model, prompt) for prompt in LONG_PROMPTS]
    for prompts, chunk in ((LONG_PROMPTS, 0), (LONG_PROMPTS, 15), (LONG_PROMPTS[:2], 1)):
        for logits, wanted in zip(run(loaded, prompts, chunk), expected, strict=False):
            assert difference(logits, wanted) < 1e-3


@pytest.mark.parametrize(("cache", "running"), [(1024, 6), (208, 6)], ids=["reused prefixes", "preemptions"])
def test_gpu_hybrid_engine_matches_cpu_engine(hybrid_model: Any, cache: int, running: int) -> None:
    """Overlapped steps with choices and sampling rules."""
    folder, _ = hybrid_model("qwen3_next")
    rules: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"choices": 3}, {},
    ]  # fmt: skip
    base: dict[str, Any] = {"max_tokens": 30, "stopping": {"ignore_eos": True}}
    found = []
    for loaded in (
        load_model(LoadOptions(model=str(folder), dtype="fp32", threads=1, device="cpu")),
        load_tiny_gpu_model(folder),
    ):
        core = EngineCore(loaded, SchedulerLimits(step_tokens=70, max_running=running), kv_cache_tokens=cache)
        answers: dict[tuple[str, int], list[int]] = {}
        for again in ("", "again"):
            requests = [
                request(again + str(i), prompt, **(base | {"seed": i} | rule))
                for i, (prompt, rule) in enumerate(zip(LONG_PROMPTS, rules, strict=True))
            ]
            answers |= {key: answer.tokens for key, answer in drive(core, requests).items()}
        stats = core.stats()
        assert stats.cached_tokens if cache == 1024 else stats.preemptions
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        assert stats.state_slots_free + stats.state_snapshots == stats.state_slots
        found.append(answers)
        core.close()
    assert found[0] == found[1]


def test_deterministic_gpu_refuses_hybrid_models_by_name() -> None:
    with pytest.raises(ConfigError, match="does not support models with linear attention yet"):
        check_deterministic_gpu("bf16", native=True, hybrid=True)
