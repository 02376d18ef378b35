"""Load a model from its files: choose device, dtype and kernels, check memory, read the weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from syringa.engine.cpu.features import available_cores, available_memory
from syringa.engine.cpu.native import load_kernels
from syringa.engine.gpu.device import choose_device
from syringa.engine.loading.cpu_decoder import load_cpu_decoder
from syringa.engine.loading.gpu_model import load_on_gpu
from syringa.engine.loading.loaded_model import CacheShape, LoadedModel, LoadOptions, Progress
from syringa.engine.loading.memory_plan import MemorySettings, context_limit, plan_memory
from syringa.engine.loading.model_size import read_model_size
from syringa.engine.loading.precision import check_deterministic_cpu
from syringa.engine.loading.weights import open_weights
from syringa.engine.models.config import is_native, read_config
from syringa.engine.models.hybrid_config import language_config
from syringa.errors import ConfigError
from syringa.modelfiles import describe, locate
from syringa.types import ModelInfo

if TYPE_CHECKING:
    from syringa.engine.gpu.cache import GpuCacheShape
    from syringa.engine.vision.preprocessor import VisionComponents


def load_model(options: LoadOptions, progress: Progress | None = None) -> LoadedModel:
    """Load a model. Raise `ModelError` or `ConfigError` with one line that says what to do."""
    started = time.perf_counter()
    files = locate(options.model)
    description = describe(files)
    device = choose_device(
        options.device,
        options.dtype,
        native=is_native(description.config),
        name=description.architecture,
    )
    if device.type == "cuda":
        return load_on_gpu(options, files, description, device, progress)
    if options.kv_cache_dtype == "fp8":
        raise ConfigError("--kv-cache-dtype fp8 is for GPUs: leave it out on a CPU")
    cores = available_cores()
    threads = options.threads or cores
    kernels = load_kernels(threads) if options.native_kernels else None
    plan = plan_memory(
        read_model_size(files, description),
        MemorySettings.of(options),
        free=options.free_memory or available_memory(),
        kernels=kernels.variant if kernels else None,
        cores=cores,
    )
    dtype = plan.dtype
    if options.deterministic:
        native = is_native(description.config)
        size = read_config(description.config).head_size if native else 0
        check_deterministic_cpu(dtype, native=native, compiled=kernels is not None, head_size=size)
    # The kernels have their own threads; torch's would compete with them for the cores.
    kernels_multiply = kernels is not None and (dtype in ("int8", "gguf") or is_native(description.config))
    torch.set_num_threads(1 if kernels_multiply else threads)
    # Rotary scaling must not depend on the memory that happens to be free, as the planned context does.
    length = context_limit(options.max_model_len, description.max_model_len, description.name)
    cache: CacheShape | GpuCacheShape
    vision: VisionComponents | None = None
    if is_native(description.config):
        weights = open_weights(files, description.config, kernels)
        parameters = plan.model.parameters
        model, cache = load_cpu_decoder(files, description, weights, dtype, kernels, length, progress)
        vocabulary = language_config(description.config)["vocab_size"]
    else:
        from syringa.engine.models.hf.model import load_hf_model

        found = load_hf_model(files, description, dtype, kernels, length, threads, progress=progress)
        model, cache, parameters, vocabulary, vision, _ = found
    info = ModelInfo(
        architecture=description.architecture,
        dtype=dtype,
        max_model_len=plan.context,
        vocab_size=vocabulary,
        parameters=parameters,
        kernels=kernels.variant if kernels else "torch",
        threads=threads,
        load_seconds=time.perf_counter() - started,
    )
    return LoadedModel(model, kernels, cache, description, info, vision, plan=plan)
