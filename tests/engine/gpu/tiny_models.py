"""Tiny models on the GPU decoder, on the CPU with the reference operations unless a device is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from syringa.engine.gpu.cache import GpuCache, GpuCacheShape
from syringa.engine.gpu.decoder import GpuExperts
from syringa.engine.gpu.ops.base import GpuOps
from syringa.engine.loading.gpu_model import load_native_on_gpu
from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.loading.weights import open_weights
from syringa.engine.models.config import read_config
from syringa.engine.models.state_cache import StateTensors
from syringa.modelfiles import describe, locate

CPU = torch.device("cpu")


def load_tiny_gpu_model(
    folder: Path | str, dtype: str = "fp32", device: torch.device = CPU, ops: GpuOps | None = None
) -> LoadedModel:
    files = locate(str(folder))
    description = describe(files)
    weights = open_weights(files, description.config)
    length = description.max_model_len
    return load_native_on_gpu(
        read_config(description.config), description, weights, device, dtype, length, 0.0, ops=ops
    )


def load_stored_gpu_model(folder: Path | str, ops: GpuOps | None = None) -> LoadedModel:
    """Load a folder on the GPU decoder with its weights as they are stored, and activations in fp32."""
    files = locate(str(folder))
    description = describe(files)
    weights, config = open_weights(files, description.config), read_config(description.config)
    length = description.max_model_len
    return load_native_on_gpu(
        config, description, weights, CPU, "fp32", length, 0.0, ops=ops, quantized=weights.quantized
    )


def nan_filled_cache(shape: GpuCacheShape, blocks: int, states: StateTensors | None = None) -> GpuCache:
    """Return a cache whose unwritten slots are NaN."""
    cache = GpuCache(shape, blocks, states)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    return cache


def count_bytes(decoder: Any) -> int:
    """Return the bytes of a decoder's weights on a GPU: of its embedding, head, projections, experts and routers."""
    parts: list[Any] = [decoder.embedding, *([] if decoder.head is decoder.embedding else [decoder.head])]
    for layer in decoder.layers:
        mlps = [layer.mlp]
        if isinstance(layer.mlp, GpuExperts):
            parts += [layer.mlp.router.weight, layer.mlp.gate_up, layer.mlp.down]
            mlps = [] if layer.mlp.shared_mlp is None else [layer.mlp.shared_mlp]
        linears = [layer.qkv, layer.out, *([] if layer.gates is None else [layer.gates])]
        linears += [each for mlp in mlps for each in (mlp.gate_up, mlp.down)]
        parts += [linear.weight for linear in linears]
    return sum(part.nbytes for part in parts)
