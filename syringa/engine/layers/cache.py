"""The tensors that hold keys and values. Which block belongs to whom is `kv_cache`'s business."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

BLOCK_SIZE = 16


class LayerCache(NamedTuple):
    keys: torch.Tensor  # [blocks, kv_heads, size, BLOCK_SIZE]: transposed, so that one vector holds sixteen keys
    values: torch.Tensor  # [blocks, kv_heads, BLOCK_SIZE, size]


class CacheTensors:
    """Keys and values of every layer. Memory is touched only as blocks come into use."""

    def __init__(self, layers: int, blocks: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
        self.keys = _untouched((layers, blocks, kv_heads, size, BLOCK_SIZE), dtype)
        self.values = _untouched((layers, blocks, kv_heads, BLOCK_SIZE, size), dtype)
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
    """Zeros that take no memory until they are written. `torch.zeros` would write them all."""
    bits = np.zeros(shape, dtype={1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize])
    return torch.from_numpy(bits).view(dtype)
