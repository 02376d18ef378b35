"""Load a model from its files: choose device, dtype and kernels, check memory, read the weights."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from syringa.engine.cpu.features import available_cores, available_memory
from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.linear import (
    BlockEmbedding,
    BlockLinear,
    BlockTensor,
    DenseLinear,
    Int8Linear,
    LinearLayer,
    TorchLinear,
)
from syringa.engine.cpu.layers.native_ops import NativeOps, supports_head_size
from syringa.engine.cpu.layers.ops import CpuOps, TorchOps
from syringa.engine.cpu.layers.rotary import rotary_tables
from syringa.engine.cpu.native import BLOCK_TYPES, Kernels, load_kernels
from syringa.engine.gpu.device import choose_device
from syringa.engine.loading.memory_plan import MemoryPlan, MemorySettings, context_limit, plan_memory
from syringa.engine.loading.model_size import read_model_size
from syringa.engine.loading.precision import check_deterministic_cpu, check_deterministic_gpu
from syringa.engine.loading.weights import GgufWeights, WeightSource, open_weights
from syringa.engine.models.config import DecoderConfig, count_parameters, is_native, read_config
from syringa.engine.models.decoder import (
    Decoder,
    Embedding,
    Model,
    ReadWeight,
    check_shapes,
    load_layers,
    load_qk_norms,
)
from syringa.engine.models.fused import FusedDecoder
from syringa.engine.models.hybrid import HybridDecoder, load_hybrid_layers
from syringa.engine.models.hybrid_config import language_config
from syringa.engine.models.quantization import stored_dtype
from syringa.engine.models.state_cache import StateShape, StateTensors
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.state_cache import count_slots
from syringa.errors import ConfigError
from syringa.modelfiles import ModelDescription, ModelFiles, describe, locate
from syringa.types import ModelInfo

if TYPE_CHECKING:  # vision needs the extra `syringa[models]`
    from syringa.engine.gpu.cache import GpuCacheShape
    from syringa.engine.gpu.model import GpuModel
    from syringa.engine.gpu.ops.base import GpuOps
    from syringa.engine.loading.quantized import ReadQuantized
    from syringa.engine.scheduling.limits import SchedulerLimits
    from syringa.engine.vision.preprocessor import VisionComponents

MULTIMODAL_CONFIGS = (
    "vision_config",
    "audio_config",
    "image_config",
)  # present in the config of models that read more than text
EMBEDDING = "model.embed_tokens.weight"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class CacheShape:
    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    states: StateShape | None = None  # of a hybrid model

    @property
    def bytes_per_block(self) -> int:
        return CacheTensors.bytes_per_block(self.layers, self.kv_heads, self.head_size, self.dtype)

    def allocate(self, blocks: int, states: StateTensors | None = None) -> CacheTensors:
        return CacheTensors(self.layers, blocks, self.kv_heads, self.head_size, self.dtype, states)


@dataclass(frozen=True)
class LoadedModel:
    model: Model
    kernels: Kernels | None
    cache: CacheShape | GpuCacheShape
    description: ModelDescription
    info: ModelInfo
    vision: VisionComponents | None = None  # of a vision-language model
    gpu: GpuModel | None = None  # `model`, if it is on a GPU
    plan: MemoryPlan | None = None  # of a model on a CPU

    @property
    def device(self) -> torch.device:
        return self.gpu.decoder.device if self.gpu is not None else torch.device("cpu")


@dataclass(frozen=True)
class LoadOptions:
    model: str = "default"
    dtype: str = "auto"
    threads: int = 0
    max_model_len: int = 0
    native_kernels: bool = True  # False: PyTorch, the reference
    device: str = "auto"
    attention: str = "auto"  # prefill attention kernel on a GPU
    deterministic: bool = False  # batch-invariant kernels only
    kv_cache_tokens: int = 0
    kv_cache_gb: float = 0.0
    kv_cache_dtype: str = "auto"  # on a GPU: fp8, or the dtype of activations
    max_running: int = 256
    free_memory: int = 0  # bytes that were free before this process was started; 0: those that are free now


def load_model(options: LoadOptions, progress: Progress | None = None) -> LoadedModel:
    """Load a model. Raise `ModelError` or `ConfigError` with one line that says what to do."""
    started = time.perf_counter()
    files = locate(options.model)
    description = describe(files)
    device = choose_device(
        options.device,
        options.dtype,
        native=is_native(description.config, "cuda"),
        name=description.architecture,
    )
    if device.type == "cuda":
        loaded = load_on_gpu(options, files, description, device, progress)
        return with_cache_dtype(loaded, options.kv_cache_dtype, options.attention)
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
        model, cache = _load_cpu_decoder(files, description, weights, dtype, kernels, length, progress)
        vocabulary = language_config(description.config)["vocab_size"]
    else:
        from syringa.engine.models.hf.model import load_hf_model

        found = load_hf_model(files, description, dtype, kernels, length, threads)
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
    native = is_native(description.config, "cuda")
    decoder = read_config(description.config) if native else None
    experts = decoder is not None and decoder.experts > 0
    hybrid = decoder is not None and decoder.delta_net is not None
    stored = stored_dtype(description.config) if native else "bf16"
    dtype = stored if options.dtype == "auto" else options.dtype
    if options.deterministic:
        check_deterministic_gpu(dtype, native=native, attention=options.attention, experts=experts, hybrid=hybrid)
    if stored == "fp8" == dtype:
        gpu_device.check_fp8_capability(device, f"{description.name}, whose weights are in FP8,")
    if experts and dtype == "fp8" and stored != "fp8":
        raise ConfigError(f"--dtype fp8 does not support the experts of {description.name} yet: use --dtype bf16")
    ops = choose_ops(device, options.attention, deterministic=options.deterministic)
    if not native:
        from syringa.engine.models.hf.model import load_hf_model

        threads = options.threads or available_cores()  # images are processed on the CPU
        found = load_hf_model(files, description, "bf16", None, length, threads, device, ops)
        assert found.gpu is not None
        return wrap_gpu_model(found.gpu, description, found.parameters, "bf16", started, options.threads, found.vision)
    config = read_config(description.config)
    weights = open_weights(files, description.config)
    parameters, name = count_parameters(config), torch.cuda.get_device_name(device)
    gpu_device.check_weights_fit(
        parameters,
        dtype,
        description.name,
        gpu_device.free_memory(device),
        name,
        supports_fp8=not options.deterministic and not experts,
    )
    check_shapes(config, weights, files.path)
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

    `quantized` returns weights that stay as they are stored; without it, all become `dtype`.
    """
    from syringa.engine.gpu.cache import GpuCacheShape
    from syringa.engine.gpu.loading import load_gpu_decoder
    from syringa.engine.gpu.model import GpuModel

    done = itertools.count(1)

    def report_progress() -> None:
        if progress:
            progress(next(done), config.layers)

    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    decoder = load_gpu_decoder(
        config,
        weights,
        device,
        length,
        dtype=kind,
        fp8=dtype == "fp8",
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


def _load_cpu_decoder(
    files: ModelFiles,
    description: ModelDescription,
    weights: WeightSource,
    dtype: str,
    kernels: Kernels | None,
    length: int,
    progress: Progress | None,
) -> tuple[Model, CacheShape]:
    config = read_config(description.config)
    gguf = weights if dtype == "gguf" and isinstance(weights, GgufWeights) else None
    check_shapes(config, weights, files.path)
    half = torch.float32 if dtype == "fp32" else torch.bfloat16
    native_ops = kernels is not None and supports_head_size(config.head_size)

    def read(name: str) -> torch.Tensor:
        tensor = weights(name)
        if not isinstance(weights, GgufWeights):  # which checks them itself
            _check_finite(tensor, f"{files.path}: {name}", kernels)
        return tensor

    def make_linear(names: Sequence[str], bias: torch.Tensor | None, *, gated: bool = False) -> LinearLayer:
        if gguf is not None and (blocks := _matching_blocks(gguf, names, gated)):
            assert kernels is not None  # checked by choose_dtype
            return BlockLinear(kernels, blocks, bias, gated=gated and native_ops)
        if dtype in ("int8", "gguf"):
            assert kernels is not None
            stored = [_stored_tensor(weights, name, files.path) for name in names]
            return Int8Linear(kernels, stored, bias, gated=gated and native_ops)
        weight = torch.cat([read(name) for name in names])
        return DenseLinear(kernels, weight, bias, half) if kernels is not None else TorchLinear(weight, bias, half)

    def make_dense(name: str) -> LinearLayer:
        return DenseLinear(kernels, read(name), None, half) if kernels else TorchLinear(read(name), None, half)

    done = 0

    def report_progress() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, config.layers + 1)

    head = make_linear([EMBEDDING if config.tied else "lm_head.weight"], None)
    if config.tied and isinstance(head, BlockLinear):
        embedding: Embedding = BlockEmbedding(head)
    else:
        embedding = _load_embedding(weights, read, kernels, half, blocks=dtype == "gguf")
    report_progress()
    rotary = rotary_tables(config.rope, config.rotary, length, config.max_positions)
    norms = load_qk_norms(config, read)
    norm = read("model.norm.weight").float()
    decoder: Model
    if config.delta_net is not None:
        ops: CpuOps = TorchOps(config, rotary, norms)
        if kernels is not None and native_ops:
            ops = NativeOps(kernels, config, rotary, norms)
        hybrid = load_hybrid_layers(config, read, make_linear, make_dense, ops, kernels, report_progress)
        states = StateShape(sum(config.linear), config.delta_net, torch.device("cpu"))
        shape = CacheShape(config.attention_layers, config.kv_heads, config.head_size, half, states)
        return HybridDecoder(config, ops, embedding, hybrid, norm, head), shape
    layers = load_layers(config, read, make_linear, report_progress)
    parts = embedding, layers, norm, head
    if kernels is None or not native_ops:
        decoder = Decoder(config, TorchOps(config, rotary, norms), *parts)
    elif dtype in ("int8", "gguf"):
        decoder = FusedDecoder(config, NativeOps(kernels, config, rotary, norms), *parts)
    else:
        decoder = Decoder(config, NativeOps(kernels, config, rotary, norms), *parts)
    return decoder, CacheShape(config.layers, config.kv_heads, config.head_size, half)


def _stored_tensor(weights: WeightSource, name: str, path: str) -> BlockTensor:
    """Return a matrix as it is in the file, or in floating point if the kernels cannot read its type."""
    if isinstance(weights, GgufWeights) and (stored := weights.stored(name)) is not None:
        return stored
    return BlockTensor.of(weights(name), f"{path}: {name}")


def _check_finite(tensor: torch.Tensor, name: str, kernels: Kernels | None) -> None:
    """Raise `ModelError` if a number is not finite."""
    stored = BlockTensor.of(tensor, name)
    if kernels is not None:
        stored.check(kernels)
    elif not tensor.isfinite().all():
        raise stored.corrupt()


def _matching_blocks(weights: GgufWeights, names: Sequence[str], gated: bool) -> list[BlockTensor]:
    """Return the blocks of tensors that can be one layer; an empty list if they must be converted."""
    blocks = [tensor for tensor in map(weights.blocks, names) if tensor is not None]
    if len(blocks) < len(names) or (gated and len({tensor.type for tensor in blocks}) > 1):
        return []
    return blocks


def _load_embedding(
    weights: WeightSource, read: ReadWeight, kernels: Kernels | None, dtype: torch.dtype, *, blocks: bool
) -> Embedding:
    """Return the embedding in `dtype`, with `blocks` in those of the file if the kernels can read them."""
    if isinstance(weights, GgufWeights) and kernels is not None and (stored := weights.stored(EMBEDDING)) is not None:
        packed = blocks and stored.type in BLOCK_TYPES
        return BlockEmbedding(BlockLinear(kernels, [stored], None)) if packed else stored.dequantize(kernels, dtype)
    return read(EMBEDDING).to(dtype)


def state_slots(loaded: LoadedModel, limits: SchedulerLimits) -> int:
    """Return the number of slots in the state cache of a hybrid model; 0 for others."""
    states = loaded.cache.states
    if states is None:
        return 0
    if loaded.gpu is not None:
        return loaded.gpu.num_state_slots(limits)
    assert loaded.plan is not None  # models on a CPU have one
    return count_slots(limits.max_running, states.bytes_per_slot, loaded.plan.states)


def cache_blocks(loaded: LoadedModel, tokens: int, gigabytes: float, limits: SchedulerLimits) -> int:
    """Return the number of KV cache blocks: as configured, or as planned for the memory that was free."""
    if loaded.gpu is not None:
        return loaded.gpu.num_blocks(tokens, gigabytes, limits)
    if tokens:
        return -(-tokens // BLOCK_SIZE)
    assert loaded.plan is not None  # models on a CPU have one
    size = int(gigabytes * 2**30) if gigabytes else loaded.plan.cache
    return max(1, size // loaded.cache.bytes_per_block)
