"""Small models on the GPU's decoder: on a GPU where there is one, else on the CPU by the kernels' references."""

from __future__ import annotations

from pathlib import Path

import torch

from syringa.engine.gpu.cache import GpuCache, GpuCacheShape
from syringa.engine.gpu.ops.base import Ops
from syringa.engine.loading.loader import LoadedModel, assemble
from syringa.engine.loading.weights import open_weights
from syringa.engine.models.config import read_config
from syringa.modelfiles import describe, locate

CPU = torch.device("cpu")


def load_small(folder: Path, dtype: str = "fp32", device: torch.device = CPU, ops: Ops | None = None) -> LoadedModel:
    files = locate(str(folder))
    description = describe(files)
    weights = open_weights(files, description.config)
    length = description.max_model_len
    return assemble(read_config(description.config), description, weights, device, dtype, length, 0.0, ops=ops)


def poisoned_cache(shape: GpuCacheShape, blocks: int) -> GpuCache:
    """One in which whatever nobody wrote is no number."""
    cache = GpuCache(shape, blocks)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    return cache
