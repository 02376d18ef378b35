"""`transformers`' models on a GPU: by `gpu.decoder`'s contract, so that the same runner takes their steps.

Attention is by the kernels. What these do not cover (capped scores, sinks, keys longer than values, odd sizes) is in
plain PyTorch, in pieces of a bounded size. A definition is hundreds of small operations, so that steps are recorded
where nothing in them waits for the host, which is found out by trying.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from syringa.engine.gpu.cache import GpuCache, GpuCacheShape
from syringa.engine.gpu.decoder import Later, Rows
from syringa.engine.gpu.graphs import StepGraphs
from syringa.engine.gpu.model import GpuModel
from syringa.engine.gpu.ops.base import Ops, choose_ops
from syringa.engine.models.hf.attention import Call, LayerShape, cache_heads, running
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.vision.layout import JointRows

logger = logging.getLogger("syringa.worker")

KERNEL_SIZES = range(16, 257)  # of heads: what the matrix units take at the least, and what fits beside them
CELLS = 1 << 25  # scores that plain PyTorch holds at a time, fp32


def on_device(
    model: Any,
    layers: list[LayerShape],
    vocabulary: int,
    length: int,
    device: torch.device,
    ops: Ops | None = None,
) -> GpuModel:
    """Moves a model there. Tests do without a GPU: by the kernels' references, on a CPU."""
    decoder = BreadthDecoder(model.to(device), layers, vocabulary, ops or choose_ops(device), device)
    if device.type == "cuda":
        decoder.recordable = decoder.recordable and records(decoder)
    return GpuModel(decoder, decoder.cache_shape, length)


class BreadthDecoder:
    halvable = False
    beside = 0

    def __init__(self, model: Any, layers: list[LayerShape], vocabulary: int, ops: Ops, device: torch.device) -> None:
        self.model = model
        self.layers = layers
        self.vocabulary = vocabulary
        self.ops = ops
        self.device = device
        self.narrows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.recordable = all(map(_suits_kernels, layers))  # the plain way looks at all that a table could hold

    @property
    def cache_shape(self) -> GpuCacheShape:
        return GpuCacheShape(len(self.layers), *cache_heads(self.layers), self.model.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, rows: Rows, drawn: torch.Tensor, cache: GpuCache, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.ops.begin(len(rows.tokens), False)
        # What could not be drawn (a negative token) is computed as any other, and thrown away.
        tokens = torch.where(rows.sources >= 0, drawn[rows.sources.clamp(min=0).long()], rows.tokens.long())
        tokens = tokens.clamp(min=0)
        positions = (rows.lengths - 1).clamp(min=0) if rows.later is None else rows.later.positions
        narrowing = {"logits_to_keep": 0 if rows.wanted is None else rows.wanted} if self.narrows else {}
        with running(DevicePass(self.layers, rows, cache, self.ops)):
            logits: torch.Tensor = self.model(
                **self.given(tokens, positions, rows),
                attention_mask=torch.ones_like(tokens)[None],
                use_cache=False,
                **narrowing,
            ).logits[0]
        if not self.narrows and rows.wanted is not None:
            logits = logits[rows.wanted]
        return logits.float() if out is None else out.copy_(logits)

    def given(self, tokens: torch.Tensor, positions: torch.Tensor, rows: Rows) -> dict[str, torch.Tensor]:
        """What the model is called with."""
        return {"input_ids": tokens[None], "position_ids": positions.long()[None]}


class DevicePass:
    """A step's pass: each call stores its keys and values, and attends over the cache."""

    checks_masks = False

    def __init__(self, layers: list[LayerShape], rows: Rows, cache: GpuCache, ops: Ops) -> None:
        self.layers = layers
        self.rows = rows
        self.cache = cache
        self.ops = ops
        self.done = 0
        slots = rows.slots.long()
        # Rows that do nothing write what the first row writes, to the same place.
        self.writers = None
        if rows.later is None and rows.wanted is None:
            self.writers = torch.arange(len(slots), device=slots.device) * (slots >= 0)
            slots = slots[self.writers]
        self.blocks, self.offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

    def attention(self, call: Call) -> torch.Tensor:
        shape, (keys, values) = self.layers[self.done], self.cache.layers[self.done]
        self.done += 1
        keys = _view(keys, shape.kv_heads, shape.key_size)
        values = _view(values, shape.kv_heads, shape.value_size)
        k, v = (call.k, call.v) if self.writers is None else (call.k[self.writers], call.v[self.writers])
        keys[self.blocks, :, self.offsets] = k.to(keys.dtype)
        values[self.blocks, :, self.offsets] = v.to(values.dtype)
        if _suits_kernels(shape):
            out = self._by_kernels(call, shape, keys, values)
        else:
            out = self._by_torch(call, keys, values)
        if self.rows.pictures is not None:
            for joint in self.rows.pictures.joint:
                self._look_around(joint, call, keys, values, out)
        return out

    def _by_kernels(self, call: Call, shape: LayerShape, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows, later, leading = self.rows, self.rows.later, len(self.rows.lengths)
        q = call.q.to(keys.dtype).flatten(1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if leading:
            self.ops.decode_attention(
                q[:leading],
                keys,
                values,
                rows.tables,
                rows.lengths,
                shape.heads,
                call.window,
                None,
                out[:leading],
                call.scale,
            )
        if later is not None:
            self.ops.prefill_attention(
                q[leading:],
                keys,
                values,
                later.tables,
                later.tiles,
                later.starts,
                later.first,
                shape.heads,
                call.window,
                out[leading:],
                call.scale,
            )
        return out.view(call.q.shape)

    def _by_torch(self, call: Call, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows, leading = self.rows, len(self.rows.lengths)
        out = call.q.new_empty(*call.q.shape[:2], values.shape[-1], dtype=torch.float32)
        if leading:
            width = rows.tables.shape[1] * BLOCK_SIZE
            few = max(1, CELLS // (width * keys.shape[1] * max(keys.shape[3], values.shape[3])))
            for begin in range(0, leading, few):
                part = slice(begin, min(begin + few, leading))
                known = rows.lengths[part, None]
                q = call.q[part, None]
                out[part] = attend(q, keys, values, rows.tables[part], known - 1, known, call)[:, 0]
        for begin, end, table, first, last in self._pieces(call.q.shape[1]):
            at = torch.arange(first, last, device=out.device)[None]
            known = torch.full((1, 1), last, device=out.device)
            q = call.q[None, begin:end]
            out[begin:end] = attend(q, keys, values, table[None], at, known, call)[0]
        return out

    def _look_around(
        self, joint: JointRows, call: Call, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Computes an image's rows again where they see one another: the kernels only look back."""
        known = joint.first + joint.end - joint.begin
        table = joint.table[None, : -(-known // BLOCK_SIZE)]
        last = torch.full((1, 1), known, device=out.device)
        step = max(1, CELLS // (call.q.shape[1] * known))
        for row in range(joint.begin, joint.end, step):
            stop = min(row + step, joint.end)
            at = torch.arange(joint.first + row - joint.begin, joint.first + stop - joint.begin, device=out.device)
            q = call.q[None, row:stop]
            out[row:stop] = attend(q, keys, values, table, at[None], last, call, ahead=True)[0]

    @cached_property
    def _lengths(self) -> list[tuple[int, int, int]]:
        """Of sequences that add several tokens: rows, and the first one's position. Waits for the device, once."""
        later = self.rows.later
        if later is None:
            return []
        pairs = zip(pairwise(later.starts.tolist()), later.first.tolist(), strict=True)
        return [(begin, end, first) for (begin, end), first in pairs]

    def _pieces(self, heads: int) -> Iterator[tuple[int, int, torch.Tensor, int, int]]:
        """As (first row, end, its sequence's blocks, position of the first row, that behind the last)."""
        later: Later | None = self.rows.later
        leading = len(self.rows.lengths)
        for s, (begin, end, first) in enumerate(self._lengths):
            assert later is not None
            step = max(1, CELLS // (heads * (first + end - begin)))
            for row in range(begin, end, step):
                stop = min(row + step, end)
                last = first + stop - begin
                table = later.tables[s, : -(-last // BLOCK_SIZE)]
                yield leading + row, leading + stop, table, first + row - begin, last


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    at: torch.Tensor,
    known: torch.Tensor,
    call: Call,
    *,
    ahead: bool = False,
) -> torch.Tensor:
    """`[sequences, rows, heads, value size]`, fp32, by all that a call can ask for.

    `q`: `[sequences, rows, heads, size]`; `at`: `[sequences, rows]`, their positions; `known`: `[sequences, 1]`, how
    many tokens the cache has; `ahead`: whether rows also see those of them that come later.
    """
    (count, rows, heads, size), kv_heads = q.shape, keys.shape[1]
    k, v = (cache[tables.long()].transpose(1, 2).flatten(2, 3).float() for cache in (keys, values))
    key = torch.arange(k.shape[2], device=q.device)
    v = v.masked_fill((key >= known)[:, None, :, None], 0.0)  # nobody has written there: it may be no number
    visible = key < known[..., None] if ahead else key <= at[..., None]
    if call.window:
        visible = visible & (key > at[..., None] - call.window)
    grouped = q.float().reshape(count, rows, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    scores = grouped @ k[:, :, None].transpose(-1, -2) * call.scale
    if call.cap:
        scores = call.cap * torch.tanh(scores / call.cap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if call.sinks is not None:
        sink = call.sinks.float().view(kv_heads, -1, 1, 1).expand(count, -1, -1, rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v[:, :, None]).permute(0, 3, 1, 2, 4).reshape(count, rows, heads, -1)


def records(decoder: BreadthDecoder) -> bool:
    """Whether a step of one token each can be recorded, and then computes what it does otherwise."""
    device, cache = decoder.device, decoder.cache_shape.allocate(1)
    zero, one = (torch.full((1,), value, dtype=torch.int32, device=device) for value in (0, 1))
    rows = Rows(zero, -one, zero, zero.expand(16)[None].contiguous(), one, shifts=zero)
    drawn = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.zeros(1, decoder.vocabulary, dtype=torch.float32, device=device)

    def step(_: int) -> None:
        decoder.forward(rows, drawn, cache, out)

    graphs = StepGraphs([1], step, device)
    try:
        expected = decoder.forward(rows, drawn, cache)
        with _waiting_refused():  # a recording that fails leaves more behind
            step(1)
        graphs.capture()
        out.fill_(float("nan"))
        graphs.run(1)
        return torch.allclose(out, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    except RuntimeError as error:
        logger.info("steps are not recorded as CUDA graphs: %s", str(error).partition("\n")[0])
        return False


@contextmanager
def _waiting_refused() -> Iterator[None]:
    """Raises `RuntimeError` where an operation waits for the device."""
    with warnings.catch_warnings():  # that it may miss some
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _suits_kernels(shape: LayerShape) -> bool:
    return shape.plain and shape.key_size == shape.value_size and shape.key_size in KERNEL_SIZES


def _view(cache: torch.Tensor, kv_heads: int, size: int) -> torch.Tensor:
    """The cache with the heads of one layer: as it is, or the beginning of each of its blocks."""
    return cache.flatten(1)[:, : kv_heads * BLOCK_SIZE * size].view(len(cache), kv_heads, BLOCK_SIZE, size)
