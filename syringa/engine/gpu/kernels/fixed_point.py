# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Conversion of activation rows to 16-bit fixed point, with the RMS norm that may come before it.

Products with INT4 weights then take one instruction for four of them (`dp4a`): once for the upper bytes and once for
the lower ones. Every unit of inputs has its own scale, so a number keeps 15 bits of the largest in its unit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait

CHUNK = 16  # inputs that a sum covers
_CHUNK = tl.constexpr(CHUNK)
_MAX = tl.constexpr(32767.0)
_INPUTS_PER_PROGRAM = 1024  # without a norm


class FixedPointRows(NamedTuple):
    """Rows as `scales * (256 * high + low)`."""

    high: torch.Tensor  # int8 [rows, inputs]
    low: torch.Tensor  # uint8 [rows, inputs]
    scales: torch.Tensor  # fp32 [rows, units]
    sums: torch.Tensor  # fp32 [rows, inputs / CHUNK], of 256 * high + low


@triton.jit
def _fixed_point_kernel(
    x_ptr,
    order_ptr,
    norm_weight_ptr,
    high_ptr,
    low_ptr,
    scale_ptr,
    sum_ptr,
    x_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
    ORDER: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    at = first + tl.arange(0, BLOCK)
    mask = at < WIDTH
    pdl_launch_dependents(PDL)
    source = at
    if ORDER:
        source = tl.load(order_ptr + at, mask, 0)
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + source, mask, 0.0).to(tl.float32)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * x_stride + source, mask, 0.0).to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x) / WIDTH + eps) * norm_weight
    grouped = tl.reshape(x, [BLOCK // UNIT, UNIT])
    scale = tl.maximum(tl.max(tl.abs(grouped), 1) / _MAX, 1e-30)
    scaled = tl.reshape(grouped / scale[:, None], [BLOCK])
    number = tl.floor(scaled + 0.5).to(tl.int32)
    tl.store(high_ptr + row * WIDTH + at, (number >> 8).to(tl.int8), mask)
    tl.store(low_ptr + row * WIDTH + at, (number & 255).to(tl.uint8), mask)
    unit = first // UNIT + tl.arange(0, BLOCK // UNIT)
    tl.store(scale_ptr + row * (WIDTH // UNIT) + unit, scale, unit < WIDTH // UNIT)
    sums = tl.sum(tl.reshape(number, [BLOCK // _CHUNK, _CHUNK]), 1).to(tl.float32)
    chunk = first // _CHUNK + tl.arange(0, BLOCK // _CHUNK)
    tl.store(sum_ptr + row * (WIDTH // _CHUNK) + chunk, sums, chunk < WIDTH // _CHUNK)


def fixed_point_rows(
    x: torch.Tensor,
    unit: int,
    *,
    order: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = False,
) -> FixedPointRows:
    """Return the rows in fixed point, with one scale per `unit` inputs, a power of two that divides their number.

    `norm_weight` applies RMS norm first; then input i becomes input `order[i]`.
    """
    rows, width = x.shape
    out = FixedPointRows(
        torch.empty(rows, width, dtype=torch.int8, device=x.device),
        torch.empty(rows, width, dtype=torch.uint8, device=x.device),
        torch.empty(rows, width // unit, dtype=torch.float32, device=x.device),
        torch.empty(rows, width // CHUNK, dtype=torch.float32, device=x.device),
    )
    block = triton.next_power_of_2(width) if norm_weight is not None else _INPUTS_PER_PROGRAM
    _fixed_point_kernel[(rows, triton.cdiv(width, block))](
        x, x if order is None else order, x if norm_weight is None else norm_weight, *out, x.stride(0), eps,
        WIDTH=width, BLOCK=block, UNIT=unit, ORDER=order is not None, NORM=norm_weight is not None,
        num_warps=min(max(block // 512, 1), 16), **pdl_options(pdl),
    )  # fmt: skip
    return out
