# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Quantization of activation rows to FP8, with the RMS norm or the MLP gate that may come before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait
from syringa.engine.loading.quantized import FP8_DTYPE, FP8_MAX

MEASURED_BLOCK = 16_384  # 8 warps are faster than 16 for the gate of 12,288 numbers; wider rows were not measured
_FP8_MAX = tl.constexpr(FP8_MAX)


@triton.jit(do_not_specialize=["scale_stride"])
def _quantize_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    residual_stride,
    scale_stride,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,  # inputs of a scale; 0: all
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < WIDTH
    pdl_launch_dependents(PDL)
    if NORM:
        norm_weight = tl.load(norm_weight_ptr + at, mask, 0.0).to(tl.float32)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * x_stride + at, mask, 0.0).to(tl.float32)
    if GATED:
        x *= tl.sigmoid(x) * tl.load(x_ptr + row * x_stride + WIDTH + at, mask, 0.0).to(tl.float32)
    if ADD:
        residual = residual_ptr + row * residual_stride + at
        x += tl.load(residual, mask, 0.0).to(tl.float32)
        tl.store(residual, x.to(residual_ptr.dtype.element_ty), mask)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x) / WIDTH + eps) * norm_weight
    if GROUP:
        groups: tl.constexpr = BLOCK // GROUP
        grouped = tl.reshape(x, [groups, GROUP])
        scale = tl.maximum(tl.max(tl.abs(grouped), 1) / _FP8_MAX, 1e-12)
        y = tl.reshape(grouped / scale[:, None], [BLOCK])
        group = tl.arange(0, groups)
        tl.store(scale_ptr + group * scale_stride + row, scale, group * GROUP < WIDTH)
    else:
        scale = tl.maximum(tl.max(tl.abs(x)) / _FP8_MAX, 1e-12)
        y = x / scale
        tl.store(scale_ptr + row, scale)
    y = tl.minimum(tl.maximum(y, -_FP8_MAX), _FP8_MAX)
    tl.store(out_ptr + row * WIDTH + at, y.to(out_ptr.dtype.element_ty), mask)


def quantize_rows(
    x: torch.Tensor,
    group: int = 0,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    multiple: int = 1,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in e4m3 and their scales, `[groups, rows]`: of each `group` of inputs, or of all if it is 0.

    `residual` adds `x` to it in place first and takes the sum, `norm_weight` applies RMS norm, and `gated` takes
    silu(first half) · second half. `multiple`: uninitialized rows are added up to a multiple of it.
    """
    rows, width = x.shape
    width = width // 2 if gated else width
    padded = triton.cdiv(rows, multiple) * multiple
    out = torch.empty(padded, width, dtype=FP8_DTYPE, device=x.device)
    scale = torch.empty(triton.cdiv(width, group) if group else 1, padded, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _quantize_kernel[(rows,)](
        x,
        x if residual is None else residual,
        x if norm_weight is None else norm_weight,
        out,
        scale,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        padded,
        eps,
        WIDTH=width,
        BLOCK=block,
        GROUP=group,
        NORM=norm_weight is not None,
        ADD=residual is not None,
        GATED=gated,
        num_warps=min(max(block // 512, 1), 8 if block <= MEASURED_BLOCK else 16),
        **pdl_options(pdl),
    )
    return out, scale
