"""Linear layers by precision. Input and output are fp32 rows; `add_to` accumulates in place, for residuals."""

from __future__ import annotations

from ctypes import addressof
from typing import Protocol

import torch
import torch.nn.functional as F

from syringa.engine.cpu.native import DenseWeights, Kernels

DENSE_PANEL = 32  # the same constant as in native/dense_linear.h


class LinearLayer(Protocol):
    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor: ...


class TorchLinear:
    """fp32 or bf16 weights on PyTorch, without the compiled kernels. bf16 weights multiply bf16 rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.weight = weight.to(dtype)
        self.bias = bias.to(dtype) if bias is not None else None

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x.to(self.weight.dtype), self.weight, self.bias)
        return add_to.add_(y) if add_to is not None else y.float()


class DenseLinear:
    """fp32 or bf16 weights on the compiled kernels, batch-invariant. See native/dense_linear.h."""

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
        self.kernels.dense_linear(
            addressof(self._weights), x.data_ptr(), x.shape[0], y.data_ptr(), self._bias, add_to is not None
        )
        return y


class Int8Linear:
    """Weights quantized to int8 with a scale per output channel, batch-invariant. See native/int8_linear.h.

    `gated` weights are a gate projection followed by an up projection; the output is silu(gate) · up.
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
        self.address = kernels.quantize_weights(weight.data_ptr(), rows, self.inputs, gated)

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.outputs) if add_to is None else add_to
        self.kernels.int8_linear(
            self.address, x.data_ptr(), x.shape[0], y.data_ptr(), self.bias_address, add_to is not None
        )
        return y

    def __del__(self) -> None:
        if address := getattr(self, "address", None):
            self.kernels.free_weights(address)
            self.address = None
