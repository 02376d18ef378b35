# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Batch-invariant matmul: a row gets the same bits regardless of the number of rows.

Every output is accumulated from its first input to its last, sixteen at a time by the tensor cores, and never split
among programs. Tile sizes are therefore free: those of `skinny` for few rows, larger ones for many. That tensor cores
sum in the same order for every tile shape is checked when a model is loaded (`batch_invariant_check`); Hopper's do.

GPUs of data centers from Hopper on load tiles by tensor descriptors, which takes 0.8 of the time. On others, Triton
does not load them ahead, so the tiles are loaded by pointers.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from syringa.engine.gpu.kernels.launch import has_large_shared_memory
from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig, skinny
from syringa.engine.gpu.ops.linear import SKINNY_ROWS

DESCRIPTOR_ALIGNMENT = 16  # bytes: of the first row and between rows


class TiledMatmulConfig(NamedTuple):
    rows: int  # per tile
    outputs: int
    inputs: int  # per iteration
    warps: int
    stages: int
    group: int = 8  # row tiles per group: programs of a group share the weights they read
    resident: int = 0  # with descriptors: programs per multiprocessor, each of which computes tiles in a loop


# Configuration → least number of tiles for which it is used, as measured on an H200 for Qwen3-0.6B and 8B.
DESCRIBED_CONFIGS = {
    TiledMatmulConfig(128, 256, 64, 8, 3, resident=1): 256,
    TiledMatmulConfig(128, 128, 64, 4, 5, resident=1): 96,
    TiledMatmulConfig(64, 64, 64, 4, 6, resident=2): 133,
    TiledMatmulConfig(64, 64, 128, 4, 5, resident=1): 0,
}
TILED_CONFIGS = {
    TiledMatmulConfig(128, 128, 64, 4, 4): 96,
    TiledMatmulConfig(64, 128, 64, 4, 4): 120,
    TiledMatmulConfig(64, 64, 64, 4, 6): 120,
    TiledMatmulConfig(64, 32, 128, 4, 4): 0,
}


@triton.jit(do_not_specialize=["M"])
def _described_matmul_kernel(
    x,  # tensor descriptors of [M, K] and [N, K]
    w,
    bias_ptr,
    out,  # a tensor descriptor of [M, N], or a pointer
    out_stride,
    M,
    N,
    K,
    BIAS: tl.constexpr,
    DESCRIBED_OUT: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at most M
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    HALVES: tl.constexpr,  # store a tile in two halves, which takes less shared memory
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # One loop over tiles and inputs: the inputs of the next tile are loaded while one is stored.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        # Grouped ordering: programs that run together share rows and weights, which then come from the L2 cache.
        group = tile // (GROUP_M * tiles_n)
        group_height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        index_in_group = tile % (GROUP_M * tiles_n)
        m = (group * GROUP_M + index_in_group % group_height) * BLOCK_M
        m = tl.minimum(m, M - BLOCK_M)  # computing some rows twice is faster than loading beyond the end
        n = index_in_group // group_height * BLOCK_N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            acc = tl.dot(x.load([m, k]), w.load([n, k]).T, acc)
        if HALVES:
            low, high = acc.reshape([BLOCK_M, 2, BLOCK_N // 2]).permute(0, 2, 1).split()
            _store(low, bias_ptr, out, out_stride, m, n, N, BIAS, DESCRIBED_OUT)
            _store(high, bias_ptr, out, out_stride, m, n + BLOCK_N // 2, N, BIAS, DESCRIBED_OUT)
        else:
            _store(acc, bias_ptr, out, out_stride, m, n, N, BIAS, DESCRIBED_OUT)


@triton.jit
def _store(tile, bias_ptr, out, out_stride, m, n, N, BIAS: tl.constexpr, DESCRIBED: tl.constexpr):
    columns = n + tl.arange(0, tile.shape[1])
    if BIAS:
        tile += tl.load(bias_ptr + columns, columns < N, 0.0).to(tl.float32)[None, :]
    if DESCRIBED:
        out.store([m, n], tile.to(out.dtype))
    else:
        rows = (m + tl.arange(0, tile.shape[0])).to(tl.int64)
        tl.store(
            out + rows[:, None] * out_stride + columns[None, :], tile.to(out.dtype.element_ty), (columns < N)[None, :]
        )


@triton.jit(do_not_specialize=["M"])
def _tiled_matmul_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    out_stride,
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    # Grouped ordering: consecutive programs share rows and weights, which then come from the L2 cache.
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    group_height = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    index_in_group = tl.program_id(0) % (GROUP_M * tiles_n)
    m = (group * GROUP_M + index_in_group % group_height) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = index_in_group // group_height * BLOCK_N + tl.arange(0, BLOCK_N)
    k_offsets = tl.arange(0, BLOCK_K)
    # Out-of-range rows and outputs are computed and not stored.
    rows = x_ptr + tl.where(m < M, m, 0).to(tl.int64)[:, None] * x_stride + k_offsets[None, :]
    weights = w_ptr + tl.where(n < N, n, 0).to(tl.int64)[None, :] * K + k_offsets[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            x = tl.load(rows + k)
            w = tl.load(weights + k)
        else:
            x = tl.load(rows + k, (k + k_offsets)[None, :] < K, 0.0)
            w = tl.load(weights + k, (k + k_offsets)[:, None] < K, 0.0)
        acc = tl.dot(x, w, acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def batch_invariant_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: SkinnyConfig | TiledMatmulConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`. `x`: `[rows, inputs]`; `weight`: `[outputs, inputs]`; rows are contiguous.

    A given configuration with descriptors has at most as many rows as `x`.
    """
    outputs, inputs = weight.shape
    out = x.new_empty(len(x), outputs) if out is None else out
    if not len(x):
        return out
    if config is None:
        config = choose_config(len(x), outputs, described=loads_by_descriptors(weight))
    if isinstance(config, SkinnyConfig):
        skinny(x, weight, bias, False, None, out, config, pdl)
        return out
    if config.resident:
        _multiply_described(x, weight, bias, out, config)
        return out
    tiles = triton.cdiv(len(x), config.rows) * triton.cdiv(outputs, config.outputs)
    _tiled_matmul_kernel[(tiles,)](
        x,
        weight,
        x if bias is None else bias,
        out,
        len(x),
        outputs,
        inputs,
        x.stride(0),
        out.stride(0),
        EVEN_K=inputs % config.inputs == 0,
        BIAS=bias is not None,
        BLOCK_M=config.rows,
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        STAGES=config.stages,
        GROUP_M=config.group,
        num_warps=config.warps,
    )
    return out


def _multiply_described(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, config: TiledMatmulConfig
) -> None:
    outputs, inputs = weight.shape
    halves = config.outputs > 128
    described = has_aligned_rows(out)
    out_block = [config.rows, config.outputs // 2 if halves else config.outputs]
    tiles = triton.cdiv(len(x), config.rows) * triton.cdiv(outputs, config.outputs)
    _described_matmul_kernel[(min(tiles, config.resident * _num_processors()),)](
        TensorDescriptor.from_tensor(x, [config.rows, config.inputs]),
        TensorDescriptor.from_tensor(weight, [config.outputs, config.inputs]),
        x if bias is None else bias,
        TensorDescriptor.from_tensor(out, out_block) if described else out,
        out.stride(0),
        len(x),
        outputs,
        inputs,
        BIAS=bias is not None,
        DESCRIBED_OUT=described,
        BLOCK_M=config.rows,
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        STAGES=config.stages,
        GROUP_M=config.group,
        HALVES=halves,
        num_warps=config.warps,
    )


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether tensor descriptors can load and store the rows of a matrix."""
    return not (x.data_ptr() | x.stride(0) * x.element_size()) % DESCRIPTOR_ALIGNMENT


def choose_config(rows: int, outputs: int, *, described: bool) -> SkinnyConfig | TiledMatmulConfig:
    """Return the largest tiles that give enough programs, as measured on an H200 for Qwen3-0.6B and 8B."""
    if rows > SKINNY_ROWS:
        return next(
            config
            for config, least in (DESCRIBED_CONFIGS if described else TILED_CONFIGS).items()
            if (config.rows <= rows or not described)
            and triton.cdiv(rows, config.rows) * triton.cdiv(outputs, config.outputs) >= least
        )
    if outputs > 32768:
        return SkinnyConfig(128, 64, 4, 5)
    return SkinnyConfig(16, 256, 2, 6) if rows <= 16 and outputs <= 4096 else SkinnyConfig(64, 128, 4, 4)


def loads_by_descriptors(weight: torch.Tensor) -> bool:
    """Return whether products with these weights use `DESCRIBED_CONFIGS` instead of `TILED_CONFIGS`."""
    return has_large_shared_memory() and has_aligned_rows(weight)


@cache
def _num_processors() -> int:
    # Without a GPU, the interpreter: few, so that programs compute several tiles.
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 2
