"""The native decoder on a GPU: `models.decoder`'s, for any of its families, on the kernels.

A step has rows of two kinds: first a row each for sequences that add one token, then the rows of those that add more.
Few rows of the first kind alone take the narrow way, in which the products do the norms, the gate and the residual
along the way. All others take the wide way: products by the library, and one small kernel between two of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from syringa.engine.gpu.cache import GpuCache
from syringa.engine.gpu.ops.base import Ops, Turning
from syringa.engine.gpu.ops.fp8 import Fp8Product
from syringa.engine.models.config import DecoderConfig

if TYPE_CHECKING:
    from syringa.engine.vision.layout import StepPictures


@dataclass
class Product:
    """A linear layer in the weights' own precision."""

    weight: torch.Tensor  # [outputs, inputs]
    bias: torch.Tensor | None = None


@dataclass
class GpuLayer:
    input_norm: torch.Tensor
    qkv: Product | Fp8Product
    out: Product | Fp8Product
    post_norm: torch.Tensor
    gate_up: Product | Fp8Product
    down: Product | Fp8Product
    turning: Turning
    window: int


@dataclass
class Later:
    """The rows of sequences that add several tokens."""

    positions: torch.Tensor  # of all the step's rows, int32
    tables: torch.Tensor
    tiles: torch.Tensor
    starts: torch.Tensor  # from 0, int32
    first: torch.Tensor  # int32


@dataclass
class Rows:
    """A step on the device."""

    tokens: torch.Tensor  # int32
    sources: torch.Tensor  # int32: where a token lies among the last step's draws; negative: it is in `tokens`
    slots: torch.Tensor  # int32: block · BLOCK_SIZE + offset; negative: padding
    tables: torch.Tensor  # int32, of the leading rows
    lengths: torch.Tensor  # int32, of the leading rows: tokens of the sequence, the new one included; 0: padding
    later: Later | None = None
    wanted: torch.Tensor | None = None  # rows whose logits are needed; None: all
    pictures: StepPictures | None = None  # on the device, for a model that reads images
    shifts: torch.Tensor | None = None  # int32, of rows that all are drawn tokens: from their places to their positions


class DeviceModel(Protocol):
    """What the runner needs of a model. `ops` also draw its tokens."""

    ops: Ops
    recordable: bool  # a step of one token each can be a CUDA graph
    halvable: bool  # fp8 would make it smaller
    beside: int  # bytes that something of it may take while a step runs

    @property
    def device(self) -> torch.device: ...

    @property
    def vocabulary(self) -> int: ...

    def forward(
        self, rows: Rows, drawn: torch.Tensor, cache: GpuCache, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the wanted rows, fp32. `drawn`: the last step's tokens."""
        ...


class GpuDecoder:
    recordable = True
    beside = 0

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        embedding: torch.Tensor,
        layers: list[GpuLayer],
        norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.dense = self.halvable = all(isinstance(layer.qkv, Product) for layer in layers)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def vocabulary(self) -> int:
        return len(self.head)

    @torch.inference_mode()
    def forward(
        self, rows: Rows, drawn: torch.Tensor, cache: GpuCache, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.ops.begin(len(rows.tokens), rows.later is None)
        x = self.ops.embed(self.embedding, rows.tokens, rows.sources, drawn)
        narrow = rows.later is None and rows.wanted is None and len(x) <= self.ops.narrow_rows and self.dense
        x = self._narrow(x, rows, cache) if narrow else self._wide(x, rows, cache)
        if rows.wanted is not None:
            x = x.index_select(0, rows.wanted)
        if out is None:
            out = torch.empty(len(x), len(self.head), dtype=torch.float32, device=x.device)
        return self.ops.head(x, self.head, out)

    def _narrow(self, x: torch.Tensor, rows: Rows, cache: GpuCache) -> torch.Tensor:
        ops, heads, eps = self.ops, self.config.heads, self.config.eps
        for layer, (keys, values) in zip(self.layers, cache.layers, strict=True):
            assert isinstance(layer.qkv, Product)
            assert isinstance(layer.out, Product)
            assert isinstance(layer.gate_up, Product)
            assert isinstance(layer.down, Product)
            qkv = ops.linear(x, layer.qkv.weight, layer.qkv.bias, gain=layer.input_norm, eps=eps)
            store = rows.slots, layer.turning
            mixed = ops.decode_attention(qkv, keys, values, rows.tables, rows.lengths, heads, layer.window, store)
            ops.linear(mixed, layer.out.weight, layer.out.bias, residual=x, out=x)
            wide = ops.linear(x, layer.gate_up.weight, layer.gate_up.bias, gain=layer.post_norm, eps=eps, gated=True)
            ops.linear(wide, layer.down.weight, layer.down.bias, residual=x, out=x)
        return ops.rms_norm(x, self.norm, eps)

    def _wide(self, x: torch.Tensor, rows: Rows, cache: GpuCache) -> torch.Tensor:
        ops, eps = self.ops, self.config.eps
        norms = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        normed = ops.rms_norm(x, self.layers[0].input_norm, eps)
        for layer, (keys, values), following in zip(self.layers, cache.layers, norms, strict=True):
            mixed = self._attend(layer, self._product(normed, layer.qkv), rows, keys, values)
            normed = ops.add_rms_norm(self._product(mixed, layer.out), x, layer.post_norm, eps)
            wide = ops.silu_mul(self._product(normed, layer.gate_up))
            normed = ops.add_rms_norm(self._product(wide, layer.down), x, following, eps)
        return normed

    def _product(self, x: torch.Tensor, by: Product | Fp8Product) -> torch.Tensor:
        return self.ops.product(x, by.weight, by.bias) if isinstance(by, Product) else by(x)

    def _attend(
        self, layer: GpuLayer, qkv: torch.Tensor, rows: Rows, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        ops, heads = self.ops, self.config.heads
        later, leading = rows.later, len(rows.lengths)
        if later is None:
            store = rows.slots, layer.turning
            return ops.decode_attention(qkv, keys, values, rows.tables, rows.lengths, heads, layer.window, store)
        ops.rotate_and_store(qkv, later.positions, rows.slots, layer.turning, keys, values, heads)
        out = qkv.new_empty(len(qkv), heads * self.config.head_size)
        if leading:
            ops.decode_attention(
                qkv[:leading], keys, values, rows.tables, rows.lengths, heads, layer.window, None, out[:leading]
            )
        ops.prefill_attention(
            qkv[leading:],
            keys,
            values,
            later.tables,
            later.tiles,
            later.starts,
            later.first,
            heads,
            layer.window,
            out[leading:],
        )
        return out
