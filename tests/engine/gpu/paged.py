"""Paged caches of random numbers, and how far results may lie from a reference.

Mostly in fp32: the interpreter multiplies no bf16 matrices, and cuts where the hardware rounds. Errors of a kernel's
logic then stand out by orders of magnitude. bench/gpu_kernels.py checks bf16 on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

EXACT = 2e-6  # fp32
CUT = 8e-3  # bf16, as the interpreter makes it


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a kernel forgets to write shows."""
    return torch.full(shape, float("nan"), dtype=dtype)


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, by norm. Infinite for what is not a number."""
    a, b = out.double(), expected.double()
    return float("inf") if not bool(a.isfinite().all()) else float((a - b).norm() / b.norm())


class Paged:
    """Keys and values of sequences of these lengths, in blocks that lie in no order; unused slots hold NaN."""

    def __init__(self, lengths: Sequence[int], kv_heads: int, size: int, block: int = 16, seed: int = 1) -> None:
        counts = [-(-n // block) for n in lengths]
        total = sum(counts) + 2
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        self.keys, self.values = poisoned(total, kv_heads, block, size), poisoned(total, kv_heads, block, size)
        # Padding of a table names no block, and must not be followed.
        self.tables = torch.full((len(lengths), max(counts, default=0) + 3), 1 << 30, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.block = block
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            mine = [order.pop() for _ in range(count)]
            self.tables[s, :count] = torch.tensor(mine, dtype=torch.int32)
            for i in range(length):
                where = mine[i // block], slice(None), i % block
                self.keys[where] = random(kv_heads, size, seed=seed + 31 * s + 7 * i)
                self.values[where] = random(kv_heads, size, seed=seed + 31 * s + 7 * i + 3)

    def slot(self, sequence: int, position: int) -> int:
        return int(self.tables[sequence, position // self.block]) * self.block + position % self.block
