"""Linear layers by precision. Input and output are fp32 rows; `add_to` accumulates in place, for residuals."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from syringa.engine.cpu.native import BLOCK_TYPES, FLOAT_TYPES, GATES, DenseWeights, Kernels, TensorBlocks
from syringa.errors import ModelError

DENSE_PANEL = 32  # the same constant as in native/dense_linear.h
_TYPE_NUMBERS = BLOCK_TYPES | FLOAT_TYPES
_TYPE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


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
        self.bias_address = self.bias.data_ptr() if self.bias is not None else None
        self.weights = DenseWeights(self.panels.data_ptr(), self.outputs, inputs, dtype == torch.bfloat16)

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.empty(x.shape[0], self.outputs) if add_to is None else add_to
        self.kernels.dense_linear(
            addressof(self.weights),
            x.data_ptr(),
            x.shape[0],
            y.data_ptr(),
            self.bias_address,
            add_to is not None,
        )
        return y


class Gate(NamedTuple):
    """What is computed of a gate g and an up projection u: silu(g) · u by default. `Gate` in native/panels.h."""

    kind: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    alpha: float = 0.0  # of clamped_swiglu
    limit: float = 0.0


class NativeLinear:
    """Quantized weights in the compiled kernels' own memory, batch-invariant.

    With a `gate`, weights are a gate projection followed by an up projection, and the output is that of the gate.
    """

    def __init__(
        self,
        kernels: Kernels,
        address: int,
        outputs: int,
        inputs: int,
        bias: torch.Tensor | None,
        gate: Gate | None = None,
    ) -> None:
        self.kernels = kernels
        self.address: int | None = address
        self.gated = gate is not None
        if gate is not None:
            kernels.set_gate(address, GATES[gate.kind], gate.alpha, gate.limit)
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


class BlockTensor(NamedTuple):
    """A matrix as it is stored in a file: in the quantized blocks of GGUF, or as plain numbers."""

    name: str  # for error messages
    type: str  # one of native.BLOCK_TYPES or native.FLOAT_TYPES
    rows: int
    inputs: int
    data: np.ndarray  # bytes, contiguous
    order: np.ndarray | None = None  # int32: the file's row of each output channel

    @classmethod
    def of(cls, weight: torch.Tensor, name: str = "a weight") -> BlockTensor:
        """Return a floating-point matrix or vector, which is copied only if it is not contiguous."""
        weight = weight.detach()
        if weight.dtype not in _TYPE_NAMES:
            weight = weight.float()
        rows, inputs = weight.shape if weight.dim() == 2 else (1, weight.numel())
        data = weight.contiguous().view(-1).view(torch.uint8).numpy()
        return cls(name, _TYPE_NAMES[weight.dtype], rows, inputs, data)

    def native(self) -> TensorBlocks:
        order = self.order.ctypes.data if self.order is not None else None
        return TensorBlocks(self.data.ctypes.data, order, _TYPE_NUMBERS[self.type], self.rows)

    def check(self, kernels: Kernels) -> None:
        """Raise `ModelError` if a number is not finite."""
        if not kernels.check_tensor(byref(self.native()), self.inputs):
            raise self.corrupt()

    def dequantize(self, kernels: Kernels, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the matrix in fp32 or bf16. Raise `ModelError` if a number is not finite."""
        values = torch.empty(self.rows, self.inputs, dtype=dtype)
        half = dtype == torch.bfloat16
        finite = kernels.read_tensor(byref(self.native()), self.inputs, values.data_ptr(), half)
        if finite < 0:
            raise MemoryError
        if not finite:
            raise self.corrupt()
        return values

    def corrupt(self) -> ModelError:
        what = "scale" if self.type in BLOCK_TYPES else "weight"
        return ModelError(f"{self.name} is corrupt: a {what} is not a finite number; fetch the file again")


class PackTensors(Protocol):
    """A kernel that packs tensors of a layer, side by side, and returns the address of the weights or None."""

    def __call__(self, tensors: Array[TensorBlocks], count: int, inputs: int, gated: bool, /) -> int | None: ...


def _pack(kernels: Kernels, pack: PackTensors, tensors: Sequence[BlockTensor], gated: bool) -> int:
    parts = (TensorBlocks * len(tensors))(*(tensor.native() for tensor in tensors))
    address = pack(parts, len(tensors), tensors[0].inputs, gated)
    if address is None:
        for tensor in tensors:
            tensor.check(kernels)
        raise MemoryError
    return address


class Int8Linear(NativeLinear):
    """Weights quantized to int8 with a scale per output channel. See native/int8_linear.h.

    `weight`: a matrix, or matrices whose outputs are side by side.
    """

    def __init__(
        self,
        kernels: Kernels,
        weight: torch.Tensor | Sequence[BlockTensor],
        bias: torch.Tensor | None,
        *,
        gate: Gate | None = None,
    ) -> None:
        tensors = [BlockTensor.of(weight)] if isinstance(weight, torch.Tensor) else weight
        address = _pack(kernels, kernels.quantize_tensors, tensors, gate is not None)
        rows = sum(tensor.rows for tensor in tensors)
        super().__init__(kernels, address, rows // 2 if gate else rows, tensors[0].inputs, bias, gate)


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
        gate: Gate | None = None,
    ) -> None:
        address = _pack(kernels, kernels.pack_weights, tensors, gate is not None)
        outputs = tensors[0].rows if gate else sum(tensor.rows for tensor in tensors)
        super().__init__(kernels, address, outputs, tensors[0].inputs, bias, gate)


class JoinedLinear:
    """Layers whose outputs are side by side."""

    def __init__(self, layers: Sequence[LinearLayer]) -> None:
        self.layers = layers

    def __call__(self, x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.cat([layer(x) for layer in self.layers], dim=1)
        return y if add_to is None else add_to.add_(y)


class BlockEmbedding:
    """An embedding in quantized blocks: the rows of a `BlockLinear`, which may be the output layer as well."""

    def __init__(self, weights: BlockLinear) -> None:
        self.weights = weights

    def __getitem__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a row for each token. Raise `IndexError` for a token that has none."""
        tokens = tokens.to(torch.int64).contiguous()
        if len(tokens):
            least, most = (int(token) for token in tokens.aminmax())
            if least < 0 or most >= self.weights.outputs:
                raise IndexError(f"tokens from {least} to {most}, and the embedding has {self.weights.outputs} rows")
        rows = torch.empty(len(tokens), self.weights.inputs)
        self.weights.kernels.unpack_rows(self.weights.address, tokens.data_ptr(), len(tokens), rows.data_ptr())
        return rows
