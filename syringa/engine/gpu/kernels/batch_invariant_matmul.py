# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Rows times a weight matrix, to the same bits for a row however many others there are.

A sum's bits depend on its order. Here every output is added up from its first input to its last, sixteen at a time by
the matrix units, and never in parts that other programs have: that leaves the tiles free, `skinny`'s for few rows and
larger ones for many. Whether a GPU's units add up the same way for tiles of every shape is tried out when a model is
loaded (`steady_check`); Hopper's do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig, skinny
from syringa.engine.gpu.ops.linear import SKINNY_ROWS


class WideConfig(NamedTuple):
    rows: int  # per program
    outputs: int
    inputs: int  # per round
    warps: int
    stages: int
    band: int = 8  # tiles of rows that share the weights they read


# Each with how many programs are enough of it.
WIDE = {
    WideConfig(128, 128, 64, 4, 4): 96,
    WideConfig(64, 128, 64, 4, 4): 120,
    WideConfig(64, 64, 64, 4, 6): 120,
    WideConfig(64, 32, 128, 4, 4): 0,
}


@triton.jit(do_not_specialize=["M"])
def _wide_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    M,
    N,
    K,
    x_stride,
    out_stride,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BAND: tl.constexpr,
):
    # Programs that run together take a band of rows and walk along the outputs, so that both are read from the cache.
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    high = tl.minimum(tiles_m - band * BAND, BAND)
    within = tl.program_id(0) % (BAND * tiles_n)
    m = (band * BAND + within % high) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = within // high * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    # What lies beyond is computed and thrown away.
    rows = x_ptr + tl.where(m < M, m, 0).to(tl.int64)[:, None] * x_stride + step[None, :]
    weights = w_ptr + tl.where(n < N, n, 0).to(tl.int64)[None, :] * K + step[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if EVEN:
            x = tl.load(rows + k)
            w = tl.load(weights + k)
        else:
            x = tl.load(rows + k, (k + step)[None, :] < K, 0.0)
            w = tl.load(weights + k, (k + step)[:, None] < K, 0.0)
        total = tl.dot(x, w, total)
    if BIAS:
        total += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    out = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: SkinnyConfig | WideConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`x`: `[rows, inputs]`, its rows contiguous; `weight`: `[outputs, inputs]`, contiguous. `config`: other tiles."""
    outputs, inputs = weight.shape
    out = x.new_empty(len(x), outputs) if out is None else out
    if not len(x):
        return out
    config = choose(len(x), outputs) if config is None else config
    if isinstance(config, SkinnyConfig):
        skinny(x, weight, bias, False, None, out, config, pdl)
        return out
    tiles = triton.cdiv(len(x), config.rows) * triton.cdiv(outputs, config.outputs)
    _wide_kernel[(tiles,)](
        x,
        weight,
        x if bias is None else bias,
        out,
        len(x),
        outputs,
        inputs,
        x.stride(0),
        out.stride(0),
        EVEN=inputs % config.inputs == 0,
        BIAS=bias is not None,
        BLOCK_M=config.rows,
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        STAGES=config.stages,
        BAND=config.band,
        num_warps=config.warps,
    )
    return out


def choose(rows: int, outputs: int) -> SkinnyConfig | WideConfig:
    """By what was measured on an H200 for Qwen3-0.6B and 8B: the largest tiles of which there are enough."""
    if rows > SKINNY_ROWS:
        tiles = (triton.cdiv(rows, config.rows) * triton.cdiv(outputs, config.outputs) for config in WIDE)
        return next(config for config, found in zip(WIDE, tiles, strict=True) if found >= WIDE[config])
    if outputs > 32768:
        return SkinnyConfig(128, 64, 4, 5)
    return SkinnyConfig(16, 256, 2, 6) if rows <= 16 and outputs <= 4096 else SkinnyConfig(64, 128, 4, 4)
