"""The GPU decoder with reference operations against `transformers`: every family, paged, chunked and mixed steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from syringa.engine.loading.gpu_model import with_cache_dtype
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ConfigError
from tests.engine.conftest import drive, request
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.loading.quantized_folders import edit_config
from tests.engine.models.native_models import DENSE, GEMMA, GLM4_MOE, MOE
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, reference, run, save

MODELS = DENSE | GEMMA | MOE


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    cache: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in cache:
            family, changes = MODELS[name]
            folder = tmp_path_factory.mktemp(family)
            cache[name] = folder, save(folder, AutoConfig.for_model(family, **(SIZES | changes)))
        return cache[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_gpu_decoder_logits_match_transformers(tiny_model: Any, name: str) -> None:
    folder, hf_model = tiny_model(name)
    loaded = load_tiny_gpu_model(folder)
    expected = [reference(hf_model, prompt) for prompt in PROMPTS]
    # Whole, in chunks (steps with decode and prefill rows), and token by token.
    for batch in (run(loaded, PROMPTS), run(loaded, PROMPTS, chunk=15), run(loaded, PROMPTS, chunk=1)):
        for logits, wanted in zip(batch, expected, strict=True):
            assert difference(logits, wanted) < 1e-3
    wanted = torch.stack([each[-1] for each in expected])  # the last layer's output is computed for these rows only
    last = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0) - 1
    assert difference(run(loaded, PROMPTS, rows=last.tolist())[0], wanted) < 1e-3


def test_rotary_share_of_glm_is_a_half_unless_it_is_stated(tmp_path: Path) -> None:
    changes = {name: value for name, value in GLM4_MOE.items() if name != "partial_rotary_factor"}
    hf_model = save(tmp_path, AutoConfig.for_model("glm4_moe", **(SIZES | changes)))
    assert hf_model.config.rope_parameters["partial_rotary_factor"] == 0.5
    edit_config(tmp_path, rope_parameters=None, rope_theta=hf_model.config.rope_parameters["rope_theta"])
    logits = run(load_tiny_gpu_model(tmp_path), PROMPTS[:1])[0]
    assert difference(logits, reference(hf_model, PROMPTS[0])) < 1e-3


@pytest.mark.parametrize(
    "name", ["llama biased", "mistral sliding", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "glm4_moe", "smollm3"]
)
def test_gpu_greedy_generation_matches_transformers(tiny_model: Any, name: str) -> None:
    folder, hf_model = tiny_model(name)
    core = EngineCore(load_tiny_gpu_model(folder), SchedulerLimits(step_tokens=32, max_running=4), kv_cache_tokens=1024)
    prompts = [*PROMPTS, PROMPTS[0][:20], PROMPTS[2][:33]]
    answers = drive(
        core,
        [
            request(str(i), prompt, max_tokens=9, temperature=0.0, stopping={"ignore_eos": True})
            for i, prompt in enumerate(prompts)
        ],
    )
    core.close()
    for i, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(9):
            tokens.append(int(reference(hf_model, tokens)[-1].argmax()))
        assert answers[str(i), 0].tokens == tokens[len(prompt) :]


@pytest.mark.parametrize(("dtype", "max_error"), [("bf16", 0.05), ("fp8", 0.15)])
def test_reduced_precision_stays_close(tiny_model: Any, dtype: str, max_error: float) -> None:
    folder, hf_model = tiny_model("qwen3")
    loaded = load_tiny_gpu_model(folder, dtype)
    for logits, prompt in zip(run(loaded, PROMPTS, chunk=15), PROMPTS, strict=True):
        error = difference(logits, reference(hf_model, prompt))
        assert 0 < error < max_error


@pytest.mark.parametrize("name", ["mixtral sliding", "gpt_oss", "glm4_moe shared"])
def test_gpu_engine_of_moe_model_matches_cpu_engine(tiny_model: Any, name: str) -> None:
    """Natively, and on transformers' definition on the CPU: with choices, sampling rules and a preemption."""
    folder, _ = tiny_model(name)
    rules: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"choices": 3}]
    answers = []
    for loaded in (
        load_model(LoadOptions(model=str(folder), dtype="fp32", threads=1, device="cpu")),
        load_tiny_gpu_model(folder),
    ):
        core = EngineCore(loaded, SchedulerLimits(step_tokens=40, max_running=8), kv_cache_tokens=192)
        core_requests = [
            request(str(i), prompt, **({"max_tokens": 12, "stopping": {"ignore_eos": True}, "seed": i} | rules[i]))
            for i, prompt in enumerate(PROMPTS)
        ]
        answers.append({key: answer.tokens for key, answer in drive(core, core_requests).items()})
        assert core.stats().preemptions
        core.close()
    assert len(answers[0]) == 6
    assert answers[0] == answers[1]


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_fp8_cache_stays_close(tiny_model: Any, name: str) -> None:
    folder, hf_model = tiny_model(name)
    loaded = load_tiny_gpu_model(folder)
    small = with_cache_dtype(loaded, "fp8")
    assert small.gpu is small.model
    assert 2 * small.cache.bytes_per_block < loaded.cache.bytes_per_block
    for logits, prompt in zip(run(small, PROMPTS, chunk=15), PROMPTS, strict=True):
        assert 1e-4 < difference(logits, reference(hf_model, prompt)) < 0.15
    assert with_cache_dtype(loaded, "auto") is loaded


def test_fp8_cache_is_refused_with_flashinfer_and_on_a_cpu(tiny_model: Any) -> None:
    folder, _ = tiny_model("qwen3")
    with pytest.raises(ConfigError, match="--attention flashinfer does not support --kv-cache-dtype fp8"):
        with_cache_dtype(load_tiny_gpu_model(folder), "fp8", "flashinfer")
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8 is for GPUs"):
        load_model(LoadOptions(model=str(folder), device="cpu", kv_cache_dtype="fp8"))
