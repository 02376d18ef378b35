"""The native encoder on a GPU: rows in bf16, packed without padding, in few launches.

The host needs longer to start the ten kernels of a layer than the GPU needs to run them for a few inputs. So a step of
few tokens replays a CUDA graph, indices go to the GPU in one transfer, and nothing waits for the GPU before the result
is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from syringa.engine.cpu.layers.linear import LinearLayer, TorchLinear
from syringa.engine.embedding.batch import PackedBatch
from syringa.engine.embedding.encoder import (
    EncoderEmbedding,
    EncoderLayer,
    Norm,
    TorchEncoderOps,
    position_ids,
    token_types,
)
from syringa.engine.embedding.encoder_config import EncoderConfig
from syringa.engine.gpu.cuda_graphs import CudaGraphRunner
from syringa.engine.gpu.transfer import packed_views, upload

MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 256, 8  # of PyTorch's attention over packed inputs
MIN_CAPABILITY = (8, 0)
GRAPH_TOKENS = [16, 32, 64, 128, 256, 512, 1024]
GRAPH_INPUTS = 16

VarlenAttention = Callable[..., Any]  # returns a tensor
"""`torch.nn.attention.varlen.varlen_attn`: queries, keys, values, their starts twice, the longest length twice."""


class Rows(NamedTuple):
    """The inputs of a step on the GPU, int32."""

    tokens: torch.Tensor  # [T]
    types: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]: rows of the table of positions
    starts: torch.Tensor  # [S + 1]
    longest: int


@dataclass
class _Layer:
    """Weights in bf16, as pairs of weight and bias."""

    qkv: tuple[torch.Tensor, torch.Tensor | None]
    out: tuple[torch.Tensor, torch.Tensor | None]
    attention_norm: Norm
    up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]
    output_norm: Norm


class GpuEncoder:
    """A `TokenEncoder`. Takes the layers of `load_layers` in bf16."""

    def __init__(
        self,
        config: EncoderConfig,
        embedding: EncoderEmbedding,
        layers: list[EncoderLayer],
        varlen_attention: VarlenAttention | None,
    ) -> None:
        """Without `varlen_attention`, inputs are padded to attend."""
        self.config, self.embedding = config, embedding
        self.dtype = embedding.tokens.dtype
        self.layers = [
            _Layer(
                _parameters(layer.qkv),
                _parameters(layer.out),
                self._converted(layer.attention_norm),
                _parameters(layer.up),
                _parameters(layer.down),
                self._converted(layer.output_norm),
            )
            for layer in layers
        ]
        self._varlen_attention = varlen_attention
        self._padded_attention = TorchEncoderOps(config, self.dtype).attention
        self._graphs: EncoderGraphs | None = None

    def capture_graphs(self) -> None:
        """Capture the graphs of small steps. They need attention over packed inputs."""
        if self._varlen_attention is not None:
            self._graphs = EncoderGraphs(self.forward, self.config.hidden, self.embedding.tokens.device)

    @torch.inference_mode()
    def encode(self, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden state of each token, fp32. It is valid until the next call."""
        c = self.config
        indices = [batch.tokens, token_types(c, batch), position_ids(c, batch)]
        if self._graphs is not None and (found := self._graphs.run(indices, batch.starts)) is not None:
            return found
        tokens, types, positions, starts = upload([*indices, batch.starts], self.embedding.tokens.device)
        return self.forward(Rows(tokens, types, positions, starts, int(batch.lengths.max())), batch)

    def forward(self, rows: Rows, batch: PackedBatch | None = None) -> torch.Tensor:
        """Return the last hidden state of each row. `batch`: the same rows, to attend without packed inputs."""
        tables = self.embedding
        x = F.embedding(rows.tokens, tables.tokens) + F.embedding(rows.types, tables.types)
        x = _layer_norm(x + F.embedding(rows.positions, tables.positions), tables.norm).to(self.dtype)
        for layer in self.layers:
            attended = self._attend(F.linear(x, *layer.qkv), rows, batch)
            x = _layer_norm(F.linear(attended, *layer.out).add_(x), layer.attention_norm)
            x = _layer_norm(F.linear(F.gelu(F.linear(x, *layer.up)), *layer.down).add_(x), layer.output_norm)
        return x.float()

    def _attend(self, qkv: torch.Tensor, rows: Rows, batch: PackedBatch | None) -> torch.Tensor:
        """Return the attention of rows `[q | k | v]`, each input within itself, as `[tokens, hidden]`."""
        if self._varlen_attention is None:
            assert batch is not None
            return self._padded_attention(qkv, batch).to(self.dtype)
        q, k, v = qkv.view(len(qkv), 3, self.config.heads, self.config.head_size).unbind(1)
        attended = self._varlen_attention(q, k, v, rows.starts, rows.starts, rows.longest, rows.longest)
        flat: torch.Tensor = attended.flatten(1)
        return flat

    def _converted(self, norm: Norm) -> Norm:
        return Norm(norm.weight.to(self.dtype), norm.bias.to(self.dtype), norm.eps)


class EncoderGraphs:
    """CUDA graphs of steps by their number of tokens, for up to `GRAPH_INPUTS` inputs.

    Unused rows are one more input, and unused inputs are empty.
    """

    def __init__(self, forward: Callable[[Rows], torch.Tensor], hidden: int, device: torch.device) -> None:
        self._forward, self._device = forward, device
        largest = GRAPH_TOKENS[-1]
        self._buffer = torch.zeros(4 * (3 * largest + GRAPH_INPUTS + 2) + 64, dtype=torch.uint8, device=device)
        self._states = torch.empty(largest, hidden, device=device)
        self._runner = CudaGraphRunner(GRAPH_TOKENS, self._step, device)
        self._runner.capture_all()

    def run(self, indices: Sequence[np.ndarray], starts: np.ndarray) -> torch.Tensor | None:
        """Return the hidden states of rows with these tokens, types and positions; None if no graph holds them."""
        count, inputs = len(indices[0]), len(starts) - 1
        size = self._runner.size_for(count)
        if size is None or inputs > GRAPH_INPUTS:
            return None
        rows = np.zeros((len(indices), size), dtype=np.int32)
        for row, each in zip(rows, indices, strict=True):
            row[:count] = each
        padded_starts = np.full(GRAPH_INPUTS + 2, size, dtype=np.int32)
        padded_starts[: inputs + 1] = starts
        upload([*rows, padded_starts], self._device, self._buffer)
        self._runner.run(size)
        return self._states[:count]

    @torch.inference_mode()
    def _step(self, size: int) -> None:
        layout = [((size,), np.dtype(np.int32))] * 3 + [((GRAPH_INPUTS + 2,), np.dtype(np.int32))]
        tokens, types, positions, starts = packed_views(self._buffer, layout)
        self._states[:size] = self._forward(Rows(tokens, types, positions, starts, size))


def _parameters(layer: LinearLayer) -> tuple[torch.Tensor, torch.Tensor | None]:
    assert isinstance(layer, TorchLinear)
    return layer.weight, layer.bias


def _layer_norm(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)


def find_varlen_attention(head_size: int, device: torch.device) -> VarlenAttention | None:
    """Return PyTorch's attention over packed inputs where this version and this GPU have it for such heads."""
    if head_size > MAX_HEAD_SIZE or head_size % HEAD_SIZE_MULTIPLE:
        return None
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before PyTorch 2.10
        return None
    return varlen_attn
