# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""A few rows (up to 64) times a weight matrix, on the matrix units: still bound by reading the weights.

The weights are the left factor, so that the units' long side lies along them and only the rows are padded. Where a
matrix has too few outputs to fill the chip, several programs share a tile's inputs; the last of them to finish adds the
parts up, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import overlap, prefetch, release, scratch, wait


class SkinnyConfig(NamedTuple):
    outputs: int  # per program
    inputs: int  # per round
    warps: int
    stages: int  # rounds under way
    splits: int = 1  # programs that share a tile's inputs


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    M,
    N,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    SHARE: tl.constexpr,  # inputs per split, a multiple of BLOCK_K
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # cache lines of every row to ask for before the rows to multiply are known
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    step = tl.arange(0, BLOCK_K)
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, K)
    even: tl.constexpr = K % BLOCK_K == 0
    row = tl.where(n < N, n, 0).to(tl.int64)  # what lies beyond is computed and thrown away
    weights = w_ptr + row[:, None] * K + step[None, :]
    others = weights + N.to(tl.int64) * K
    rows = x_ptr + m.to(tl.int64)[None, :] * x_stride + step[:, None]
    known = (m < M)[None, :]
    first = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    second = first
    release(PDL)
    ahead = begin + tl.arange(0, AHEAD)[None, :] * 64
    prefetch(w_ptr + row[:, None] * K + ahead, ahead < end, PDL)
    if GATED:
        prefetch(w_ptr + (row[:, None] + N) * K + ahead, ahead < end, PDL)
    wait(PDL)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if even:
            w = tl.load(weights + k, eviction_policy="evict_first")
            x = tl.load(rows + k, known, 0.0)
        else:
            w = tl.load(weights + k, (k + step)[None, :] < K, 0.0, eviction_policy="evict_first")
            x = tl.load(rows + k, known & ((k + step)[:, None] < K), 0.0)
        first = tl.dot(w, x, first)
        if GATED:
            if even:
                u = tl.load(others + k, eviction_policy="evict_first")
            else:
                u = tl.load(others + k, (k + step)[None, :] < K, 0.0, eviction_policy="evict_first")
            second = tl.dot(u, x, second)

    last = True
    if SPLITS > 1:
        cells = BLOCK_N * BLOCK_M * (2 if GATED else 1)
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        part = parts_ptr + (tile.to(tl.int64) * SPLITS + split) * cells + inner
        tl.store(part, first)
        if GATED:
            tl.store(part + BLOCK_N * BLOCK_M, second)
        tl.debug_barrier()  # every thread's part is written before the arrival is counted
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(arrivals_ptr + tile, 0)  # ready for the next launch
            first = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            second = first
            part = parts_ptr + tile.to(tl.int64) * SPLITS * cells + inner
            for _ in range(SPLITS):
                first += tl.load(part, cache_modifier=".cg")
                if GATED:
                    second += tl.load(part + BLOCK_N * BLOCK_M, cache_modifier=".cg")
                part += cells
    if last:
        if BIAS:
            first += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
            if GATED:
                second += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)[:, None]
        if GATED:
            first = first * tl.sigmoid(first) * second
        inside = known & (n < N)[:, None]
        if RESIDUAL:
            at = residual_ptr + m.to(tl.int64)[None, :] * residual_stride + n[:, None]
            first += tl.load(at, inside, 0.0).to(tl.float32)
        out = out_ptr + m.to(tl.int64)[None, :] * out_stride + n[:, None]
        tl.store(out, first.to(out_ptr.dtype.element_ty), inside)


def skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    config: SkinnyConfig,
    pdl: bool,
) -> None:
    """`linear`'s contract for up to 64 rows, without a norm."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    tiles = triton.cdiv(outputs, config.outputs)
    block = max(16, triton.next_power_of_2(rows))
    share = triton.cdiv(triton.cdiv(inputs, config.splits), config.inputs) * config.inputs
    splits = triton.cdiv(inputs, share)
    cells = tiles * splits * config.outputs * block * (2 if gated else 1) if splits > 1 else 0
    parts, arrivals = scratch(out.device, cells, tiles)
    _skinny_kernel[(tiles, splits)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        parts,
        arrivals,
        rows,
        outputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        K=inputs,
        SHARE=share,
        SPLITS=splits,
        BIAS=bias is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_M=block,
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        STAGES=config.stages,
        AHEAD=min(triton.next_power_of_2(config.stages * config.inputs // 64), 8),
        num_warps=config.warps,
        **overlap(pdl),
    )
