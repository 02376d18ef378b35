"""Weights in 8-bit floats: e4m3, a scale for each output; rows get a scale each when they come.

Half the bytes of bf16 to read, and twice the arithmetic. One row alone is multiplied as it is, by a kernel that only
reads the weights as 8 bits, so a lone request loses nothing to the rounding of activations. Away from a GPU the same
rounding is done in plain PyTorch, for tests.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

LARGEST = 448.0  # of e4m3
KIND = torch.float8_e4m3fn


class Fp8Product:
    """A linear layer in 8 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, scale = quantized(weight)
        self.scale = scale.reshape(1, -1)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cuda":
            rows, scale = (x, 1.0) if len(x) == 1 else quantized(x)
            y = (F.linear(rows.float(), self.weight.float()) * scale * self.scale).to(x.dtype)
        elif len(x) == 1:
            from syringa.engine.gpu.kernels.fp8 import gemv

            return gemv(x, self.weight, self.scale, self.bias)
        else:
            from syringa.engine.gpu.kernels.fp8 import quantize_rows

            rows, scale = quantize_rows(x)
            y = torch._scaled_mm(rows, self.weight.t(), scale, self.scale, out_dtype=x.dtype, use_fast_accum=True)
        return y if self.bias is None else y.add_(self.bias)


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in e4m3 and the scale of each, `[rows, 1]`."""
    scale = (x.abs().amax(-1, keepdim=True).float() / LARGEST).clamp(min=1e-12)
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(KIND), scale
