"""Linear layers with optional fused norm, gate and residual, by the kernel that is fastest for the number of rows.

One or two rows go to `gemv`, up to 64 to `skinny`, more to cuBLAS. The configurations are what bench/gpu_kernels.py
found best on an H200 for the shapes of Qwen3-0.6B and 8B, interpolated for other shapes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from syringa.engine.gpu.kernels.elementwise import rms_norm, silu_mul
from syringa.engine.gpu.kernels.gemv import GemvConfig, gemv
from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig, skinny

GEMV_ROWS = 2
SKINNY_ROWS = 64

LinearConfig = GemvConfig | SkinnyConfig


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: LinearConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`. `x`: `[rows, inputs]`, rows contiguous; `weight`: `[outputs, inputs]`, contiguous.

    `norm_weight` applies RMS norm to the rows first; `gated` returns silu(first half) · second half; `residual` is
    added at the end, and may be `out`. `config` selects the kernel; by default the shape does.
    """
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(len(x), outputs, dtype=out_dtype or x.dtype) if out is None else out
    if not len(x):
        return out
    config = choose_config(len(x), outputs, weight.shape[1], gated) if config is None else config
    if isinstance(config, GemvConfig):
        gemv(x, weight, bias, norm_weight, eps, gated, residual, out, config, pdl)
        return out
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, eps, pdl=pdl)
    if config is not None:
        skinny(x, weight, bias, gated, residual, out, config, pdl)
        return out
    y = F.linear(x, weight, bias)
    if gated:
        y = silu_mul(y)
    return out.copy_(y) if residual is None else torch.add(y, residual, out=out)


def choose_config(rows: int, outputs: int, inputs: int, gated: bool) -> LinearConfig | None:
    """Return the kernel configuration for a shape, or None for cuBLAS."""
    if rows <= GEMV_ROWS:
        return _gemv_config(outputs, inputs, gated)
    if rows <= SKINNY_ROWS:
        return _skinny_gemm_config(rows, outputs, inputs, gated)
    return None


def _gemv_config(outputs: int, inputs: int, gated: bool) -> GemvConfig:
    if inputs > 8192:
        return GemvConfig(1, 2048, 4)
    if inputs >= 4096:
        return GemvConfig(4 if outputs > 4096 and not gated else 2, 2048, 8)
    if inputs > 1024:
        return GemvConfig(1 if outputs <= 2048 else 2, 1024, 4)
    width = triton.next_power_of_2(inputs)
    return GemvConfig(4, min(256, width), 4) if gated else GemvConfig(4, width, 4)


def _skinny_gemm_config(rows: int, outputs: int, inputs: int, gated: bool) -> SkinnyConfig:
    tall = SkinnyConfig(64, 128, 4, 4)
    if gated:
        return tall
    if outputs <= 2048:
        return tall._replace(splits=4)
    if rows <= 16:
        if outputs <= 4096:
            return SkinnyConfig(16, 256, 2, 6)
        return SkinnyConfig(32, 256, 2, 4) if outputs < 32768 else tall
    if outputs >= 32768:
        return SkinnyConfig(128, 64, 4, 5)
    return tall._replace(splits=2) if outputs <= 4096 <= inputs else tall
