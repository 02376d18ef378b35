"""Reading the tensors of embedding models, and making linear layers of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from syringa.engine.cpu.layers.linear import (
    BlockLinear,
    BlockTensor,
    DenseLinear,
    Gate,
    Int8Linear,
    LinearLayer,
    TorchLinear,
)
from syringa.engine.cpu.native import Kernels
from syringa.engine.loading.device_copy import copy_weight
from syringa.engine.loading.weights import WeightSource
from syringa.errors import ModelError

if TYPE_CHECKING:
    from syringa.engine.loading.quantized import QuantizedWeight

BLOCK = 32  # weights of a block of Q8_0
_OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}  # of the first checkpoints


class PrefixedWeights:
    """A `WeightSource` that finds tensors with a prefix before their names, or without it.

    The folder of a model with a head has the prefix, that of a bare encoder or decoder does not.
    """

    def __init__(self, weights: WeightSource, path: str, prefix: str) -> None:
        self._weights, self._path, self._prefix = weights, path, prefix

    def __call__(self, name: str) -> torch.Tensor:
        return self._weights(self._find(name))

    def has(self, name: str) -> bool:
        return any(map(self._weights.has, self._candidates(name)))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(self._find(name))

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        return self._weights.quantized(self._find(name), device)

    def check_shapes(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Raise `ModelError` if there are not all of these tensors with these shapes."""
        for name, shape in shapes.items():
            if (found := self.shape(name)) != shape:
                raise ModelError(f"{self._path}: {name} is {list(found)}, and its config says {list(shape)}")

    def _find(self, name: str) -> str:
        found = next(filter(self._weights.has, self._candidates(name)), None)
        if found is None:
            raise ModelError(f"{self._path} has no tensor for {name!r}: the model is incomplete")
        return found

    def _candidates(self, name: str) -> list[str]:
        bare = name.removeprefix(self._prefix)
        old = bare
        for new, first in _OLD_NAMES.items():
            old = old.replace(new, first)
        return [self._prefix + bare, bare, self._prefix + old, old]


def quantize_blocks(weight: torch.Tensor, name: str) -> BlockTensor:
    """Quantize a finite matrix to bytes, in the blocks of GGUF's Q8_0: a scale in fp16 and 32 numbers."""
    groups = weight.float().numpy().reshape(-1, BLOCK)
    scales = (np.abs(groups).max(1) / 127).astype(np.float16)
    divisors = np.maximum(scales.astype(np.float32), np.finfo(np.float16).tiny)
    blocks = np.zeros(len(groups), dtype=[("scale", "<f2"), ("numbers", "i1", BLOCK)])
    blocks["scale"] = scales
    blocks["numbers"] = np.clip(np.rint(groups / divisors[:, None]), -127, 127)
    return BlockTensor(name, "Q8_0", weight.shape[0], weight.shape[1], blocks.view(np.uint8).reshape(-1))


class LayerReader:
    """Reads tensors and linear layers in one precision, and raises `ModelError` where a number is not finite."""

    def __init__(
        self,
        weights: WeightSource,
        path: str,
        dtype: str,
        kernels: Kernels | None,
        device: torch.device,
    ) -> None:
        """`dtype`: int8, bf16 or fp32. Without `kernels`, or on a GPU, layers run in PyTorch."""
        self.weights, self.path, self.dtype, self.kernels, self.device = weights, path, dtype, kernels, device
        self.torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor in the precision of its file, on the device."""
        tensor = self.weights(name)
        stored = BlockTensor.of(tensor, f"{self.path}: {name}")
        if self.kernels is not None:
            stored.check(self.kernels)
        elif not tensor.isfinite().all():
            raise stored.corrupt()
        return copy_weight(tensor, self.device)

    def linear(self, names: Sequence[str], bias: torch.Tensor | None, *, gate: Gate | None = None) -> LinearLayer:
        """Return a layer of the tensors with these names, side by side."""
        if self.dtype == "int8":
            assert self.kernels is not None  # checked by choose_dtype
            stored = [BlockTensor.of(self.weights(name), f"{self.path}: {name}") for name in names]
            return Int8Linear(self.kernels, stored, bias, gate=gate)
        return self._dense(names, bias, self.torch_dtype)

    def fine_linear(self, names: Sequence[str], bias: torch.Tensor | None) -> LinearLayer:
        """Like `linear`, but in int8 with a scale for each 32 weights of an output channel.

        For layers with many inputs, among which a few large weights would cost the others their precision.
        """
        weights = [self.weights(name) for name in names] if self.dtype == "int8" else []
        if not weights or weights[0].shape[1] % BLOCK:
            return self.linear(names, bias)
        assert self.kernels is not None  # checked by choose_dtype
        labels = [f"{self.path}: {name}" for name in names]
        for weight, label in zip(weights, labels, strict=True):
            BlockTensor.of(weight, label).check(self.kernels)
        blocks = [quantize_blocks(weight, label) for weight, label in zip(weights, labels, strict=True)]
        return BlockLinear(self.kernels, blocks, bias)

    def exact_linear(self, name: str, bias: str | None) -> LinearLayer:
        """Return a layer in fp32: those after the pooling are small, and what they compute is the result."""
        return self._dense([name], self.read(bias) if bias else None, torch.float32)

    def _dense(self, names: Sequence[str], bias: torch.Tensor | None, dtype: torch.dtype) -> LinearLayer:
        weight = torch.cat([self.read(name) for name in names])
        if self.kernels is not None and self.device.type == "cpu":
            return DenseLinear(self.kernels, weight, bias, dtype)
        return TorchLinear(weight, bias, dtype)
