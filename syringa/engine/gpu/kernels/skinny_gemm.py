# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Linear layer of a few rows (up to 64) on tensor cores. Still bound by reading the weights.

The weights are the left operand, so that the long side of the tensor core tile lies along them and only the rows are
padded. Where a matrix has too few outputs to fill the GPU, several programs split the inputs of a tile (split-K); the
last one to finish adds the partial sums, always in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import (
    fit_stages,
    get_workspace,
    pdl_launch_dependents,
    pdl_options,
    pdl_wait,
    prefetch_l2,
)


class SkinnyConfig(NamedTuple):
    outputs: int  # per program
    inputs: int  # per iteration
    warps: int
    stages: int  # iterations in flight
    splits: int = 1  # programs that split a tile's inputs


@triton.jit(do_not_specialize=["M"])
def _skinny_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    M,
    N,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    INPUTS_PER_SPLIT: tl.constexpr,  # a multiple of BLOCK_K
    SPLITS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,  # cache lines of each weight row to prefetch before `pdl_wait`
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k_offsets = tl.arange(0, BLOCK_K)
    begin = split * INPUTS_PER_SPLIT
    end = tl.minimum(begin + INPUTS_PER_SPLIT, K)
    even_k: tl.constexpr = K % BLOCK_K == 0
    row = tl.where(n < N, n, 0).to(tl.int64)  # out-of-range outputs are computed and not stored
    weights = w_ptr + row[:, None] * K + k_offsets[None, :]
    up_weights = weights + N.to(tl.int64) * K
    rows = x_ptr + m.to(tl.int64)[None, :] * x_stride + k_offsets[:, None]
    row_mask = (m < M)[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    pdl_launch_dependents(PDL)
    prefetch_at = begin + tl.arange(0, PREFETCH_LINES)[None, :] * 64
    prefetch_l2(w_ptr + row[:, None] * K + prefetch_at, prefetch_at < end, PDL)
    if GATED:
        prefetch_l2(w_ptr + (row[:, None] + N) * K + prefetch_at, prefetch_at < end, PDL)
    pdl_wait(PDL)
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        if even_k:
            w = tl.load(weights + k, eviction_policy="evict_first")
            x = tl.load(rows + k, row_mask, 0.0)
        else:
            w = tl.load(weights + k, (k + k_offsets)[None, :] < K, 0.0, eviction_policy="evict_first")
            x = tl.load(rows + k, row_mask & ((k + k_offsets)[:, None] < K), 0.0)
        acc = tl.dot(w, x, acc)
        if GATED:
            if even_k:
                w_up = tl.load(up_weights + k, eviction_policy="evict_first")
            else:
                w_up = tl.load(up_weights + k, (k + k_offsets)[None, :] < K, 0.0, eviction_policy="evict_first")
            acc_up = tl.dot(w_up, x, acc_up)

    last = True
    if SPLITS > 1:
        cells = BLOCK_N * BLOCK_M * (2 if GATED else 1)
        tile_offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        part = partials_ptr + (tile.to(tl.int64) * SPLITS + split) * cells + tile_offsets
        tl.store(part, acc)
        if GATED:
            tl.store(part + BLOCK_N * BLOCK_M, acc_up)
        tl.debug_barrier()  # all threads have written their part before the counter is incremented
        last = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counters_ptr + tile, 0)  # ready for the next launch
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            acc_up = acc
            part = partials_ptr + tile.to(tl.int64) * SPLITS * cells + tile_offsets
            for _ in range(SPLITS):
                acc += tl.load(part, cache_modifier=".cg")
                if GATED:
                    acc_up += tl.load(part + BLOCK_N * BLOCK_M, cache_modifier=".cg")
                part += cells
    if last:
        if BIAS:
            acc += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[:, None]
            if GATED:
                acc_up += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)[:, None]
        if GATED:
            acc = acc * tl.sigmoid(acc) * acc_up
        mask = row_mask & (n < N)[:, None]
        if RESIDUAL:
            at = residual_ptr + m.to(tl.int64)[None, :] * residual_stride + n[:, None]
            acc += tl.load(at, mask, 0.0).to(tl.float32)
        out = out_ptr + m.to(tl.int64)[None, :] * out_stride + n[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask)


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
    """`linear` for up to 64 rows, without a norm."""
    rows, inputs = x.shape
    outputs = out.shape[1]
    tiles = triton.cdiv(outputs, config.outputs)
    block = max(16, triton.next_power_of_2(rows))
    inputs_per_split = triton.cdiv(triton.cdiv(inputs, config.splits), config.inputs) * config.inputs
    splits = triton.cdiv(inputs, inputs_per_split)
    cells = tiles * splits * config.outputs * block * (2 if gated else 1) if splits > 1 else 0
    partials, counters = get_workspace(out.device, cells, tiles)
    stage_bytes = config.inputs * (block + config.outputs * (2 if gated else 1)) * weight.element_size()
    _skinny_kernel[(tiles, splits)](
        x,
        weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        partials,
        counters,
        rows,
        outputs,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        K=inputs,
        INPUTS_PER_SPLIT=inputs_per_split,
        SPLITS=splits,
        BIAS=bias is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_M=block,
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        STAGES=fit_stages(config.stages, stage_bytes),
        PREFETCH_LINES=min(triton.next_power_of_2(config.stages * config.inputs // 64), 8),
        num_warps=config.warps,
        **pdl_options(pdl),
    )
