"""Load an embedding model or a cross-encoder: choose device, dtype and kernels, check memory, read the weights."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from syringa.engine.cpu.features import available_cores, available_memory
from syringa.engine.cpu.layers.native_ops import supports_head_size
from syringa.engine.cpu.native import Kernels, load_kernels
from syringa.engine.embedding.batch import PackedBatch
from syringa.engine.embedding.decoder import load_decoder_encoder
from syringa.engine.embedding.encoder import (
    Encoder,
    EncoderOps,
    TorchEncoderOps,
    encoder_shapes,
    load_embedding,
    load_layers,
)
from syringa.engine.embedding.encoder_config import is_native_encoder, read_encoder_config
from syringa.engine.embedding.heads import DenseLayer, NativePooling, PooledModel, TokenEncoder, TorchPooling
from syringa.engine.embedding.hf import HFScorer, load_hf_encoder
from syringa.engine.embedding.native_ops import MAX_HEAD_SIZE, FusedEncoder, NativeEncoderOps
from syringa.engine.embedding.size import is_native_embedding
from syringa.engine.embedding.weights import LayerReader, PrefixedWeights
from syringa.engine.gpu.device import choose_device
from syringa.engine.loading.loaded_model import LoadOptions, Progress
from syringa.engine.loading.memory_plan import MemorySettings, context_limit, plan_memory
from syringa.engine.loading.model_size import read_model_size
from syringa.engine.loading.weights import SafetensorsWeights
from syringa.errors import ConfigError
from syringa.modelfiles import EmbeddingSpec, ModelDescription, ModelFiles, describe
from syringa.modelfiles.embedding import Pooling
from syringa.types import ModelInfo


class EmbeddingModel(Protocol):
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Return a row for each input, fp32."""
        ...


@dataclass(frozen=True)
class LoadedEmbedding:
    model: EmbeddingModel
    info: ModelInfo
    device: torch.device


def load_embedding_model(
    options: LoadOptions, files: ModelFiles, spec: EmbeddingSpec, progress: Progress | None = None
) -> LoadedEmbedding:
    """Load a model. Raise `ModelError` or `ConfigError` with one line that says what to do."""
    started = time.perf_counter()
    description = describe(files)
    device = choose_device(options.device, options.dtype, native=False, name=spec.architecture)
    cores = available_cores()
    threads = options.threads or cores
    length = context_limit(options.max_model_len, spec.max_length, files.name)
    kernels = load_kernels(threads) if options.native_kernels and device.type == "cpu" else None
    native = is_native_embedding(description.config)
    if device.type == "cuda":
        dtype = "bf16"
    else:
        size, free = read_model_size(files, description), options.free_memory or available_memory()
        plan = plan_memory(
            size, MemorySettings.of(options), free=free, kernels=kernels.variant if kernels else None, cores=cores
        )
        dtype = plan.dtype
    if options.deterministic and (kernels is None or not native):
        raise ConfigError("--deterministic is for embedding models of the native families on a CPU: leave it out")
    # The kernels have their own threads; torch's would compete with them for the cores.
    torch.set_num_threads(1 if kernels is not None and (native or dtype == "int8") else threads)
    if native:
        model, parameters = _load_native(files, description, spec, dtype, kernels, device, length, progress)
    else:
        model, parameters = _load_hf(files, spec, dtype, kernels, device, progress)
    info = ModelInfo(
        architecture=spec.architecture,
        dtype=dtype,
        max_model_len=length,
        vocab_size=int(description.config.get("vocab_size") or 0),
        parameters=parameters,
        kernels=kernels.variant if kernels else "cuda" if device.type == "cuda" else "torch",
        threads=threads,
        load_seconds=time.perf_counter() - started,
        kind=spec.kind,
        dimensions=spec.dimensions,
    )
    return LoadedEmbedding(model, info, device)


def _load_native(
    files: ModelFiles,
    description: ModelDescription,
    spec: EmbeddingSpec,
    dtype: str,
    kernels: Kernels | None,
    device: torch.device,
    length: int,
    progress: Progress | None,
) -> tuple[EmbeddingModel, int]:
    config = description.config
    weights = SafetensorsWeights(Path(files.path))
    done = itertools.count(1)

    def report_progress() -> None:
        if progress:
            progress(next(done), config["num_hidden_layers"])

    if progress:
        progress(0, config["num_hidden_layers"])
    if is_native_encoder(config):
        prefixed = PrefixedWeights(weights, files.path, read_encoder_config(config).prefix)
        reader = LayerReader(prefixed, files.path, dtype, kernels, device)
        encoder: TokenEncoder = _load_encoder(config, prefixed, reader, report_progress)
    else:
        prefixed = PrefixedWeights(weights, files.path, "model.")
        reader = LayerReader(prefixed, files.path, dtype, kernels, device)
        encoder = _load_decoder(config, prefixed, reader, length, report_progress)
    pooling, dense = _classifier(config, reader) if spec.kind == "score" else _dense(files, spec, reader)
    ops = NativePooling(kernels) if kernels is not None else TorchPooling()
    model = PooledModel(encoder, ops, pooling, dense, normalize=spec.normalize)
    return model, read_model_size(files, description).parameters


def _load_encoder(
    config: dict[str, Any], weights: PrefixedWeights, reader: LayerReader, progress: Callable[[], None]
) -> TokenEncoder:
    c = read_encoder_config(config)
    weights.check_shapes(encoder_shapes(c))
    embedding = load_embedding(c, reader.read, reader.torch_dtype)
    layers = load_layers(c, reader.read, reader.linear, reader.fine_linear, progress)
    if reader.device.type == "cuda":
        from syringa.engine.embedding.gpu_encoder import GpuEncoder, find_varlen_attention

        on_gpu = GpuEncoder(c, embedding, layers, find_varlen_attention(c.head_size, reader.device))
        on_gpu.capture_graphs()
        return on_gpu
    kernels = reader.kernels
    if kernels is None or not supports_head_size(c.head_size) or c.head_size > MAX_HEAD_SIZE:
        return Encoder(c, TorchEncoderOps(c, reader.torch_dtype), embedding, layers)
    if reader.dtype == "int8":
        return FusedEncoder(kernels, c, embedding, layers)
    ops: EncoderOps = NativeEncoderOps(kernels, c, half=reader.dtype == "bf16")
    return Encoder(c, ops, embedding, layers)


def _load_decoder(
    config: dict[str, Any], weights: PrefixedWeights, reader: LayerReader, length: int, progress: Callable[[], None]
) -> TokenEncoder:
    if reader.device.type != "cuda":
        return load_decoder_encoder(weights, config, reader, length, progress)
    from syringa.engine.embedding.gpu_decoder import load_gpu_decoder_encoder

    return load_gpu_decoder_encoder(weights, config, reader, length, progress)


def _dense(files: ModelFiles, spec: EmbeddingSpec, reader: LayerReader) -> tuple[Pooling, list[DenseLayer]]:
    """Return how hidden states are pooled, and the dense modules, which have folders of their own."""
    layers = []
    for module in spec.dense:
        path = Path(files.path) / module.path
        own = PrefixedWeights(SafetensorsWeights(path), str(path), "linear.")
        shapes: dict[str, tuple[int, ...]] = {"linear.weight": (module.out_features, module.in_features)}
        own.check_shapes(shapes | ({"linear.bias": (module.out_features,)} if module.bias else {}))
        of_module = LayerReader(own, str(path), "fp32", reader.kernels, reader.device)
        linear = of_module.exact_linear("linear.weight", "linear.bias" if module.bias else None)
        layers.append(DenseLayer(linear, module.activation))
    return spec.pooling, layers


def _classifier(config: dict[str, Any], reader: LayerReader) -> tuple[Pooling, list[DenseLayer]]:
    """Return how hidden states are pooled for a cross-encoder's classifier, and its layers."""

    def linear(name: str, *, bias: bool = True) -> Any:
        return reader.exact_linear(f"{name}.weight", f"{name}.bias" if bias else None)

    if not is_native_encoder(config):  # a decoder
        return "lasttoken", [DenseLayer(linear("score", bias=False), "identity")]
    if config["model_type"] == "bert":
        return "cls", [DenseLayer(linear("pooler.dense"), "tanh"), DenseLayer(linear("classifier"), "identity")]
    return "cls", [
        DenseLayer(linear("classifier.dense"), "tanh"),
        DenseLayer(linear("classifier.out_proj"), "identity"),
    ]


def _load_hf(
    files: ModelFiles,
    spec: EmbeddingSpec,
    dtype: str,
    kernels: Kernels | None,
    device: torch.device,
    progress: Progress | None,
) -> tuple[EmbeddingModel, int]:
    encoder, parameters = load_hf_encoder(files, spec, dtype, kernels, device, progress)
    if isinstance(encoder, HFScorer):
        return encoder, parameters
    reader = LayerReader(SafetensorsWeights(Path(files.path)), files.path, "fp32", kernels, device)
    pooling, dense = _dense(files, spec, reader)
    ops = NativePooling(kernels) if kernels is not None else TorchPooling()
    return PooledModel(encoder, ops, pooling, dense, normalize=spec.normalize), parameters
