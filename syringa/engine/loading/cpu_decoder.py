"""Load a decoder for the CPU: each matrix in the file's blocks, int8 or floating point."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syringa.engine.cpu.layers.linear import (
    BlockEmbedding,
    BlockLinear,
    BlockTensor,
    DenseLinear,
    Gate,
    Int8Linear,
    JoinedLinear,
    LinearLayer,
    TorchLinear,
)
from syringa.engine.cpu.layers.native_ops import NativeOps, supports_head_size
from syringa.engine.cpu.layers.ops import CpuOps, TorchOps
from syringa.engine.cpu.native import BLOCK_TYPES, Kernels
from syringa.engine.loading.loaded_model import CacheShape, Progress
from syringa.engine.loading.weights import GgufWeights, WeightSource, check_tensors
from syringa.engine.models.config import read_config
from syringa.engine.models.decoder import Decoder, Embedding, Model
from syringa.engine.models.fused import FusedDecoder, can_fuse
from syringa.engine.models.layers import ReadWeight, load_attention_tensors, load_layers
from syringa.engine.models.state_cache import StateShape
from syringa.modelfiles import ModelDescription, ModelFiles

EMBEDDING = "model.embed_tokens.weight"


def load_cpu_decoder(
    files: ModelFiles,
    description: ModelDescription,
    weights: WeightSource,
    dtype: str,
    kernels: Kernels | None,
    length: int,
    progress: Progress | None,
) -> tuple[Model, CacheShape]:
    """Return a native decoder with its cache. `progress` gets the number of loaded layers and their total."""
    config = read_config(description.config)
    gguf = weights if dtype == "gguf" and isinstance(weights, GgufWeights) else None
    check_tensors(config, weights, files.path)
    half = torch.float32 if dtype == "fp32" else torch.bfloat16
    native_ops = kernels is not None and supports_head_size(config.head_size)

    def read(name: str) -> torch.Tensor:
        tensor = weights(name)
        if not isinstance(weights, GgufWeights):  # which checks them itself
            _check_finite(tensor, f"{files.path}: {name}", kernels)
        return tensor

    def make_one(names: Sequence[str], bias: torch.Tensor | None, gate: Gate | None) -> LinearLayer:
        fused_gate = gate if native_ops else None
        if gguf is not None and (blocks := _matching_blocks(gguf, names, gate is not None)):
            assert kernels is not None  # checked by choose_dtype
            return BlockLinear(kernels, blocks, bias, gate=fused_gate)
        if dtype in ("int8", "gguf"):
            assert kernels is not None
            stored = [_stored_tensor(weights, name, files.path) for name in names]
            return Int8Linear(kernels, stored, bias, gate=fused_gate)
        weight = torch.cat([read(name) for name in names])
        return DenseLinear(kernels, weight, bias, half) if kernels is not None else TorchLinear(weight, bias, half)

    def make_linear(
        names: Sequence[str], bias: torch.Tensor | None, *, gate: Gate | None = None, apart: bool = False
    ) -> LinearLayer:
        if gguf is not None and apart:
            stay = [gguf.blocks(name) is not None for name in names]
            if any(stay) and not all(stay):
                return JoinedLinear([make_one([name], None, None) for name in names])
        return make_one(names, bias, gate)

    def make_exact(name: str, bias: str | None) -> LinearLayer:
        weight, offset = read(name), read(bias) if bias else None
        if kernels is None:
            return TorchLinear(weight, offset, torch.float32)
        return DenseLinear(kernels, weight, offset, torch.float32)

    done = 0

    def report_progress() -> None:
        nonlocal done
        done += 1
        if progress:
            progress(done, config.layers + 1)

    if progress:
        progress(0, config.layers + 1)
    head = make_linear([EMBEDDING if config.tied else "lm_head.weight"], None)
    if config.tied and isinstance(head, BlockLinear):
        embedding: Embedding = BlockEmbedding(head)
    else:
        embedding = _load_embedding(weights, read, kernels, half, blocks=dtype == "gguf")
    report_progress()
    attention = load_attention_tensors(config, read, length)
    ops: CpuOps = TorchOps(config, attention)
    if kernels is not None and native_ops:
        ops = NativeOps(kernels, config, attention)
    layers = load_layers(config, read, make_linear, make_exact, ops, kernels, report_progress)
    parts = embedding, layers, read("model.norm.weight").float(), head
    decoder: Model
    if isinstance(ops, NativeOps) and can_fuse(layers):
        decoder = FusedDecoder(config, ops, *parts)
    else:
        decoder = Decoder(config, ops, *parts)
    states = None
    if config.delta_net is not None:
        states = StateShape(sum(config.linear), config.delta_net, torch.device("cpu"))
    return decoder, CacheShape(config.attention_layers, config.kv_heads, config.head_size, half, states)


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
