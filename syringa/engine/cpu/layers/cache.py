"""The tensors that hold keys and values. Which block belongs to whom is `kv_cache`'s business."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import NamedTuple

import torch

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE


class LayerCache(NamedTuple):
    """In pairs, because that is what bfloat16 products take. See native/attention.h."""

    keys: torch.Tensor  # [blocks, kv_heads, size / 2, BLOCK_SIZE, 2]
    values: torch.Tensor  # [blocks, kv_heads, BLOCK_SIZE / 2, size, 2]


def write_cache(cache: LayerCache, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """`k`, `v`: `[tokens, kv_heads, size]`."""
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    cache.keys[blocks, :, :, offsets] = k.to(cache.keys.dtype).unflatten(-1, (-1, 2))
    cache.values[blocks, :, offsets // 2, :, offsets % 2] = v.to(cache.values.dtype)
    # The other half of a pair is read with it, so it must be a number even where no token has come yet.
    followed = torch.zeros_like(slots, dtype=torch.bool)
    followed[:-1] = slots[1:] == slots[:-1] + 1
    alone = (offsets % 2 == 0) & ~followed
    cache.values[blocks[alone], :, offsets[alone] // 2, :, 1] = 0


def read_cache(cache: LayerCache, table: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` keys, `[kv_heads, size, count]`, and values, `[kv_heads, count, size]`, in fp32."""
    keys, values = cache.keys[table], cache.values[table]
    k = keys.permute(1, 2, 4, 0, 3).flatten(3).flatten(1, 2)
    v = values.permute(1, 0, 2, 4, 3).flatten(1, 3)
    return k[:, :, :count].float(), v[:, :count].float()


class CacheTensors:
    """Keys and values of every layer. Memory is touched only as blocks come into use."""

    def __init__(self, layers: int, blocks: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
        self.keys = _untouched((layers, blocks, kv_heads, size // 2, BLOCK_SIZE, 2), dtype)
        self.values = _untouched((layers, blocks, kv_heads, BLOCK_SIZE // 2, size, 2), dtype)
        self.layers = [LayerCache(self.keys[i], self.values[i]) for i in range(layers)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies (source, target) blocks in every layer."""
        if not pairs:
            return
        sources, targets = [s for s, _ in pairs], [t for _, t in pairs]
        self.keys[:, targets] = self.keys[:, sources]
        self.values[:, targets] = self.values[:, sources]

    @staticmethod
    def bytes_per_block(layers: int, kv_heads: int, size: int, dtype: torch.dtype) -> int:
        return 2 * layers * kv_heads * size * BLOCK_SIZE * dtype.itemsize


def _untouched(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take no memory until they are written, then in large pages where the system has them.

    `torch.zeros` would write them all. Small pages cost a fault for every few tokens, and a third of the bandwidth.
    """
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
