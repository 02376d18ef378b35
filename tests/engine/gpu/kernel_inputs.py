"""Random inputs and paged caches for kernel tests, and tolerances against references.

Mostly fp32: the interpreter does not multiply bf16 matrices, and truncates where the hardware rounds. Logic errors of a
kernel then exceed the tolerance by orders of magnitude. bench/gpu_kernels.py checks bf16 on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from syringa.engine.sampling import draw

FP32_TOLERANCE = 2e-6
BF16_TOLERANCE = 8e-3  # of the interpreter, which truncates

# heads, kv_heads, size, block, window
ATTENTION_SHAPES = [
    pytest.param(4, 2, 64, 16, 0, id="grouped"),
    pytest.param(16, 1, 32, 16, 0, id="sixteen-share-one"),
    pytest.param(2, 2, 96, 16, 0, id="size-96"),
    pytest.param(2, 1, 256, 16, 0, id="size-256"),
    pytest.param(4, 2, 64, 16, 20, id="window"),
    pytest.param(4, 2, 64, 32, 1, id="window-of-one"),
    pytest.param(4, 2, 64, 8, 45, id="small-blocks"),
]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def nan_filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return an output tensor in which elements that a kernel does not write stay NaN."""
    return torch.full(shape, float("nan"), dtype=dtype)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error by norm, infinite if a value is not finite."""
    a, b = out.double(), expected.double()
    return float("inf") if not bool(a.isfinite().all()) else float((a - b).norm() / b.norm())


def dequantize_rows(rows: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """Return what rows in FP8 stand for. Arguments as `fp8.quantize_rows` returns them, and as it takes the group."""
    width = rows.shape[1]
    return rows.float() * scales.T.repeat_interleave(group or width, 1)[: len(rows), :width]


class PagedCache:
    """Keys and values of sequences of the given lengths, blocks in random order; unused slots are NaN."""

    def __init__(self, lengths: Sequence[int], kv_heads: int, size: int, block: int = 16, seed: int = 1) -> None:
        counts = [-(-n // block) for n in lengths]
        total = sum(counts) + 2
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
        self.keys, self.values = nan_filled(total, kv_heads, block, size), nan_filled(total, kv_heads, block, size)
        # Padding of a block table is no valid block and must not be read.
        self.tables = torch.full((len(lengths), max(counts, default=0) + 3), 1 << 30, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.block = block
        for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            self.tables[s, :count] = torch.tensor(blocks, dtype=torch.int32)
            for i in range(length):
                index = blocks[i // block], slice(None), i % block
                self.keys[index] = random(kv_heads, size, seed=seed + 31 * s + 7 * i)
                self.values[index] = random(kv_heads, size, seed=seed + 31 * s + 7 * i + 3)

    def slot(self, sequence: int, position: int) -> int:
        return int(self.tables[sequence, position // self.block]) * self.block + position % self.block


def sampling_keys(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.arange(rows)
    return index * 7919 - 50, (index % 3).int(), (index * 5).int()


def cpu_uniforms(keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(draw.uniforms(*(part.tolist() for part in keys)))
