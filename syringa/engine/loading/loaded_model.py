"""What loading takes and returns: its options, the loaded model, and the sizes of its caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.native import Kernels
from syringa.engine.loading.memory_plan import MemoryPlan
from syringa.engine.models.decoder import Model
from syringa.engine.models.state_cache import StateShape, StateTensors
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.state_cache import count_slots
from syringa.modelfiles import ModelDescription
from syringa.types import ModelInfo

if TYPE_CHECKING:  # vision needs the extra `syringa[models]`
    from syringa.engine.gpu.cache import GpuCacheShape
    from syringa.engine.gpu.model import GpuModel
    from syringa.engine.scheduling.limits import SchedulerLimits
    from syringa.engine.vision.preprocessor import VisionComponents

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
