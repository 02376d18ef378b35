"""The plan of a model's memory: what it takes, what is reduced to fit, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.engine.cpu.features import NO_MEMORY
from syringa.engine.loading import memory_plan
from syringa.engine.loading.gpu_size import MIN_GPU_OVERHEAD
from syringa.engine.loading.memory_plan import (
    MIN_CACHE_BYTES,
    PROGRAM_BYTES,
    MemoryPlan,
    MemorySettings,
    least_memory,
    plan_gpu_memory,
    plan_memory,
)
from syringa.engine.loading.model_size import ModelSize
from syringa.errors import ConfigError, ModelError

GB = 10**9
TOKEN_BYTES = 131_072  # of an 8B model's cache
BLOCK = 16


def size(**changes: Any) -> ModelSize:
    """Return the sizes of a GGUF file like those of Llama 3.1 8B in Q4_K_M."""
    values: dict[str, Any] = {
        "name": "large-8b",
        "architecture": "LlamaForCausalLM",
        "format": "GGUF Q4_K_M",
        "parameters": 8 * GB,
        "native": True,
        "weights": {"gguf": 5 * GB, "int8": 9 * GB, "bf16": 17 * GB, "fp32": 34 * GB},
        "file_bytes": 5 * GB,
        "cache_numbers": TOKEN_BYTES // 2,
        "max_model_len": 131_072,
    }
    return ModelSize(**(values | changes))


FOLDER = {"weights": {"int8": 9 * GB, "bf16": 17 * GB, "fp32": 34 * GB}, "file_bytes": 0, "format": "safetensors"}


def plan(free: float, model: ModelSize | None = None, kernels: str | None = "avx512", **settings: Any) -> MemoryPlan:
    wanted = MemorySettings(**settings)
    return plan_memory(model or size(), wanted, free=int(free * GB) + PROGRAM_BYTES, kernels=kernels, cores=4)


def test_plan_gives_two_contexts_where_memory_allows() -> None:
    found = plan(1000)
    assert (found.dtype, found.weights, found.context) == ("gguf", 5 * GB, 131_072)
    assert found.cache == 2 * 131_072 * TOKEN_BYTES
    assert found.cache_tokens == 2 * 131_072
    assert (found.threads, found.cores) == (4, 4)
    assert not found.reduced


def test_plan_of_small_model_has_a_minimum_cache() -> None:
    found = plan(1000, size(max_model_len=1024))
    assert (found.cache, found.context) == (MIN_CACHE_BYTES, 1024)


def test_plan_reduces_context_to_a_share_of_memory() -> None:
    found = plan(25)
    assert found.cache == 5 * GB  # a fourth of what the weights leave
    assert found.context == 5 * GB // TOKEN_BYTES // 256 * 256
    assert found.context <= found.cache_tokens <= 5 * GB // TOKEN_BYTES
    assert found.reduced


def test_plan_prefers_a_usual_context_to_the_share() -> None:
    found = plan(6.5)
    assert found.context == 8192  # takes 1.07 GB of 1.5
    tight = plan(5.5)
    assert tight.cache == GB // 2  # all that is left
    assert tight.context == 3584


@pytest.mark.parametrize("free", [5.5, 6.5, 25, 1000])
def test_plan_stays_within_free_memory(free: float) -> None:
    found = plan(free)
    assert found.total <= found.free == int(free * GB) + PROGRAM_BYTES


def test_plan_counts_logits_of_running_sequences() -> None:
    few, many = (plan(100, size(vocab_size=128_000), max_running=running) for running in (1, 256))
    assert many.program - few.program == 255 * 128_000 * 4


def test_plan_refuses_model_that_does_not_fit_with_what_would() -> None:
    with pytest.raises(ModelError) as refused:
        plan(5.1)
    message = refused.value.message
    assert refused.value.code == NO_MEMORY
    assert message.startswith(
        "large-8b needs 5.69 GB of memory (5.00 GB for its weights in gguf) and 5.52 GB are free:"
    )
    assert message.endswith("qwen3-4b of `syringa models --available` fits (4.13 GB)")
    assert "\n" not in message


def test_plan_suggests_a_dtype_that_fits() -> None:
    with pytest.raises(ModelError, match=r"--dtype gguf would fit \(5\.69 GB\)$"):
        plan(6, dtype="int8")
    with pytest.raises(ModelError, match=r"--dtype int8 would fit \(9\.69 GB\)$"):
        plan(10, size(**FOLDER), dtype="bf16")


def test_plan_suggests_a_quantized_file_of_a_folder() -> None:
    with pytest.raises(ModelError, match=r"in int8\).*: a GGUF file of it in Q4_K_M would fit \(about 5\.57 GB\), and"):
        plan(6, size(**FOLDER))


def test_plan_suggests_no_quantized_weights_without_compiled_kernels() -> None:
    message = r"in bf16\).* are free: free some memory, choose a smaller model, or install a C\+\+ compiler"
    with pytest.raises(ModelError, match=message):
        plan(10, size(**FOLDER), kernels=None, dtype="bf16")
    with pytest.raises(ModelError, match=r"in fp32\).*: --dtype bf16 would fit"):
        plan(20, size(**FOLDER), kernels=None, dtype="fp32")


def test_plan_suggests_free_memory_where_nothing_fits() -> None:
    with pytest.raises(ModelError, match="free: free some memory, or choose a smaller model"):
        plan(0.01)


def test_plan_refuses_folder_that_does_not_fit_while_it_is_read() -> None:
    model = size(**FOLDER, loading={"int8": 16 * GB})
    assert plan(16.1, model).cache > 0
    with pytest.raises(ModelError, match=r"needs 16\.4 GB"):
        plan(15.9, model)


def test_plan_honors_requested_context_beyond_the_share() -> None:
    found = plan(12, max_model_len=40_960)
    assert (found.context, found.cache) == (40_960, 40_960 * TOKEN_BYTES)
    assert not found.reduced


def test_plan_refuses_requested_context_that_does_not_fit() -> None:
    with pytest.raises(ConfigError) as refused:
        plan(12, max_model_len=65_536)
    assert refused.value.code == NO_MEMORY
    assert refused.value.message == (
        "--max-model-len 65536 needs 8.59 GB of memory for its cache and 7.00 GB are free beside the weights of "
        "large-8b: up to 53,248 tokens fit"
    )
    assert plan(12, max_model_len=53_248).context == 53_248


def test_plan_refuses_context_beyond_the_models() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 200000 is more than the 131072 tokens that large-8b"):
        plan(1000, max_model_len=200_000)


def test_plan_honors_requested_cache() -> None:
    by_tokens = plan(12, kv_cache_tokens=1000)
    assert (by_tokens.cache_tokens, by_tokens.context, by_tokens.reduced) == (1008, 1008, True)
    by_size = plan(12, kv_cache_gb=1.0)
    assert (by_size.cache, by_size.cache_tokens) == (1 << 30, 8192)


@pytest.mark.parametrize("settings", [{"kv_cache_tokens": 65_536}, {"kv_cache_gb": 8.0}])
def test_plan_refuses_requested_cache_that_does_not_fit(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(12, **settings)
    assert refused.value.code == NO_MEMORY
    assert refused.value.message == (
        "a cache of 65,536 tokens needs 8.59 GB of memory and 7.00 GB are free beside the weights of large-8b: choose "
        "a smaller --kv-cache-gb or --kv-cache-tokens, up to 53,392 tokens (6.5 GiB)"
    )


def test_plan_refuses_context_that_the_requested_cache_cannot_hold() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 4096 does not fit in the cache of 1,008 tokens"):
        plan(12, max_model_len=4096, kv_cache_tokens=1000)


def test_plan_without_known_cache_size_leaves_context_alone() -> None:
    found = plan(12, size(cache_numbers=0))
    assert found.context == 131_072
    assert found.cache == MIN_CACHE_BYTES


def test_plan_of_fp32_counts_a_cache_of_fp32() -> None:
    model = size(max_model_len=8192)
    assert plan(100, model, dtype="fp32").cache == 2 * plan(100, model, dtype="bf16").cache


@pytest.mark.parametrize("settings", [{}, {"kv_cache_gb": 1.0}, {"max_model_len": 16_384}, {"dtype": "int8"}])
def test_least_memory_is_what_the_plan_needs(settings: dict[str, Any]) -> None:
    """A model is refused with one byte less than the supervisor counts on."""
    wanted = MemorySettings(**settings)
    least = least_memory(size(), wanted, settings.get("dtype", "gguf"))
    plan_memory(size(), wanted, free=least, kernels="avx512", cores=1)
    with pytest.raises((ModelError, ConfigError), match="are free"):
        plan_memory(size(), wanted, free=least - 1, kernels="avx512", cores=1)


def test_plan_gpu_memory_refuses_the_weights_that_a_worker_would() -> None:
    model = size(max_model_len=8192)
    options: dict[str, Any] = {"total": 80 * GB, "fraction": 1.0, "overhead": 3 * GB, "cores": 4}
    least = 16 * GB + MIN_GPU_OVERHEAD + int(memory_plan.GPU_MARGIN * 80 * GB)
    assert plan_gpu_memory(model, MemorySettings(), least, **options) is None  # its worker may find room for a cache
    with pytest.raises(ModelError) as raised:
        plan_gpu_memory(model, MemorySettings(), least - 1, **options)
    assert raised.value.message == (
        "large-8b needs 17.1 GB of GPU memory (16.0 GB for its weights in bf16) and 17.1 GB are free: "
        "--dtype fp8 would fit (9.07 GB), or use --device cpu"
    )
    with pytest.raises(ModelError, match=r"in fp8\) and 7\.20 GB are free: (llama|qwen)"):
        plan_gpu_memory(model, MemorySettings(dtype="fp8"), 12 * GB, **options)


def test_plan_gpu_memory_leaves_margin_and_overhead() -> None:
    model = size(max_model_len=8192)
    options: dict[str, Any] = {"overhead": 3 * GB, "cores": 4}
    found = plan_gpu_memory(model, MemorySettings(), 79 * GB, 80 * GB, fraction=1.0, **options)
    assert found is not None
    assert (found.device, found.dtype, found.weights, found.context) == ("cuda", "bf16", 16 * GB, 8192)
    assert found.cache == 79 * GB - int(memory_plan.GPU_MARGIN * 80 * GB) - 19 * GB
    half = plan_gpu_memory(model, MemorySettings(), 79 * GB, 80 * GB, fraction=0.5, **options)
    assert half is not None
    assert half.total <= 40 * GB
    assert plan_gpu_memory(model, MemorySettings(dtype="int8"), 79 * GB, 80 * GB, fraction=1.0, **options) is None
