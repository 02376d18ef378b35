"""From the hidden states of tokens to one vector per input: pooling, dense modules and norm, or a classifier."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from syringa.engine.cpu.layers.linear import LinearLayer
from syringa.engine.cpu.native import POOLINGS, Kernels
from syringa.engine.embedding.batch import PackedBatch
from syringa.engine.embedding.native_ops import packed_rows
from syringa.engine.gpu.transfer import upload
from syringa.modelfiles.embedding import Activation, Pooling

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}
_MIN_NORM = 1e-12  # of a vector that is normalized


class TokenEncoder(Protocol):
    """An encoder of tokens, or a decoder that is used as one."""

    def encode(self, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden state of each token, `[tokens, hidden]`, fp32."""
        ...


class PoolingOps(Protocol):
    def pool(self, x: torch.Tensor, batch: PackedBatch, pooling: Pooling) -> torch.Tensor:
        """Return one row per input from the rows of its tokens."""
        ...

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows with a length of 1."""
        ...


class TorchPooling:
    """`PoolingOps` in PyTorch, on any device."""

    def pool(self, x: torch.Tensor, batch: PackedBatch, pooling: Pooling) -> torch.Tensor:
        if pooling == "mean_sqrt_len_tokens":
            return _scale_means(self.pool(x, batch, "mean"), batch)
        starts = _on_device(batch.starts, x.device).long()
        if pooling == "cls":
            return x[starts[:-1]]
        if pooling == "lasttoken":
            return x[starts[1:] - 1]
        lengths = starts.diff()  # "unsafe" below: not checked, for which the host would wait for the GPU
        if pooling == "weightedmean":
            weights = _on_device(batch.positions, x.device)[:, None].float() + 1
            sums: torch.Tensor = torch.segment_reduce(x * weights, "sum", lengths=lengths, unsafe=True)
            return sums / (lengths * (lengths + 1) / 2)[:, None]
        pooled: torch.Tensor = torch.segment_reduce(x, pooling, lengths=lengths, unsafe=True)
        return pooled

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x, dim=1, eps=_MIN_NORM)


def _scale_means(means: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return sums over the square root of the number of tokens."""
    return means * _on_device(batch.lengths, means.device).sqrt()[:, None]


def _on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return an array as a tensor. The host does not wait for what a GPU runs."""
    return upload([array], device)[0] if device.type == "cuda" else torch.from_numpy(array)


class NativePooling:
    """`PoolingOps` on the compiled kernels, batch-invariant."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def pool(self, x: torch.Tensor, batch: PackedBatch, pooling: Pooling) -> torch.Tensor:
        if pooling == "mean_sqrt_len_tokens":
            return _scale_means(self.pool(x, batch, "mean"), batch)
        out = torch.empty(len(batch), x.shape[1])
        rows = packed_rows(batch)
        self.kernels.pool(x.data_ptr(), byref(rows), x.shape[1], POOLINGS[pooling], out.data_ptr())
        return out

    def normalize(self, x: torch.Tensor) -> torch.Tensor:
        self.kernels.normalize(x.data_ptr(), x.shape[0], x.shape[1])
        return x


@dataclass
class DenseLayer:
    linear: LinearLayer
    activation: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _ACTIVATIONS[self.activation](self.linear(x))


class PooledModel:
    """An encoder, the pooling of its hidden states, and what follows: dense modules and norm, or a classifier."""

    def __init__(
        self,
        encoder: TokenEncoder,
        ops: PoolingOps,
        pooling: Pooling,
        dense: list[DenseLayer],
        *,
        normalize: bool,
    ) -> None:
        self.encoder, self.ops, self.pooling, self.dense, self.normalize = encoder, ops, pooling, dense, normalize

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        x = self.ops.pool(self.encoder.encode(batch), batch, self.pooling)
        for layer in self.dense:
            x = layer(x)
        return self.ops.normalize(x) if self.normalize else x
