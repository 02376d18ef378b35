"""Rows times a weight matrix, by whatever reads the weights fastest for that many rows.

One or two rows go to `gemv`, a few to `skinny`, more to cuBLAS. The choices were measured on an H200 by
bench/gpu_kernels.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from syringa.engine.gpu.elementwise import rms_norm, silu_mul
from syringa.engine.gpu.gemv import GemvConfig, gemv
from syringa.engine.gpu.skinny import SkinnyConfig, skinny

GEMV_ROWS = 2
SKINNY_ROWS = 64

Config = GemvConfig | SkinnyConfig


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    config: Config | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`x`: `[rows, inputs]`, bf16, its rows contiguous; `weight`: `[outputs, inputs]`, contiguous.

    `gain` norms the rows first; `gated` gives silu(first half) · second half; `residual` is added at the end, and may
    be `out`. `config` chooses the kernel; without one, rows and shape do.
    """
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(len(x), outputs, dtype=out_dtype or x.dtype) if out is None else out
    config = choose(len(x), outputs, weight.shape[1], gated) if config is None else config
    if isinstance(config, GemvConfig):
        gemv(x, weight, bias, gain, eps, gated, residual, out, config, pdl)
        return out
    if gain is not None:
        x = rms_norm(x, gain, eps, pdl=pdl)
    if config is not None:
        skinny(x, weight, bias, gated, residual, out, config, pdl)
        return out
    y = F.linear(x, weight, bias)
    if gated:
        y = silu_mul(y)
    return out.copy_(y) if residual is None else torch.add(y, residual, out=out)


def choose(rows: int, outputs: int, inputs: int, gated: bool) -> Config | None:
    """The kernel for a product, and its tiles. None: cuBLAS."""
    if rows <= GEMV_ROWS:
        return _gemv_config(outputs, inputs, gated)
    if rows <= SKINNY_ROWS:
        return _skinny_config(rows, outputs, inputs, gated)
    return None


def _gemv_config(outputs: int, inputs: int, gated: bool) -> GemvConfig:
    return GemvConfig(outputs=2 if gated else 4, inputs=1024, warps=4)


def _skinny_config(rows: int, outputs: int, inputs: int, gated: bool) -> SkinnyConfig:
    splits = 1 if outputs >= 4096 else 4
    return SkinnyConfig(outputs=32, inputs=128, warps=4, stages=4, splits=splits)
