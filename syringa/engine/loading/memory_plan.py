"""What a model will take of this machine: dtype, weights, KV cache, context and threads. Imports no torch.

The command line prints this plan before anything is loaded, the supervisor decides by it which models fit beside each
other, and the loader sizes the KV cache by it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from syringa.engine.cpu.features import NO_MEMORY
from syringa.engine.loading.alternatives import describe_alternatives, describe_gpu_alternatives
from syringa.engine.loading.gpu_size import GPU_BYTES_PER_WEIGHT, MIN_GPU_OVERHEAD
from syringa.engine.loading.model_size import ModelSize, gigabytes
from syringa.engine.loading.precision import choose_dtype
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.state_cache import count_slots
from syringa.errors import ConfigError, ModelError
from syringa.modelfiles import catalog

# Resident memory of a worker without weights and cache (280 MB, measured), an API server (100 MB and more for larger
# vocabularies) and the supervisor.
PROGRAM_BYTES = 400 << 20
MIN_CACHE_BYTES = 512 << 20  # of a cache that is sized automatically, where memory allows
MIN_CONTEXT = 2048  # tokens: a model with less room for its cache does not fit
USUAL_CONTEXT = catalog.CONTEXT_SHOWN  # tokens for which the cache may take more than its share of memory
CACHE_SHARE = 4  # a cache takes a fourth of the memory beside the weights: other models need some, too
CONTEXT_STEP = 256  # a context that is reduced is a multiple of it
GPU_MARGIN = 0.06  # fraction of GPU memory left free for other processes, fragmentation and libraries


class MemorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a plan depends on; 0 stands for a value that is chosen here."""

    dtype: str = "auto"
    max_model_len: int = 0
    kv_cache_tokens: int = 0
    kv_cache_gb: float = 0.0  # GiB
    kv_cache_dtype: str = "auto"
    max_running: int = 256
    threads: int = 0

    @classmethod
    def of(cls, options: object) -> MemorySettings:
        """Return the settings among the attributes of `options`."""
        return cls(**{name: getattr(options, name) for name in cls.__struct_fields__})


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are in bytes."""

    model: ModelSize
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: str
    free: int
    weights: int
    cache: int
    program: int  # the processes, and the buffers of a step
    cache_tokens: int
    states: int = 0  # of the state cache of a hybrid model
    context: int
    threads: int
    cores: int
    requested_context: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.states + self.program

    @property
    def reduced(self) -> bool:
        """Whether the context is shorter than the model allows because memory is short."""
        return self.context < (self.requested_context or self.model.max_model_len)


def plan_memory(
    model: ModelSize, settings: MemorySettings, *, free: int, kernels: str | None, cores: int
) -> MemoryPlan:
    """Plan the memory of a model on a CPU, of which `free` bytes are free.

    `kernels`: the variant of the compiled kernels, None without them. Raise `ModelError` or `ConfigError` with one line
    that says what would fit.
    """
    dtype = choose_dtype(model, settings.dtype, kernels)
    limit = context_limit(settings.max_model_len, model.max_model_len, model.name)
    if model.kind != "generate":
        if least_memory(model, settings, dtype) > free:
            raise _does_not_fit(model, dtype, settings, free, kernels)
        return _plan_without_cache(model, settings, dtype, free=free, weights=model.weights[dtype], cores=cores)
    weights, program = model.weights[dtype], program_bytes(model, settings)
    block = model.cache_bytes(dtype) * BLOCK_SIZE
    states = state_cache_bytes(model, settings, free - weights - program)
    spare = free - weights - program - states
    explicit = _requested_cache(settings, block)
    shortest = 0 if explicit else _blocks(min(MIN_CONTEXT, limit)) * block
    if max(weights + shortest + states, model.loading.get(dtype, 0)) + program > free:
        raise _does_not_fit(model, dtype, settings, free, kernels)
    if explicit:
        cache = _explicit_cache(model, settings, explicit, spare, block)
    elif settings.max_model_len:
        cache = _cache_of_context(model, limit, spare, block)
    else:
        cache = _automatic_cache(limit, spare, block)
    tokens = cache // block * BLOCK_SIZE if block else limit
    context = limit
    if tokens < limit:
        context = tokens if explicit else max(tokens // CONTEXT_STEP * CONTEXT_STEP, min(tokens, CONTEXT_STEP))
    return MemoryPlan(
        model=model,
        dtype=dtype,
        free=free,
        weights=weights,
        cache=cache,
        states=states,
        program=program,
        cache_tokens=tokens,
        context=context,
        threads=settings.threads or cores,
        cores=cores,
        requested_context=settings.max_model_len,
    )


def _plan_without_cache(
    model: ModelSize,
    settings: MemorySettings,
    dtype: str,
    *,
    device: Literal["cpu", "cuda"] = "cpu",
    free: int,
    weights: int,
    cores: int,
) -> MemoryPlan:
    """Return the plan of an embedding model, which keeps nothing between two steps."""
    return MemoryPlan(
        model=model,
        device=device,
        dtype=dtype,
        free=free,
        weights=weights,
        cache=0,
        program=program_bytes(model, settings),
        cache_tokens=0,
        context=context_limit(settings.max_model_len, model.max_model_len, model.name),
        threads=settings.threads or cores,
        cores=cores,
        requested_context=settings.max_model_len,
    )


def plan_gpu_memory(
    model: ModelSize,
    settings: MemorySettings,
    free: int,
    total: int,
    *,
    overhead: int,
    fraction: float,
    cores: int,
) -> MemoryPlan | None:
    """Estimate what a model takes of a GPU's memory; None if the dtype is for CPUs, or the cache may not fit.

    `overhead`: beside weights and cache; `fraction`: of the GPU that the model may use, 0: all. The worker sizes its
    cache by what is really left once the weights are loaded. Raise `ModelError` with one line that says what would fit
    for weights that it would refuse.
    """
    if settings.dtype not in ("auto", *GPU_BYTES_PER_WEIGHT):
        return None
    weights = model.gpu_weights(settings.dtype)
    usable = int(free - GPU_MARGIN * total)
    if model.kind == "generate" and weights + MIN_GPU_OVERHEAD > usable:
        raise _does_not_fit_on_gpu(model, settings, weights, usable)
    if 0 < fraction < 1:
        usable = min(usable, int(fraction * (1 - GPU_MARGIN) * total))
    if model.kind != "generate":
        if weights + program_bytes(model, settings) > usable:
            return None
        return _plan_without_cache(model, settings, "bf16", device="cuda", free=free, weights=weights, cores=cores)
    block = model.cache_bytes("fp8" if settings.kv_cache_dtype == "fp8" else "bf16") * BLOCK_SIZE
    spare = usable - weights - overhead
    states = state_cache_bytes(model, settings, spare)
    spare -= states
    if spare < block or not block:
        return None
    cache = min(_requested_cache(settings, block) or spare, spare)
    limit = context_limit(settings.max_model_len, model.max_model_len, model.name)
    return MemoryPlan(
        model=model,
        device="cuda",
        dtype=model.gpu_dtype if settings.dtype == "auto" else settings.dtype,
        free=free,
        weights=weights,
        cache=cache,
        states=states,
        program=overhead,
        cache_tokens=cache // block * BLOCK_SIZE,
        context=min(limit, cache // block * BLOCK_SIZE),
        threads=settings.threads or cores,
        cores=cores,
        requested_context=settings.max_model_len,
    )


def least_memory(model: ModelSize, settings: MemorySettings, dtype: str) -> int:
    """Return the bytes that a model needs at least on a CPU, with the cache of the settings or a short context."""
    if model.kind != "generate":
        return max(model.weights[dtype], model.loading.get(dtype, 0)) + program_bytes(model, settings)
    block = model.cache_bytes(dtype) * BLOCK_SIZE
    context = settings.max_model_len or min(MIN_CONTEXT, model.max_model_len)
    cache = _requested_cache(settings, block) or _blocks(context) * block
    cache += state_cache_bytes(model, settings, 0)
    return max(model.weights[dtype] + cache, model.loading.get(dtype, 0)) + program_bytes(model, settings)


def state_cache_bytes(model: ModelSize, settings: MemorySettings, spare: int) -> int:
    """Return the bytes of a hybrid model's state cache, of `spare` beside the weights; 0 for other models."""
    if not model.state_bytes:
        return 0
    return model.state_bytes * count_slots(settings.max_running, model.state_bytes, spare // CACHE_SHARE)


def program_bytes(model: ModelSize, settings: MemorySettings) -> int:
    """Return the bytes of the processes, with the logits of as many sequences as may run.

    Those of an embedding model are with the activations of its largest step.
    """
    if model.kind != "generate":
        return PROGRAM_BYTES + model.step_bytes
    return PROGRAM_BYTES + 4 * model.vocab_size * settings.max_running


def context_limit(requested: int, maximum: int, name: str) -> int:
    """Return the longest context. Raise `ConfigError` if more is requested than the model was made for."""
    if requested > maximum:
        raise ConfigError(f"--max-model-len {requested} is more than the {maximum} tokens that {name} was made for")
    return requested or maximum


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def _requested_cache(settings: MemorySettings, block: int) -> int:
    """Return the bytes of the cache that the settings ask for; 0: none, or their size is not known."""
    if settings.kv_cache_tokens:
        return _blocks(settings.kv_cache_tokens) * block
    return max(int(settings.kv_cache_gb * 2**30), block) if settings.kv_cache_gb else 0


def _explicit_cache(model: ModelSize, settings: MemorySettings, cache: int, spare: int, block: int) -> int:
    if cache > spare:
        fit = spare // block * BLOCK_SIZE if block else 0
        raise ConfigError(
            f"a cache of {cache // block * BLOCK_SIZE if block else 0:,} tokens needs {gigabytes(cache)} of memory "
            f"and {gigabytes(spare)} are free beside the weights of {model.name}: choose a smaller --kv-cache-gb or "
            f"--kv-cache-tokens, up to {fit:,} tokens ({max(0, spare) / 2**30:.1f} GiB)",
            code=NO_MEMORY,
        )
    if block and settings.max_model_len > cache // block * BLOCK_SIZE:
        raise ConfigError(
            f"--max-model-len {settings.max_model_len} does not fit in the cache of {cache // block * BLOCK_SIZE:,} "
            "tokens that --kv-cache-gb or --kv-cache-tokens asks for: choose a larger cache, or leave it out"
        )
    return cache


def _cache_of_context(model: ModelSize, context: int, spare: int, block: int) -> int:
    """Return the bytes of a cache for at least one sequence of this length."""
    needed = _blocks(context) * block
    if needed > spare:
        fit = spare // block * BLOCK_SIZE // CONTEXT_STEP * CONTEXT_STEP
        raise ConfigError(
            f"--max-model-len {context} needs {gigabytes(needed)} of memory for its cache and {gigabytes(spare)} are "
            f"free beside the weights of {model.name}: up to {fit:,} tokens fit",
            code=NO_MEMORY,
        )
    return max(needed, _automatic_cache(context, spare, block))


def _automatic_cache(context: int, spare: int, block: int) -> int:
    """Return the bytes of a cache for two sequences of this length, or what memory allows."""
    wanted = max(MIN_CACHE_BYTES, 2 * _blocks(context) * block)
    usual = _blocks(min(context, USUAL_CONTEXT)) * block
    return min(wanted, max(spare // CACHE_SHARE, min(spare, usual)))


def _does_not_fit_on_gpu(model: ModelSize, settings: MemorySettings, weights: int, usable: int) -> ModelError:
    dtype = model.gpu_dtype if settings.dtype == "auto" else settings.dtype
    in_fp8 = model.gpu_weights("fp8") if dtype == "bf16" and (model.native or model.gpu_kept) else 0
    hint = describe_gpu_alternatives(weights, usable, in_fp8=in_fp8)
    return ModelError(
        f"{model.name} needs {gigabytes(weights + MIN_GPU_OVERHEAD)} of GPU memory ({gigabytes(weights)} for its "
        f"weights in {dtype}) and {gigabytes(usable)} are free: {hint}",
        code=NO_MEMORY,
    )


def _does_not_fit(model: ModelSize, dtype: str, settings: MemorySettings, free: int, kernels: str | None) -> ModelError:
    needs = {each: least_memory(model, settings, each) for each in model.weights}
    program = program_bytes(model, settings)
    hint = describe_alternatives(model, dtype, needs, free, program, compiled=kernels is not None)
    return ModelError(
        f"{model.name} needs {gigabytes(needs[dtype])} of memory ({gigabytes(model.weights[dtype])} for its weights in "
        f"{dtype}) and {gigabytes(free)} are free: {hint}",
        code=NO_MEMORY,
    )
