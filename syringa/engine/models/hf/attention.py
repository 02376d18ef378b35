"""Our attention inside `transformers`' models: registered under a name, it hands each call to the pass that runs.

A mask never becomes a matrix. Models ask for one per kind of layer, and get a single number, the layer's window (0:
sees everything), which they pass on to attention as they would a mask. Attention calls are told apart by their order
in the forward pass, because that is the same every time, while `layer_idx` is missing or shared in some models.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from syringa.engine.cpu.layers.cache import CacheTensors, LayerCache, read_cache, write_cache
from syringa.engine.cpu.layers.native_ops import attend, runs_natively
from syringa.engine.cpu.layers.ops import attend_rows, paged_attention
from syringa.engine.cpu.native import AttentionShape, Kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from syringa.engine.vision.layout import JointRows

NAME = "syringa"


class Unsupported(Exception):
    """Says what a model does that this engine cannot. It never leaves this path: users see a `ModelError`."""


class Call(NamedTuple):
    """One attention call of a forward pass. Heads are `[tokens, heads, size]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    window: int
    scale: float
    cap: float
    sinks: torch.Tensor | None


class Pass(Protocol):
    """What a forward pass does with its attention calls."""

    checks_masks: bool

    def attention(self, call: Call) -> torch.Tensor:
        """`[tokens, heads, value size]`, fp32."""
        ...


_running: ContextVar[Pass] = ContextVar("running")


@contextmanager
def running(each: Pass) -> Iterator[None]:
    token = _running.set(each)
    try:
        yield
    finally:
        _running.reset(token)


def register() -> None:
    """Makes `attn_implementation="syringa"` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*, mask_function: Any = None, local_size: int | None = None, **_: Any) -> torch.Tensor:
    window = local_size or 0
    if _running.get().checks_masks:
        _check_mask(mask_function, window)
    return torch.full((1, 1, 1, 1), window)


def _check_mask(mask_function: Any, window: int) -> None:
    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0)
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    if mask_function is None or sees(0, 1):
        raise Unsupported("its tokens see those that come after them")
    if window and not (sees(window, 1) and not sees(window, 0)):
        raise Unsupported("its attention is chunked")


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
        raise Unsupported("it masks attention in a way of its own")
    if position_bias is not None:
        raise Unsupported("it adds a position bias to attention")
    call = Call(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        int(attention_mask),
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap or 0.0,
        s_aux,
    )
    return _running.get().attention(call)[None].to(query.dtype), None


@dataclass(frozen=True)
class LayerShape:
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    plain: bool  # neither capped scores nor sinks

    @property
    def numbers(self) -> int:
        """Per token, of keys or values, whichever has more."""
        return self.kv_heads * max(self.key_size, self.value_size)


class Probe:
    """A pass over a model without weights, to learn what its layers ask of the cache."""

    checks_masks = True

    def __init__(self) -> None:
        self.layers: list[LayerShape] = []

    def attention(self, call: Call) -> torch.Tensor:
        (tokens, heads, size), (keys, kv_heads, key_size) = call.q.shape, call.k.shape
        if keys != tokens or heads % kv_heads or size != key_size or call.v.shape[:2] != call.k.shape[:2]:
            raise Unsupported("its queries, keys and values do not fit one another")
        plain = not call.cap and call.sinks is None
        self.layers.append(LayerShape(heads, kv_heads, key_size, call.v.shape[2], plain))
        return call.q.new_zeros(tokens, heads, call.v.shape[2], dtype=torch.float32)


def cache_heads(layers: list[LayerShape]) -> tuple[int, int]:
    """Key-value heads and head size of a cache that every layer fits in: the layers' own where they are all alike."""
    one = layers[0]
    if all((x.kv_heads, x.key_size, x.value_size) == (one.kv_heads, one.key_size, one.key_size) for x in layers):
        return one.kv_heads, one.key_size
    return 1, max(x.numbers for x in layers)


class PagedPass:
    """A step's pass: each call writes its keys and values to the cache, and attends over it."""

    checks_masks = False

    def __init__(
        self, layers: list[LayerShape], step: StepTensors, cache: CacheTensors, kernels: Kernels | None
    ) -> None:
        self.layers = layers
        self.step = step
        self.cache = cache
        self.kernels = kernels
        self.done = 0

    def attention(self, call: Call) -> torch.Tensor:
        shape, stored = self.layers[self.done], self.cache.layers[self.done]
        self.done += 1
        layer = _view(stored, shape)
        write_cache(layer, call.k, call.v, self.step.slots)
        q = call.q.float().contiguous()
        sinks = call.sinks.float() if call.sinks is not None else None
        # The kernel wants a layer's blocks back to back, and keys as long as values.
        if self.kernels and shape.plain and layer is stored and runs_natively(shape.key_size):
            out = self._attend(self.kernels, shape, call, q, layer)
        else:
            out = paged_attention(q, layer, self.step, window=call.window, scale=call.scale, cap=call.cap, sinks=sinks)
        if self.step.pictures is not None and self.step.pictures.joint:
            self._look_around(self.step.pictures.joint, call, q, layer, out)
        return out

    def _look_around(
        self, joint: list[JointRows], call: Call, q: torch.Tensor, layer: LayerCache, out: torch.Tensor
    ) -> None:
        """Computes an image's rows again where they see one another: up to the last of them, and back to the window.

        In plain torch, as the kernels only look back. An image is always computed whole, so the shapes, and with them
        the order of sums, are the same in any batch.
        """
        for rows in joint:
            known = rows.first + rows.end - rows.begin
            k, v = read_cache(layer, rows.table[: -(-known // BLOCK_SIZE)].long(), known)
            visible = None
            if call.window:
                visible = torch.arange(known) > torch.arange(rows.first, known)[:, None] - call.window
            here = slice(rows.begin, rows.end)
            out[here] = attend_rows(q[here], k, v, visible, scale=call.scale, cap=call.cap)

    def _attend(
        self, kernels: Kernels, shape: LayerShape, call: Call, q: torch.Tensor, layer: LayerCache
    ) -> torch.Tensor:
        width = shape.heads * shape.key_size
        out = torch.empty(q.shape[0], width)
        attention = AttentionShape(shape.heads, shape.kv_heads, shape.key_size, call.window, call.scale)
        half = layer.keys.dtype == torch.bfloat16
        attend(kernels, attention, self.step, layer.keys.data_ptr(), layer.values.data_ptr(), q, width, out, half)
        return out.view(q.shape)


def _view(layer: LayerCache, shape: LayerShape) -> LayerCache:
    """The layer's cache with the heads of this layer: the same tensors, or the beginning of each of their blocks."""
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
