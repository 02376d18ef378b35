# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Kernels for fp8 weights: quantization of activation rows, and a GEMV of one bf16 row with fp8 weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.ops.fp8 import FP8_DTYPE, FP8_MAX

_FP8_MAX = tl.constexpr(FP8_MAX)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, at < WIDTH, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)) / _FP8_MAX, 1e-12)
    y = tl.minimum(tl.maximum(x / scale, -_FP8_MAX), _FP8_MAX)
    tl.store(out_ptr + row * WIDTH + at, y.to(out_ptr.dtype.element_ty), at < WIDTH)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = n < N
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    k_offsets = tl.arange(0, BLOCK_K)
    rows = w_ptr + n.to(tl.int64)[:, None] * K
    for k in tl.static_range(0, K, BLOCK_K):
        at = k + k_offsets
        w = tl.load(rows + at[None, :], mask[:, None] & (at < K)[None, :], 0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + at, at < K, 0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1) * tl.load(scale_ptr + n, mask, 0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.fp8.quantize_fp8` in one launch."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=FP8_DTYPE, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    _quantize_kernel[(rows,)](x, out, scale, x.stride(0), WIDTH=width, BLOCK=block, num_warps=warps)
    return out, scale


def gemv(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return one bf16 row times fp8 weights, plus bias."""
    outputs, inputs = weight.shape
    out = x.new_empty(1, outputs)
    _gemv_kernel[(triton.cdiv(outputs, 4),)](
        x,
        weight,
        scale,
        x if bias is None else bias,
        out,
        outputs,
        K=inputs,
        BIAS=bias is not None,
        BLOCK_N=4,
        BLOCK_K=2048 if inputs % 2048 == 0 else 1024,
        num_warps=4,
    )
    return out
