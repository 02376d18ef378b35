"""Load a model on a GPU."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from syringa.engine.cpu.features import available_cores
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions, Progress
from syringa.engine.loading.memory_plan import context_limit
from syringa.engine.loading.model_size import read_model_size
from syringa.engine.loading.precision import check_deterministic_gpu
from syringa.engine.loading.weights import check_tensors, open_weights
from syringa.engine.models.config import DecoderConfig, count_parameters, is_native, read_config
from syringa.engine.models.layers import ReadWeight
from syringa.engine.models.quantization import stored_dtype
from syringa.engine.models.state_cache import StateShape
from syringa.errors import ConfigError
from syringa.modelfiles import ModelDescription, ModelFiles
from syringa.types import ModelInfo

if TYPE_CHECKING:  # Triton, and vision with its extra, are imported only where they are used
    from syringa.engine.gpu.model import GpuModel
    from syringa.engine.gpu.ops.base import GpuOps
    from syringa.engine.loading.quantized import ReadQuantized
    from syringa.engine.vision.preprocessor import VisionComponents


def load_on_gpu(
    options: LoadOptions,
    files: ModelFiles,
    description: ModelDescription,
    device: torch.device,
    progress: Progress | None,
) -> LoadedModel:
    from syringa.engine.gpu import device as gpu_device
    from syringa.engine.gpu.ops.base import choose_ops

    started = time.perf_counter()
    length = context_limit(options.max_model_len, description.max_model_len, description.name)
    native = is_native(description.config)
    decoder = read_config(description.config) if native else None
    experts = decoder is not None and decoder.experts > 0
    hybrid = decoder is not None and decoder.delta_net is not None
    stored = stored_dtype(description.config) if native else "bf16"
    dtype = stored if options.dtype == "auto" else options.dtype
    if options.deterministic:
        check_deterministic_gpu(dtype, native=native, attention=options.attention, experts=experts, hybrid=hybrid)
    if stored == "fp8" == dtype:
        gpu_device.check_fp8_capability(device, f"{description.name}, whose weights are in FP8,")
    ops = choose_ops(device, options.attention, deterministic=options.deterministic)
    if not native:
        from syringa.engine.models.hf.model import load_hf_model

        threads = options.threads or available_cores()  # images are processed on the CPU
        found = load_hf_model(files, description, "bf16", None, length, threads, device, ops, progress)
        assert found.gpu is not None
        wrapped = wrap_gpu_model(
            found.gpu, description, found.parameters, "bf16", started, options.threads, found.vision
        )
        return with_cache_dtype(wrapped, options.kv_cache_dtype, options.attention)
    config = read_config(description.config)
    weights = open_weights(files, description.config)
    size, name = read_model_size(files, description), torch.cuda.get_device_name(device)
    gpu_device.check_weights_fit(
        size.gpu_weights(dtype),
        dtype,
        description.name,
        gpu_device.free_memory(device),
        name,
        in_fp8=0 if options.deterministic else size.gpu_weights("fp8"),
    )
    check_tensors(config, weights, files.path)
    loaded = load_native_on_gpu(
        config,
        description,
        weights,
        device,
        dtype,
        length,
        started,
        options.threads,
        progress,
        ops,
        weights.quantized if dtype == stored != "bf16" else None,
    )
    loaded = with_cache_dtype(loaded, options.kv_cache_dtype, options.attention)
    if options.deterministic:
        from syringa.engine.gpu.batch_invariant_check import check_batch_invariance

        assert loaded.gpu is not None
        loaded.gpu.decoder.supports_fp8 = False
        check_batch_invariance(loaded)
    return loaded


def load_native_on_gpu(
    config: DecoderConfig,
    description: ModelDescription,
    weights: ReadWeight,
    device: torch.device,
    dtype: str,
    length: int,
    started: float,
    threads: int = 0,
    progress: Progress | None = None,
    ops: GpuOps | None = None,
    quantized: ReadQuantized | None = None,
) -> LoadedModel:
    """Load a native decoder on a GPU. `progress` is called with the number of loaded layers and their total.

    `quantized` returns weights that stay as they are stored, and others are in bf16; without it, all become `dtype`.
    """
    from syringa.engine.gpu.cache import GpuCacheShape
    from syringa.engine.gpu.loading import load_gpu_decoder
    from syringa.engine.gpu.model import GpuModel

    done = itertools.count(1)

    def report_progress() -> None:
        if progress:
            progress(next(done), config.layers)

    if progress:
        progress(0, config.layers)
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    decoder = load_gpu_decoder(
        config,
        weights,
        device,
        length,
        dtype=kind,
        fp8=dtype == "fp8" and quantized is None,
        quantized=quantized,
        ops=ops,
        tick=report_progress,
    )
    states = None
    if config.delta_net is not None:
        states = StateShape(sum(config.linear), config.delta_net, device)
    shape = GpuCacheShape(config.attention_layers, config.kv_heads, config.head_size, kind, device, states)
    gpu = GpuModel(decoder, shape, length)
    return wrap_gpu_model(gpu, description, count_parameters(config), dtype, started, threads)


def wrap_gpu_model(
    gpu: GpuModel,
    description: ModelDescription,
    parameters: int,
    dtype: str,
    started: float,
    threads: int = 0,
    vision: VisionComponents | None = None,
) -> LoadedModel:
    """Return a model that is already on a GPU as a `LoadedModel`."""
    info = ModelInfo(
        architecture=description.architecture,
        dtype=dtype,
        max_model_len=gpu.max_model_len,
        vocab_size=gpu.decoder.vocabulary,
        parameters=parameters,
        kernels="triton" if gpu.shape.device.type == "cuda" else "torch",
        threads=threads or available_cores(),
        load_seconds=time.perf_counter() - started,
    )
    return LoadedModel(gpu, None, gpu.shape, description, info, vision, gpu)


def with_cache_dtype(loaded: LoadedModel, dtype: str, attention: str = "auto") -> LoadedModel:
    """Return a model on a GPU with a KV cache of this dtype; "auto": unchanged. Raises `ConfigError`."""
    if dtype != "fp8":
        return loaded
    from syringa.engine.gpu import device as gpu_device
    from syringa.engine.gpu.cache import FP8

    assert loaded.gpu is not None
    if attention == "flashinfer":
        raise ConfigError("--attention flashinfer does not support --kv-cache-dtype fp8: use --attention triton")
    if loaded.device.type == "cuda":
        gpu_device.check_fp8_capability(loaded.device, "--kv-cache-dtype fp8", "leave it out")
    shape = replace(loaded.gpu.shape, dtype=FP8)
    gpu = replace(loaded.gpu, shape=shape)
    return replace(loaded, model=gpu, cache=shape, gpu=gpu)
