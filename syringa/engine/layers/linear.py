"""Linear layers by precision. All take and give fp32 rows; `add_to` accumulates in place, for residuals."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from syringa.engine.native import Kernels


class LinearLayer(Protocol):
    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor: ...


class Linear:
    """fp32 or bf16 weights. bf16 multiplies bf16 rows and hands back fp32, so that residuals keep their precision."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)
        self.bias = bias.to(dtype) if bias is not None else None

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return add_to.add_(y) if add_to is not None else y.float()


class Int8Linear:
    """int8 weights with a scale per channel, int8 rows with a scale per 64 inputs. See native/gemm.h."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        weight = weight.float().contiguous()
        self.kernels = kernels
        self.outputs, self.inputs = weight.shape
        self.bias = bias.float().contiguous() if bias is not None else None
        self._bias = self.bias.data_ptr() if self.bias is not None else None
        self._packed = kernels.pack(weight.data_ptr(), self.outputs, self.inputs)

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.outputs) if add_to is None else add_to
        self.kernels.linear(self._packed, x.data_ptr(), x.shape[0], y.data_ptr(), self._bias, add_to is not None)
        return y

    def __del__(self) -> None:
        if packed := getattr(self, "_packed", None):
            self.kernels.release(packed)
            self._packed = None
