# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""One or two rows times a weight matrix: nothing but reading the weights, so every byte is asked for early.

A program takes a few outputs and their whole rows of weights. What stands beside the product in a decoder costs a
launch of its own otherwise, and is nearly free here: the norm of the input (its rate is a factor of the result, so it
is summed along the way), the gate of the MLP, the bias and the residual.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import overlap, release, wait


class GemvConfig(NamedTuple):
    outputs: int  # per program
    inputs: int  # per round
    warps: int
    stages: int = 1  # rounds under way; 1: all at once, unrolled


@triton.jit
def _round(
    x_ptr,
    w_ptr,
    gain_ptr,
    k,
    inside,
    x_stride,
    K: tl.constexpr,
    M: tl.constexpr,
    NORM: tl.constexpr,
    EVEN: tl.constexpr,
):
    """The inputs `k` of both rows, times the norm's gain, and their squares."""
    if EVEN:
        a = tl.load(x_ptr + k).to(tl.float32)
    else:
        a = tl.load(x_ptr + k, k < K, 0.0).to(tl.float32)
    b = a
    if M == 2:
        if EVEN:
            b = tl.load(x_ptr + x_stride + k).to(tl.float32)
        else:
            b = tl.load(x_ptr + x_stride + k, k < K, 0.0).to(tl.float32)
    aa = a * a
    bb = b * b
    if NORM:
        if EVEN:
            gain = tl.load(gain_ptr + k).to(tl.float32)
        else:
            gain = tl.load(gain_ptr + k, k < K, 0.0).to(tl.float32)
        a = a * gain
        b = b * gain
    return a, b, aa, bb


@triton.jit
def _weights(w_ptr, k, inside, K: tl.constexpr, EVEN: tl.constexpr):
    at = w_ptr + k[None, :]
    if EVEN:
        w = tl.load(at, inside, 0.0, eviction_policy="evict_first")
    else:
        w = tl.load(at, inside & (k[None, :] < K), 0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


@triton.jit
def _finish(
    out_ptr,
    bias_ptr,
    residual_ptr,
    first,
    second,
    n,
    N,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Bias, gate and residual of one row's outputs `n`, and their store."""
    inside = n < N
    if BIAS:
        first += tl.load(bias_ptr + n, inside, 0.0).to(tl.float32)
        if GATED:
            second += tl.load(bias_ptr + N + n, inside, 0.0).to(tl.float32)
    if GATED:
        first = first * tl.sigmoid(first) * second
    if RESIDUAL:
        first += tl.load(residual_ptr + n, inside, 0.0).to(tl.float32)
    tl.store(out_ptr + n, first.to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _gemv_kernel(
    x_ptr,
    w_ptr,
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
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (n < N)[:, None]
    step = tl.arange(0, BLOCK_K)
    even: tl.constexpr = K % BLOCK_K == 0
    rows = w_ptr + n.to(tl.int64)[:, None] * K
    others = rows + N.to(tl.int64) * K
    a0 = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b0 = a0
    a1 = a0
    b1 = a0
    aa = tl.zeros([BLOCK_K], tl.float32)
    bb = aa
    release(PDL)
    if STAGES == 1:
        # The first weights are on their way before the rows are known that they will be multiplied by.
        w = _weights(rows, step, inside, K, even)
        if GATED:
            u = _weights(others, step, inside, K, even)
        wait(PDL)
        for i in tl.static_range(0, K, BLOCK_K):
            if i > 0:
                w = _weights(rows, i + step, inside, K, even)
                if GATED:
                    u = _weights(others, i + step, inside, K, even)
            a, b, ss, tt = _round(x_ptr, w_ptr, gain_ptr, i + step, inside, x_stride, K, M, NORM, even)
            aa += ss
            a0 += w * a[None, :]
            if GATED:
                a1 += u * a[None, :]
            if M == 2:
                bb += tt
                b0 += w * b[None, :]
                if GATED:
                    b1 += u * b[None, :]
    else:
        wait(PDL)
        for i in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            w = _weights(rows, i + step, inside, K, even)
            a, b, ss, tt = _round(x_ptr, w_ptr, gain_ptr, i + step, inside, x_stride, K, M, NORM, even)
            aa += ss
            a0 += w * a[None, :]
            if M == 2:
                bb += tt
                b0 += w * b[None, :]
            if GATED:
                u = _weights(others, i + step, inside, K, even)
                a1 += u * a[None, :]
                if M == 2:
                    b1 += u * b[None, :]
    first = tl.sum(a0, 1)
    second = tl.sum(a1, 1) if GATED else first
    if NORM:
        rate = tl.rsqrt(tl.sum(aa) / K + eps)
        first *= rate
        second *= rate
    _finish(out_ptr, bias_ptr, residual_ptr, first, second, n, N, BIAS, GATED, RESIDUAL)
    if M == 2:
        first = tl.sum(b0, 1)
        second = tl.sum(b1, 1) if GATED else first
        if NORM:
            rate = tl.rsqrt(tl.sum(bb) / K + eps)
            first *= rate
            second *= rate
        out, residual = out_ptr + out_stride, residual_ptr + residual_stride
        _finish(out, bias_ptr, residual, first, second, n, N, BIAS, GATED, RESIDUAL)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gain: torch.Tensor | None,
    eps: float,
    gated: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    config: GemvConfig,
    pdl: bool,
) -> None:
    """`linear`'s contract for one or two rows."""
    outputs = out.shape[1]
    _gemv_kernel[(triton.cdiv(outputs, config.outputs),)](
        x,
        weight,
        x if bias is None else bias,
        x if gain is None else gain,
        x if residual is None else residual,
        out,
        outputs,
        eps,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        K=weight.shape[1],
        M=len(x),
        NORM=gain is not None,
        BIAS=bias is not None,
        GATED=gated,
        RESIDUAL=residual is not None,
        BLOCK_N=config.outputs,
        BLOCK_K=config.inputs,
        STAGES=config.stages,
        num_warps=config.warps,
        **overlap(pdl),
    )
