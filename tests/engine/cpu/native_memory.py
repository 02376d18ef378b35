"""Cases that may end their process: a program, `python -m tests.engine.cpu.native_memory CASE VARIANT`."""

from __future__ import annotations

import ctypes
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from syringa.engine.cpu.layers.linear import BlockTensor, Int8Linear
from syringa.engine.cpu.native import FOLDER, Kernels

CASES: dict[str, Callable[[Kernels], None]] = {}


def case(function: Callable[[Kernels], None]) -> Callable[[Kernels], None]:
    CASES[function.__name__] = function
    return function


@contextmanager
def more_memory(size: int) -> Iterator[None]:
    """Limit this process to so many bytes more than it has."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


ROWS, INPUTS = 64, 9 << 20  # a multiple of every panel, and a row that the C library does not keep memory for
SPARE = 8 << 20  # bytes, less than a row


def one_row(rows: int) -> BlockTensor:
    """Return a large tensor whose rows are one and the same."""
    return BlockTensor("w", "BF16", rows, INPUTS, np.zeros(INPUTS * 2, np.uint8), np.zeros(rows, np.int32))


def expect_memory_error(kernels: Kernels, size: int, body: Callable[[], object]) -> None:
    with more_memory(size):
        try:
            body()
        except MemoryError:
            pass
        else:
            raise AssertionError("the memory was enough")
    weights, x = torch.randn(200, 64), torch.randn(3, 64)
    assert torch.allclose(Int8Linear(kernels, weights, None)(x), x @ weights.T, atol=1.0)  # the threads go on


@case
def quantize(kernels: Kernels) -> None:
    """The weights fit, and the row that a thread dequantizes does not."""
    tensor = one_row(ROWS)
    expect_memory_error(kernels, ROWS * INPUTS + SPARE, lambda: Int8Linear(kernels, [tensor], None))


@case
def read(kernels: Kernels) -> None:
    tensor = one_row(ROWS)
    expect_memory_error(kernels, 2 * ROWS * INPUTS + SPARE, lambda: tensor.dequantize(kernels, torch.bfloat16))


if __name__ == "__main__":
    name, variant = sys.argv[1:]
    torch.set_num_threads(1)
    CASES[name](Kernels(variant, ctypes.CDLL(str(FOLDER / f"kernels_{variant}.so")), 3))
