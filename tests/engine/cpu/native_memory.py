"""Cases that may end their process: a program, `python -m tests.engine.cpu.native_memory CASE VARIANT`."""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from syringa.engine.cpu.layers.linear import BlockEmbedding, BlockLinear, BlockTensor, Int8Linear, NativeLinear
from syringa.engine.cpu.native import BLOCK_TYPES, FOLDER, Kernels
from tests.engine.gguf_blocks import block_size, random_blocks

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


_guards: list[mmap.mmap] = []


def guarded(data: np.ndarray) -> np.ndarray:
    """Return a copy whose last byte is followed by a page that cannot be read."""
    page = mmap.PAGESIZE
    size = -(-data.nbytes // page) * page
    memory = mmap.mmap(-1, size + page)
    _guards.append(memory)  # stays mapped
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    library = ctypes.CDLL(None, use_errno=True)
    if library.mprotect(ctypes.c_void_p(address + size), ctypes.c_size_t(page), 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    copy = np.frombuffer((ctypes.c_uint8 * data.nbytes).from_address(address + size - data.nbytes), np.uint8)
    copy[:] = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    return copy


def guarded_rows(rows: int, inputs: int) -> torch.Tensor:
    return torch.from_numpy(guarded(np.ones((rows, inputs), np.float32)).view(np.float32).reshape(rows, inputs))


def read_all(kernels: Kernels, tensor: BlockTensor) -> None:
    tensor.check(kernels)
    for dtype in (torch.float32, torch.bfloat16):
        tensor.dequantize(kernels, dtype)
    layers: list[NativeLinear] = [Int8Linear(kernels, [tensor], None)]
    if tensor.type in BLOCK_TYPES:
        layers.append(BlockLinear(kernels, [tensor], None))
        BlockEmbedding(layers[-1])[torch.arange(tensor.rows)]
    for layer in layers:
        for rows in (1, 3):
            layer(guarded_rows(rows, tensor.inputs), add_to=guarded_rows(rows, tensor.rows))


@case
def overread(kernels: Kernels) -> None:
    """Tensors, inputs and outputs are flush against a page that cannot be read."""
    for type_name in BLOCK_TYPES:
        for rows, blocks in ((1, 1), (33, 3)):
            inputs = blocks * block_size(type_name)[0]
            data = guarded(random_blocks(type_name, rows, inputs))
            read_all(kernels, BlockTensor("w", type_name, rows, inputs, data))
    for type_name, dtype in (("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)):
        for rows, inputs in ((1, 1), (3, 33), (33, 130)):
            data = guarded(torch.ones(rows, inputs, dtype=dtype).view(torch.uint8).numpy())
            read_all(kernels, BlockTensor("w", type_name, rows, inputs, data))


HUGE = 64 << 20


def advised_huge_pages() -> int:
    """Return the bytes on huge pages in mappings for which a program has asked for them."""
    total = found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            found = int(line.split()[1]) << 10
        elif line.startswith("VmFlags:") and "hg" in line.split():
            total += found
    return total


@case
def huge_pages(kernels: Kernels) -> None:
    """Weights are on huge pages where other memory for which they are asked for is."""
    other = mmap.mmap(-1, HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    other.madvise(mmap.MADV_HUGEPAGE)
    other.write(bytes(HUGE))
    before = advised_huge_pages()
    layer = Int8Linear(kernels, torch.ones(4096, HUGE // 4096), None)
    gained = advised_huge_pages() - before
    if before > HUGE // 2 and gained < HUGE // 2:
        raise AssertionError(f"{gained} bytes of {layer.outputs} rows are on huge pages")


if __name__ == "__main__":
    name, variant = sys.argv[1:]
    torch.set_num_threads(1)
    CASES[name](Kernels(variant, ctypes.CDLL(str(FOLDER / f"kernels_{variant}.so")), 3))
