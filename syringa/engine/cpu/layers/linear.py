"""Linear layers by precision. Input and output are fp32 rows; `add_to` accumulates in place, for residuals."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, byref
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from syringa.engine.cpu.native import BLOCK_TYPES, DenseWeights, Kernels, TensorBlocks
from syringa.errors import ModelError

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

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
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
            addressof(self._weights),
            x.data_ptr(),
            x.shape[0],
            y.data_ptr(),
            self._bias,
            add_to is not None,
        )
        return y


class NativeLinear:
    """Quantized weights in the compiled kernels' own memory, batch-invariant.

    `gated` weights are a gate projection followed by an up projection; the output is silu(gate) · up.
    """

    def __init__(
        self,
        kernels: Kernels,
        address: int,
        outputs: int,
        inputs: int,
        bias: torch.Tensor | None,
    ) -> None:
        self.kernels = kernels
        self.address: int | None = address
        self.outputs, self.inputs = outputs, inputs
        self.bias = bias.float().contiguous() if bias is not None else None
        self.bias_address = self.bias.data_ptr() if self.bias is not None else None

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.outputs) if add_to is None else add_to
        self.kernels.linear(
            self.address,
            x.data_ptr(),
            x.shape[0],
            y.data_ptr(),
            self.bias_address,
            add_to is not None,
        )
        return y

    def __del__(self) -> None:
        if address := getattr(self, "address", None):
            self.kernels.free_weights(address)
            self.address = None


class Int8Linear(NativeLinear):
    """Weights quantized to int8 with a scale per output channel. See native/int8_linear.h."""

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
    ) -> None:
        weight = weight.float().contiguous()
        rows, inputs = weight.shape
        address = kernels.quantize_weights(weight.data_ptr(), rows, inputs, gated)
        super().__init__(kernels, address, rows // 2 if gated else rows, inputs, bias)


class BlockTensor(NamedTuple):
    """A quantized tensor as it is in a GGUF file."""

    name: str  # for error messages
    type: str  # one of native.BLOCK_TYPES
    rows: int
    inputs: int
    data: np.ndarray  # bytes, contiguous
    order: np.ndarray | None = None  # int32: the file's row of each output channel

    def native(self) -> TensorBlocks:
        order = self.order.ctypes.data if self.order is not None else None
        return TensorBlocks(self.data.ctypes.data, order, BLOCK_TYPES[self.type], self.rows)

    def corrupt(self) -> ModelError:
        return ModelError(f"{self.name} is corrupt: a scale is not a finite number; fetch the file again")


class BlockLinear(NativeLinear):
    """Weights in the quantized blocks of a GGUF file, repacked. See native/quantized_linear.h.

    The output is that of all tensors, side by side. Their types may differ, except those of a gate and its up.
    """

    def __init__(
        self,
        kernels: Kernels,
        tensors: Sequence[BlockTensor],
        bias: torch.Tensor | None,
        *,
        gated: bool = False,
    ) -> None:
        parts = (TensorBlocks * len(tensors))(*(tensor.native() for tensor in tensors))
        inputs = tensors[0].inputs
        address = kernels.pack_weights(parts, len(tensors), inputs, gated)
        if not address:
            broken = [each for each in tensors if not kernels.check_scales(byref(each.native()), inputs)]
            raise broken[0].corrupt()
        outputs = tensors[0].rows if gated else sum(tensor.rows for tensor in tensors)
        super().__init__(kernels, address, outputs, inputs, bias)


class BlockEmbedding:
    """An embedding in the quantized blocks of a GGUF file, of which rows are dequantized on lookup."""

    def __init__(self, kernels: Kernels, tensor: BlockTensor) -> None:
        self.kernels = kernels
        self.tensor = tensor._replace(data=np.array(tensor.data))  # in memory: a mapped file could be truncated
        self._native = self.tensor.native()
        if not kernels.check_scales(byref(self._native), tensor.inputs):
            raise tensor.corrupt()

    def __getitem__(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.to(torch.int64).contiguous()
        rows = torch.empty(len(tokens), self.tensor.inputs)
        self.kernels.dequantize_rows(
            byref(self._native),
            self.tensor.inputs,
            tokens.data_ptr(),
            len(tokens),
            rows.data_ptr(),
        )
        return rows
