"""The KV cache tensors on a CPU. Block ownership is managed by `scheduling.kv_cache`."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING, NamedTuple

import torch

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.models.state_cache import StateTensors


class LayerCache(NamedTuple):
    """Keys and values of one layer, in pairs for bfloat16 dot products. See native/attention.h."""

    keys: torch.Tensor  # [blocks, kv_heads, size / 2, BLOCK_SIZE, 2]
    values: torch.Tensor  # [blocks, kv_heads, BLOCK_SIZE / 2, size, 2]


def write_cache(cache: LayerCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values, `[tokens, kv_heads, size]`, to cache slots."""
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    cache.keys[blocks, :, :, offsets] = k.to(cache.keys.dtype).unflatten(-1, (-1, 2))
    cache.values[blocks, :, offsets // 2, :, offsets % 2] = v.to(cache.values.dtype)
    # Values are read in pairs: clear the other half of a pair that no token follows, because it may hold NaN.
    followed = torch.zeros_like(slots, dtype=torch.bool)
    followed[:-1] = slots[1:] == slots[:-1] + 1
    alone = (offsets % 2 == 0) & ~followed
    cache.values[blocks[alone], :, offsets[alone] // 2, :, 1] = 0


def read_cache(cache: LayerCache, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `count` keys, `[kv_heads, size, count]`, and values, `[kv_heads, count, size]`, in fp32."""
    keys, values = cache.keys[table], cache.values[table]
    k = keys.permute(1, 2, 4, 0, 3).flatten(3).flatten(1, 2)
    v = values.permute(1, 0, 2, 4, 3).flatten(1, 3)
    return k[:, :, :count].float(), v[:, :count].float()


class CacheTensors:
    """Keys and values of every layer. Memory is allocated by the system when blocks are first written."""

    def __init__(
        self,
        layers: int,
        blocks: int,
        kv_heads: int,
        size: int,
        dtype: torch.dtype,
        states: StateTensors | None = None,
    ) -> None:
        self.keys = lazy_zeros((layers, blocks, kv_heads, size // 2, BLOCK_SIZE, 2), dtype)
        self.values = lazy_zeros((layers, blocks, kv_heads, BLOCK_SIZE // 2, size, 2), dtype)
        self.layers = [LayerCache(self.keys[i], self.values[i]) for i in range(layers)]
        self.states = states  # of a hybrid model

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (source, target) blocks in every layer."""
        if not pairs:
            return
        sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
        self.keys[:, targets] = self.keys[:, sources]
        self.values[:, targets] = self.values[:, sources]

    @staticmethod
    def bytes_per_block(layers: int, kv_heads: int, size: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * size * BLOCK_SIZE * dtype.itemsize


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros that use no memory until they are written, then huge pages if available.

    `torch.zeros` would write all of them. Small pages cost a page fault every few tokens and a third of the bandwidth.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
