# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""What 8-bit weights need beside the library's product: rows made 8-bit, and one row times 8-bit weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.ops.fp8 import KIND, LARGEST

_LARGEST = tl.constexpr(LARGEST)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + at, at < WIDTH, 0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x)) / _LARGEST, 1e-12)
    y = tl.minimum(tl.maximum(x / scale, -_LARGEST), _LARGEST)
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
    inside = n < N
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    step = tl.arange(0, BLOCK_K)
    rows = w_ptr + n.to(tl.int64)[:, None] * K
    for k in tl.static_range(0, K, BLOCK_K):
        at = k + step
        w = tl.load(rows + at[None, :], inside[:, None] & (at < K)[None, :], 0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + at, at < K, 0.0).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1) * tl.load(scale_ptr + n, inside, 0.0)
    if BIAS:
        y += tl.load(bias_ptr + n, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), inside)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`fp8.quantized` in one launch."""
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=KIND, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    warps = min(max(block // 512, 1), 16)
    _quantize_kernel[(rows,)](x, out, scale, x.stride(0), WIDTH=width, BLOCK=block, num_warps=warps)
    return out, scale


def gemv(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One bf16 row times 8-bit weights."""
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
