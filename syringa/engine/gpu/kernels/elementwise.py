# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""RMS norms and the MLP gate, a row or a piece of one per program. Bound by memory bandwidth."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    residual_stride,
    out_stride,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    pdl_launch_dependents(PDL)
    weight = tl.load(weight_ptr + at, mask, 0.0).to(tl.float32)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * x_stride + at, mask, 0.0).to(tl.float32)
    if ADD:
        residual = residual_ptr + row * residual_stride + at
        x += tl.load(residual, mask, 0.0).to(tl.float32)
        tl.store(residual, x.to(residual_ptr.dtype.element_ty), mask)
    inv_rms = tl.rsqrt(tl.sum(x * x) / WIDTH + eps)
    tl.store(out_ptr + row * out_stride + at, (x * inv_rms * weight).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _gate_kernel(
    gate_ptr, out_ptr, gate_stride, out_stride, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask, 0.0).to(tl.float32)
    up = tl.load(gate_ptr + row * gate_stride + WIDTH + at, mask, 0.0).to(tl.float32)
    if GELU:  # by tanh: 2 √(2 / π) = 1.5957691216
        gate *= tl.sigmoid(1.5957691216 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate *= tl.sigmoid(gate)
    tl.store(out_ptr + row * out_stride + at, (gate * up).to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _sigmoid_mul_kernel(
    x_ptr, gate_ptr, x_stride, gate_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < WIDTH
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * x_stride + at, mask, 0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask, 0.0).to(tl.float32)
    tl.store(x_ptr + row * x_stride + at, (x * tl.sigmoid(gate)).to(x_ptr.dtype.element_ty), mask)


@triton.jit
def _add_weighted_kernel(
    out_ptr, y_ptr, x_ptr, weight_ptr, out_stride, y_stride, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    pdl_launch_dependents(PDL)
    weight = tl.load(weight_ptr + at, mask, 0.0).to(tl.float32)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * x_stride + at, mask, 0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + at, mask, 0.0).to(tl.float32)
    out = tl.load(out_ptr + row * out_stride + at, mask, 0.0).to(tl.float32)
    out += y * tl.sigmoid(tl.sum(x * weight))
    tl.store(out_ptr + row * out_stride + at, out.to(out_ptr.dtype.element_ty), mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """Return the RMS norm of each row. `x`: `[rows, width]`, rows contiguous."""
    return _norm(x, None, weight, eps, out, pdl)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Add `x` to `residual` in place and return the RMS norm of the sum."""
    return _norm(x, residual, weight, eps, out, pdl)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
    pdl: bool,
) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty_like(x) if out is None else out
    block = triton.next_power_of_2(width)
    added = x if residual is None else residual
    _norm_kernel[(rows,)](
        x,
        added,
        weight,
        out,
        x.stride(0),
        added.stride(0),
        out.stride(0),
        eps,
        WIDTH=width,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(pdl),
    )
    return out


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, *, pdl: bool = False) -> torch.Tensor:
    """Return silu(first half) · second half of each row."""
    return _gate(gate_up, out, gelu=False, pdl=pdl)


def gelu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, *, pdl: bool = False) -> torch.Tensor:
    """Return gelu(first half) · second half of each row, with gelu's approximation by tanh."""
    return _gate(gate_up, out, gelu=True, pdl=pdl)


def _gate(gate_up: torch.Tensor, out: torch.Tensor | None, *, gelu: bool, pdl: bool) -> torch.Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width) if out is None else out
    block = min(triton.next_power_of_2(width), 1024)
    _gate_kernel[(rows, triton.cdiv(width, block))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        WIDTH=width,
        GELU=gelu,
        BLOCK=block,
        num_warps=4,
        **pdl_options(pdl),
    )
    return out


def sigmoid_mul(x: torch.Tensor, gates: torch.Tensor, *, pdl: bool = False) -> torch.Tensor:
    """Multiply `x` by sigmoid(gates), in place. Both are `[rows, width]`, rows contiguous."""
    rows, width = x.shape
    block = min(triton.next_power_of_2(width), 1024)
    _sigmoid_mul_kernel[(rows, triton.cdiv(width, block))](
        x, gates, x.stride(0), gates.stride(0), WIDTH=width, BLOCK=block, num_warps=4, **pdl_options(pdl)
    )
    return x


def add_weighted(
    out: torch.Tensor, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """Add the rows of `y`, each times sigmoid(x · weight), to `out` in place. All are `[rows, width]`."""
    rows, width = out.shape
    block = triton.next_power_of_2(width)
    _add_weighted_kernel[(rows,)](
        out,
        y,
        x,
        weight,
        out.stride(0),
        y.stride(0),
        x.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
        **pdl_options(pdl),
    )
    return out
