# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Batch-invariant matmul: a row gets the same bits regardless of the number of rows.

Every output is accumulated from its first input to its last, sixteen at a time by the tensor cores, and never split
among programs. Tile sizes are therefore free: those of `skinny` for few rows, larger ones for many. That tensor cores
sum in the same order for every tile shape is checked when a model is loaded (`batch_invariant_check`); Hopper's do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig, skinny
from syringa.engine.gpu.ops.linear import SKINNY_ROWS


class TiledMatmulConfig(NamedTuple):
    rows: int  # per program
    outputs: int
    inputs: int  # per iteration
    warps: int
    stages: int
    group: int = 8  # row tiles per group: programs of a group share the weights they read


# Configuration → least number of programs for which it is used.
TILED_CONFIGS = {
    TiledMatmulConfig(128, 128, 64, 4, 4): 96,
    TiledMatmulConfig(64, 128, 64, 4, 4): 120,
    TiledMatmulConfig(64, 64, 64, 4, 6): 120,
    TiledMatmulConfig(64, 32, 128, 4, 4): 0,
}


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
    """Return `x @ weight.T + bias`. `x`: `[rows, inputs]`; `weight`: `[outputs, inputs]`; rows are contiguous."""
    outputs, inputs = weight.shape
    out = x.new_empty(len(x), outputs) if out is None else out
    if not len(x):
        return out
    config = choose_config(len(x), outputs) if config is None else config
    if isinstance(config, SkinnyConfig):
        skinny(x, weight, bias, False, None, out, config, pdl)
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


def choose_config(rows: int, outputs: int) -> SkinnyConfig | TiledMatmulConfig:
    """Return the largest tiles that give enough programs, as measured on an H200 for Qwen3-0.6B and 8B."""
    if rows > SKINNY_ROWS:
        tiles = (triton.cdiv(rows, config.rows) * triton.cdiv(outputs, config.outputs) for config in TILED_CONFIGS)
        return next(
            config for config, found in zip(TILED_CONFIGS, tiles, strict=True) if found >= TILED_CONFIGS[config]
        )
    if outputs > 32768:
        return SkinnyConfig(128, 64, 4, 5)
    return SkinnyConfig(16, 256, 2, 6) if rows <= 16 and outputs <= 4096 else SkinnyConfig(64, 128, 4, 4)
