"""KV cache tensors on the GPU. `scheduling.kv_cache` decides which sequence owns which block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.models.state_cache import StateShape, StateTensors

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


@dataclass(frozen=True)
class GpuCacheShape:
    """Shape, dtype and device of a KV cache, without its number of blocks."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype
    device: torch.device
    states: StateShape | None = None  # of a hybrid model

    @property
    def bytes_per_block(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * BLOCK_SIZE * self.dtype.itemsize

    def allocate(self, blocks: int, states: StateTensors | None = None) -> GpuCache:
        return GpuCache(self, blocks, states)


class GpuCache:
    """Paged keys and values of all layers. Uninitialized: slots are written before they are read."""

    def __init__(self, shape: GpuCacheShape, blocks: int, states: StateTensors | None = None) -> None:
        size = (shape.layers, blocks, shape.kv_heads, BLOCK_SIZE, shape.head_size)
        self.keys = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.values = torch.empty(size, dtype=shape.dtype, device=shape.device)
        self.layers = list(zip(self.keys, self.values, strict=True))
        self.states = states

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer."""
        if not pairs:
            return
        # A non-blocking copy: `torch.tensor(…, device=…)` would wait for all queued work.
        sources, targets = torch.tensor(pairs).T.contiguous().to(self.keys.device, non_blocking=True)
        for tensor in (self.keys, self.values):
            raw = tensor.view(torch.uint8)  # these operations do not know FP8
            raw.index_copy_(1, targets, raw.index_select(1, sources))


def store_tokens(cache: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows `[tokens, kv_heads, size]` to their slots in a layer's keys or values. FP8 saturates."""
    if cache.dtype == FP8:
        rows = rows.float().clamp(-FP8_MAX, FP8_MAX)
    cache.view(torch.uint8)[blocks, :, offsets] = rows.to(cache.dtype).contiguous().view(torch.uint8)
