"""Linear layers by precision. All take and give fp32 rows; `add_to` accumulates in place, for residuals."""

from __future__ import annotations

from ctypes import addressof
from typing import Protocol

import torch
import torch.nn.functional as F

from syringa.engine.cpu.native import DenseWeights, Kernels

DENSE_PANEL = 32  # WIDTH in native/dense.h


class LinearLayer(Protocol):
    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor: ...


class Linear:
    """fp32 or bf16 weights where no kernel was built. bf16 multiplies bf16 rows, and hands back fp32 for residuals."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)
        self.bias = bias.to(dtype) if bias is not None else None

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return add_to.add_(y) if add_to is not None else y.float()


class DenseLinear:
    """fp32 or bf16 weights, fp32 rows. See native/dense.h: a row's result never depends on the batch."""

    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.kernels = kernels
        self.outputs, inputs = weight.shape
        panels = F.pad(weight.to(dtype), (0, 0, 0, -self.outputs % DENSE_PANEL)).view(-1, DENSE_PANEL, inputs)
        self.panels = panels.transpose(1, 2).contiguous()
        self.bias = bias.float().contiguous() if bias is not None else None
        self._bias = self.bias.data_ptr() if self.bias is not None else None
        self._weights = DenseWeights(self.panels.data_ptr(), self.outputs, inputs, dtype == torch.bfloat16)

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.outputs) if add_to is None else add_to
        self.kernels.dense(
            addressof(self._weights), x.data_ptr(), x.shape[0], y.data_ptr(), self._bias, add_to is not None
        )
        return y


class Int8Linear:
    """int8 weights with a scale per channel, int8 rows with a scale per group of inputs. See native/gemm.h.

    `gated` weights are a gate and an up projection, one after the other, and give silu(gate) · up.
    """

    def __init__(
        self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False
    ) -> None:
        weight = weight.float().contiguous()
        rows, self.inputs = weight.shape
        self.kernels = kernels
        self.outputs = rows // 2 if gated else rows
        self.bias = bias.float().contiguous() if bias is not None else None
        self.bias_address = self.bias.data_ptr() if self.bias is not None else None
        self.address = kernels.pack(weight.data_ptr(), rows, self.inputs, gated)

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.outputs) if add_to is None else add_to
        self.kernels.linear(self.address, x.data_ptr(), x.shape[0], y.data_ptr(), self.bias_address, add_to is not None)
        return y

    def __del__(self) -> None:
        if address := getattr(self, "address", None):
            self.kernels.release(address)
            self.address = None
