"""Perplexity of quantized products against fp32 on four texts, none of which was used for calibration."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from syringa.engine.loading.gpu_model import with_cache_dtype
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from tests.engine.conftest import drive, request
from tests.engine.gpu.tiny_models import load_tiny_gpu_model

pytestmark = pytest.mark.model
TEXTS = sorted((Path(__file__).parents[1] / "data" / "texts").glob("*.txt"))
LENGTH = 1024
MAX_RATIO = 1.015
MAX_FP8_CACHE_RATIO = 1.03
MAX_GGUF_RATIO = 1.01  # weights are those of the file; only activations are rounded


def perplexity(core: EngineCore, tokens: list[int]) -> float:
    answer = drive(core, [request("text", tokens, max_tokens=0, prompt_logprobs=0)])["text", 0]
    scores = answer.deltas[0].prompt_logprobs
    assert scores is not None
    logprobs = [score.logprob for score in scores if score is not None]
    assert len(logprobs) == len(tokens) - 1
    return math.exp(-sum(logprobs) / len(logprobs))


def test_quantized_perplexity_is_close_to_fp32_on_a_short_text(
    engine: Callable[..., EngineCore], tokenizer: Any
) -> None:
    tokens = list(tokenizer.encode(TEXTS[0].read_text()).ids)[:256]
    fp32, int8, gguf = (perplexity(engine(dtype), tokens) for dtype in ("fp32", "int8", "gguf"))
    assert int8 / fp32 <= MAX_RATIO + 0.02  # a short text varies more
    assert gguf / fp32 <= MAX_GGUF_RATIO + 0.01


@pytest.mark.slow
def test_quantized_perplexity_is_close_to_fp32(engine: Callable[..., EngineCore], tokenizer: Any) -> None:
    assert len(TEXTS) == 4
    limits = {"int8": MAX_RATIO, "gguf": MAX_GGUF_RATIO}
    reference, cores = engine("fp32"), {dtype: engine(dtype) for dtype in limits}
    ratios: dict[str, list[float]] = {dtype: [] for dtype in limits}
    for path in TEXTS:
        tokens = list(tokenizer.encode(path.read_text()).ids)[:LENGTH]
        assert len(tokens) == LENGTH
        fp32 = perplexity(reference, tokens)
        for dtype, core in cores.items():
            quantized = perplexity(core, tokens)
            ratios[dtype].append(quantized / fp32)
            print(f"{path.stem}: fp32 {fp32:.3f}, {dtype} {quantized:.3f}, {100 * (quantized / fp32 - 1):+.2f} %")
    for dtype, limit in limits.items():
        mean = sum(ratios[dtype]) / len(TEXTS)
        print(f"{dtype}, mean: {100 * (mean - 1):+.2f} %")
        assert mean <= limit, dtype
        assert max(ratios[dtype]) <= limit + 0.01, dtype  # and no single text is much worse


@pytest.mark.slow
def test_fp8_cache_perplexity_is_close_to_fp32(tokenizer: Any) -> None:
    """The GPU's decoder on its reference operations, with a KV cache in fp32 and in FP8."""
    loaded = load_tiny_gpu_model("default")
    limits = SchedulerLimits(step_tokens=512, max_running=1)
    cores = [
        EngineCore(each, limits, kv_cache_tokens=LENGTH // 4) for each in (loaded, with_cache_dtype(loaded, "fp8"))
    ]
    ratios = []
    for path in TEXTS:
        tokens = list(tokenizer.encode(path.read_text()).ids)[: LENGTH // 4]
        fp32, fp8 = (perplexity(core, tokens) for core in cores)
        ratios.append(fp8 / fp32)
        print(f"{path.stem}: fp32 {fp32:.3f}, FP8 cache {fp8:.3f}, {100 * (ratios[-1] - 1):+.2f} %")
    print(f"mean: {100 * (sum(ratios) / len(ratios) - 1):+.2f} %")
    assert max(ratios) <= MAX_FP8_CACHE_RATIO
