"""Paged attention for `transformers`' models, registered as an attention implementation named "syringa".

Masks are never materialized: a model that asks for a mask gets a single number, the layer's window (0: unlimited), and
passes it on to attention. Layers are identified by the order of attention calls in the forward pass, because
`layer_idx` is missing or shared in some models.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from syringa.engine.cpu.layers.cache import CacheTensors, LayerCache, read_cache, write_cache
from syringa.engine.cpu.layers.native_ops import address, attend, supports_head_size
from syringa.engine.cpu.layers.ops import attend_rows, paged_attention
from syringa.engine.cpu.native import AttentionShape, Kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syringa.engine.vision.step_images import BidirectionalRows

NAME = "syringa"


class UnsupportedModel(Exception):
    """A model needs something that this engine does not support. Reaches the user as a `ModelError`."""


class AttentionCall(NamedTuple):
    """One attention call of a forward pass. Heads are `[tokens, heads, size]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: int
    scale: float
    softcap: float
    sinks: torch.Tensor | None


class AttentionHandler(Protocol):
    """Handles the attention calls of one forward pass."""

    checks_masks: bool

    def attention(self, call: AttentionCall) -> torch.Tensor:
        """Return `[tokens, heads, value size]`, fp32."""
        ...


_current: ContextVar[AttentionHandler] = ContextVar("attention_handler")


@contextmanager
def attention_context(handler: AttentionHandler) -> Iterator[None]:
    """Send the attention calls of forward passes inside this context to `handler`."""
    token = _current.set(handler)
    try:
        yield
    finally:
        _current.reset(token)


def register() -> None:
    """Register `attn_implementation="syringa"` with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*, mask_function: Any = None, local_size: int | None = None, **_: Any) -> torch.Tensor:
    window = local_size or 0
    if _current.get().checks_masks:
        _check_mask(mask_function, window)
    return torch.full((1, 1, 1, 1), window)


def _check_mask(mask_function: Any, window: int) -> None:
    def attends(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    if mask_function is None or attends(0, 1):
        raise UnsupportedModel("its attention is not causal")
    if window and not (attends(window, 1) and not attends(window, 0)):
        raise UnsupportedModel("its attention is chunked")


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    if attention_mask is None or attention_mask.dtype != torch.int64 or attention_mask.numel() != 1:
        raise UnsupportedModel("it builds its own attention masks")
    if position_bias is not None:
        raise UnsupportedModel("it adds a position bias to attention")
    call = AttentionCall(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        int(attention_mask),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap or 0.0,
        s_aux,
    )
    return _current.get().attention(call)[None].to(query.dtype), None


@dataclass(frozen=True)
class LayerShape:
    heads: int
    kv_heads: int
    key_size: int
    value_size: int

    @property
    def values_per_token(self) -> int:
        """The larger of the key and value elements of one token."""
        return self.kv_heads * max(self.key_size, self.value_size)


class ShapeProbe:
    """Records the cache shape of each layer during a forward pass without weights."""

    checks_masks = True

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def attention(self, call: AttentionCall) -> torch.Tensor:
        (tokens, heads, size), (keys, kv_heads, key_size) = call.q.shape, call.k.shape
        if keys != tokens or heads % kv_heads or size != key_size or call.v.shape[:2] != call.k.shape[:2]:
            raise UnsupportedModel("the shapes of its queries, keys and values do not match")
        self.layers.append(LayerShape(heads, kv_heads, key_size, call.v.shape[2]))
        return call.q.new_zeros(tokens, heads, call.v.shape[2], dtype=torch.float32)


def cache_heads(layers: list[LayerShape]) -> tuple[int, int]:
    """Return key-value heads and head size of a cache that fits every layer; the layers' own if all are alike."""
    first = layers[0]
    if all((x.kv_heads, x.key_size, x.value_size) == (first.kv_heads, first.key_size, first.key_size) for x in layers):
        return first.kv_heads, first.key_size
    return 1, max(x.values_per_token for x in layers)


class PagedAttention:
    """Attention of one step on a CPU: each call writes keys and values to the cache and attends over it."""

    checks_masks = False

    def __init__(
        self, layers: list[LayerShape], step: StepTensors, cache: CacheTensors, kernels: Kernels | None
    ) -> None:
        self.layers = layers
        self.step = step
        self.cache = cache
        self.kernels = kernels
        self._calls = 0

    def attention(self, call: AttentionCall) -> torch.Tensor:
        shape, stored = self.layers[self._calls], self.cache.layers[self._calls]
        self._calls += 1
        layer = _view(stored, shape)
        write_cache(layer, call.k, call.v, self.step.slot_mapping)
        q = call.q.float().contiguous()
        sinks = call.sinks.float().contiguous() if call.sinks is not None else None
        # The kernel needs contiguous blocks, and keys and values of one size.
        if self.kernels and layer is stored and supports_head_size(shape.key_size):
            out = self._attend(self.kernels, shape, call, q, layer, sinks)
        else:
            out = paged_attention(
                q, layer, self.step, window=call.window, scale=call.scale, softcap=call.softcap, sinks=sinks
            )
        if self.step.images is not None and self.step.images.bidirectional:
            self._attend_bidirectional(self.step.images.bidirectional, call, q, layer, out)
        return out

    def _attend_bidirectional(
        self,
        bidirectional: list[BidirectionalRows],
        call: AttentionCall,
        q: torch.Tensor,
        layer: LayerCache,
        out: torch.Tensor,
    ) -> None:
        """Recompute the rows of images with bidirectional attention, within the layer's window.

        Uses PyTorch, because the kernels are causal. An image is always computed whole, so shapes and the order of sums
        are the same in any batch.
        """
        for rows in bidirectional:
            known = rows.first + rows.end - rows.begin
            k, v = read_cache(layer, rows.table[: -(-known // BLOCK_SIZE)].long(), known)
            visible = None
            if call.window:
                visible = torch.arange(known) > torch.arange(rows.first, known)[:, None] - call.window
            here = slice(rows.begin, rows.end)
            out[here] = attend_rows(q[here], k, v, visible, scale=call.scale, softcap=call.softcap)

    def _attend(
        self,
        kernels: Kernels,
        shape: LayerShape,
        call: AttentionCall,
        q: torch.Tensor,
        layer: LayerCache,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        width = shape.heads * shape.key_size
        out = torch.empty(q.shape[0], width)
        sizes = shape.heads, shape.kv_heads, shape.key_size
        attention = AttentionShape(*sizes, call.window, call.scale, call.softcap, address(sinks))
        half = layer.keys.dtype == torch.bfloat16
        attend(kernels, attention, self.step, layer.keys.data_ptr(), layer.values.data_ptr(), q, width, out, half)
        return out.view(q.shape)


def _view(layer: LayerCache, shape: LayerShape) -> LayerCache:
    """Return a view of a layer's cache with that layer's heads and sizes, using the beginning of each block."""
    keys, values = layer
    if (keys.shape[1], 2 * keys.shape[2]) == (shape.kv_heads, shape.key_size) and shape.key_size == shape.value_size:
        return layer
    heads, blocks = shape.kv_heads, keys.shape[0]
    return LayerCache(
        keys.flatten(1)[:, : heads * shape.key_size * BLOCK_SIZE].view(
            blocks, heads, shape.key_size // 2, BLOCK_SIZE, 2
        ),
        values.flatten(1)[:, : heads * shape.value_size * BLOCK_SIZE].view(
            blocks, heads, BLOCK_SIZE // 2, shape.value_size, 2
        ),
    )
