# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Linear layer of one or two rows, with bf16 or FP8 weights. Bound by reading the weights, so loads are issued early.

A program computes a few outputs from their whole weight rows. Operations that would otherwise need their own launch are
fused: the RMS norm of the input (its scale factors out of the sum, so the squares are summed along the way), the scale
of FP8 weights, the MLP gate, the bias and the residual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait


class GemvConfig(NamedTuple):
    outputs: int  # per program
    inputs: int  # per iteration
    warps: int
    stages: int = 1  # iterations in flight; 1: fully unrolled


@triton.jit
def _load_inputs(
    x_ptr,
    w_ptr,
    gain_ptr,
    k,
    mask,
    x_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    NORM: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Return the inputs `k` of both rows, times the norm weight, and their squares."""
    if EVEN_K:
        a = tl.load(x_ptr + k).to(tl.float32)
    else:
        a = tl.load(x_ptr + k, k < K, 0.0).to(tl.float32)
    b = a
    if M == 2:
        if EVEN_K:
            b = tl.load(x_ptr + x_stride + k).to(tl.float32)
        else:
            b = tl.load(x_ptr + x_stride + k, k < K, 0.0).to(tl.float32)
    aa = a * a
    bb = b * b
    if NORM:
        if EVEN_K:
            norm_weight = tl.load(gain_ptr + k).to(tl.float32)
        else:
            norm_weight = tl.load(gain_ptr + k, k < K, 0.0).to(tl.float32)
        a = a * norm_weight
        b = b * norm_weight
    return a, b, aa, bb


@triton.jit
def _load_weights(w_ptr, k, mask, K: tl.constexpr, EVEN_K: tl.constexpr):
    at = w_ptr + k[None, :]
    if EVEN_K:
        w = tl.load(at, mask, 0.0, eviction_policy="evict_first")
    else:
        w = tl.load(at, mask & (k[None, :] < K), 0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


@triton.jit
def epilogue_and_store(
    out_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_value,
    up_value,
    n,
    N,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Apply scale, bias, gate and residual to one row's outputs `n` and store them."""
    mask = n < N
    if SCALED:
        out_value *= tl.load(scale_ptr + n, mask, 0.0)
        if GATED:
            up_value *= tl.load(scale_ptr + N + n, mask, 0.0)
    if BIAS:
        out_value += tl.load(bias_ptr + n, mask, 0.0).to(tl.float32)
        if GATED:
            up_value += tl.load(bias_ptr + N + n, mask, 0.0).to(tl.float32)
    if GATED:
        out_value = out_value * tl.sigmoid(out_value) * up_value
    if RESIDUAL:
        out_value += tl.load(residual_ptr + n, mask, 0.0).to(tl.float32)
    tl.store(out_ptr + n, out_value.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    gain_ptr,
    residual_ptr,
    out_ptr,
    N,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    NORM: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (n < N)[:, None]
    k_offsets = tl.arange(0, BLOCK_K)
    even_k: tl.constexpr = K % BLOCK_K == 0
    rows = w_ptr + n.to(tl.int64)[:, None] * K
    up_rows = rows + N.to(tl.int64) * K
    a0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b0 = a0
    a1 = a0
    b1 = a0
    aa = tl.zeros([BLOCK_K], tl.float32)
    bb = aa
    pdl_launch_dependents(PDL)
    if STAGES == 1:
        # Load the first weights before `pdl_wait`: they do not depend on the previous kernel.
        w = _load_weights(rows, k_offsets, mask, K, even_k)
        if GATED:
            w_up = _load_weights(up_rows, k_offsets, mask, K, even_k)
        pdl_wait(PDL)
        for i in tl.static_range(0, K, BLOCK_K):
            if i > 0:
                w = _load_weights(rows, i + k_offsets, mask, K, even_k)
                if GATED:
                    w_up = _load_weights(up_rows, i + k_offsets, mask, K, even_k)
            a, b, ss, tt = _load_inputs(x_ptr, w_ptr, gain_ptr, i + k_offsets, mask, x_stride, K, M, NORM, even_k)
            aa += ss
            a0 += w * a[None, :]
            if GATED:
                a1 += w_up * a[None, :]
            if M == 2:
                bb += tt
                b0 += w * b[None, :]
                if GATED:
                    b1 += w_up * b[None, :]
    else:
        pdl_wait(PDL)
        for i in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            w = _load_weights(rows, i + k_offsets, mask, K, even_k)
            a, b, ss, tt = _load_inputs(x_ptr, w_ptr, gain_ptr, i + k_offsets, mask, x_stride, K, M, NORM, even_k)
            aa += ss
            a0 += w * a[None, :]
            if M == 2:
                bb += tt
                b0 += w * b[None, :]
            if GATED:
                w_up = _load_weights(up_rows, i + k_offsets, mask, K, even_k)
                a1 += w_up * a[None, :]
                if M == 2:
                    b1 += w_up * b[None, :]
    out_value = tl.sum(a0, 1)
    up_value = tl.sum(a1, 1) if GATED else out_value
    if NORM:
        inv_rms = tl.rsqrt(tl.sum(aa) / K + eps)
        out_value *= inv_rms
        up_value *= inv_rms
    epilogue_and_store(
        out_ptr, scale_ptr, bias_ptr, residual_ptr, out_value, up_value, n, N, SCALED, BIAS, GATED, RESIDUAL
    )
    if M == 2:
        out_value = tl.sum(b0, 1)
        up_value = tl.sum(b1, 1) if GATED else out_value
        if NORM:
            inv_rms = tl.rsqrt(tl.sum(bb) / K + eps)
            out_value *= inv_rms
            up_value *= inv_rms
        out, residual = out_ptr + out_stride, residual_ptr + residual_stride
        epilogue_and_store(out, scale_ptr, bias_ptr, residual, out_value, up_value, n, N, SCALED, BIAS, GATED, RESIDUAL)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    eps: float,
    gated: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    config: GemvConfig,
    pdl: bool,
    scale: torch.Tensor | None = None,
) -> None:
    """`linear` for one or two rows. `scale`: of FP8 weights, one per output."""
    outputs = out.shape[1]
    _gemv_kernel[(triton.cdiv(outputs, config.outputs),)](
        x,
        weight,
        x if scale is None else scale,
        x if bias is None else bias,
        x if norm_weight is None else norm_weight,
        x if residual is None else residual,
        out,
        outputs,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        K=weight.shape[1],
        M=len(x),
        NORM=norm_weight is not None,
        SCALED=scale is not None,
        BIAS=bias is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        STAGES=config.stages,
        num_warps=config.warps,
        **pdl_options(pdl),
    )
