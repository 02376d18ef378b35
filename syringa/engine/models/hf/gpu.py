"""`transformers`' models on a GPU, behind the interface of `gpu.decoder`, so that the same model runner runs them.

Attention uses the Triton kernels. What they do not cover (keys longer than values, odd head sizes) runs in PyTorch, in
pieces of bounded size. Decode steps are captured as CUDA graphs if a trial capture succeeds.
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

from syringa.engine.gpu.cache import FP8, GpuCache, GpuCacheShape, store_tokens
from syringa.engine.gpu.cuda_graphs import CudaGraphRunner
from syringa.engine.gpu.decoder import ModelInput, PrefillInput
from syringa.engine.gpu.model import GpuModel
from syringa.engine.gpu.ops.base import GpuOps, choose_ops
from syringa.engine.models.hf.attention import AttentionCall, LayerShape, attention_context, cache_heads
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.vision.step_images import BidirectionalRows

logger = logging.getLogger("syringa.worker")

KERNEL_HEAD_SIZES = range(16, 257)  # from the smallest tile of the tensor cores to what fits in shared memory
MAX_SCORES = 1 << 25  # fp32 attention scores that the PyTorch path holds at a time


def move_to_gpu(
    model: Any,
    layers: list[LayerShape],
    vocabulary: int,
    length: int,
    device: torch.device,
    ops: GpuOps | None = None,
) -> GpuModel:
    """Move a model to `device`. On a CPU (in tests), the reference implementations of the kernels run."""
    decoder = HFGpuDecoder(model.to(device), layers, vocabulary, ops or choose_ops(device), device)
    if device.type == "cuda":
        decoder.supports_cuda_graphs = decoder.supports_cuda_graphs and can_capture_graphs(decoder)
    return GpuModel(decoder, decoder.cache_shape, length)


class HFGpuDecoder:
    """A causal language model of `transformers`, with the interface of `GpuDecoder`."""

    supports_fp8 = False
    concurrent_bytes = 0

    def __init__(
        self, model: Any, layers: list[LayerShape], vocabulary: int, ops: GpuOps, device: torch.device
    ) -> None:
        self.model = model
        self.layers = layers
        self.vocabulary = vocabulary
        self.ops = ops
        self.device = device
        self.takes_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.supports_cuda_graphs = all(
            map(_kernels_support, layers)
        )  # in a graph, the PyTorch path would read whole block tables

    @property
    def cache_shape(self) -> GpuCacheShape:
        return GpuCacheShape(len(self.layers), *cache_heads(self.layers), self.model.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self, rows: ModelInput, sampled: torch.Tensor, cache: GpuCache, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.ops.begin_step(len(rows.tokens), False)
        # A negative token (sampling failed) is computed like any other, and its result is discarded.
        tokens = torch.where(
            rows.token_sources >= 0, sampled[rows.token_sources.clamp(min=0).long()], rows.tokens.long()
        )
        tokens = tokens.clamp(min=0)
        positions = (rows.lengths - 1).clamp(min=0) if rows.prefill is None else rows.prefill.positions
        keep_logits = (
            {"logits_to_keep": 0 if rows.logit_rows is None else rows.logit_rows} if self.takes_logits_to_keep else {}
        )
        with attention_context(GpuPagedAttention(self.layers, rows, cache, self.ops)):
            logits: torch.Tensor = self.model(
                **self.model_inputs(tokens, positions, rows),
                attention_mask=torch.ones_like(tokens)[None],
                use_cache=False,
                **keep_logits,
            ).logits[0]
        if not self.takes_logits_to_keep and rows.logit_rows is not None:
            logits = logits[rows.logit_rows]
        return logits.float() if out is None else out.copy_(logits)

    def model_inputs(self, tokens: torch.Tensor, positions: torch.Tensor, rows: ModelInput) -> dict[str, torch.Tensor]:
        """Return the token and position arguments of the model's forward."""
        return {"input_ids": tokens[None], "position_ids": positions.long()[None]}


class GpuPagedAttention:
    """Attention of one step on a GPU: each call writes keys and values to the cache and attends over it."""

    checks_masks = False

    def __init__(self, layers: list[LayerShape], rows: ModelInput, cache: GpuCache, ops: GpuOps) -> None:
        self.layers = layers
        self.rows = rows
        self.cache = cache
        self.ops = ops
        self._calls = 0
        slots = rows.slot_mapping.long()
        # Padding rows repeat the write of the first row.
        self.writers = None
        if rows.prefill is None and rows.logit_rows is None:
            self.writers = torch.arange(len(slots), device=slots.device) * (slots >= 0)
            slots = slots[self.writers]
        self.blocks, self.offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE

    def attention(self, call: AttentionCall) -> torch.Tensor:
        shape, (keys, values) = self.layers[self._calls], self.cache.layers[self._calls]
        self._calls += 1
        keys = _view(keys, shape.kv_heads, shape.key_size)
        values = _view(values, shape.kv_heads, shape.value_size)
        k, v = (call.k, call.v) if self.writers is None else (call.k[self.writers], call.v[self.writers])
        store_tokens(keys, self.blocks, self.offsets, k)
        store_tokens(values, self.blocks, self.offsets, v)
        if _kernels_support(shape):
            out = self._attend_with_kernels(call, shape, keys, values)
        else:
            out = self._attend_with_torch(call, keys, values)
        if self.rows.images is not None:
            for bidirectional in self.rows.images.bidirectional:
                self._attend_bidirectional(bidirectional, call, keys, values, out)
        return out

    def _attend_with_kernels(
        self, call: AttentionCall, shape: LayerShape, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        rows, prefill, num_decodes = self.rows, self.rows.prefill, len(self.rows.lengths)
        q = call.q.to(call.k.dtype if keys.dtype == FP8 else keys.dtype).flatten(1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if num_decodes:
            self.ops.decode_attention(
                q[:num_decodes],
                keys,
                values,
                rows.block_tables,
                rows.lengths,
                shape.heads,
                call.window,
                None,
                out[:num_decodes],
                call.scale,
                call.sinks,
                call.softcap,
            )
        if prefill is not None:
            self.ops.prefill_attention(
                q[num_decodes:],
                keys,
                values,
                prefill.block_tables,
                prefill.tiles,
                prefill.row_starts,
                prefill.first_positions,
                shape.heads,
                call.window,
                out[num_decodes:],
                call.scale,
                call.sinks,
                call.softcap,
            )
        return out.view(call.q.shape)

    def _attend_with_torch(self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        rows, num_decodes = self.rows, len(self.rows.lengths)
        out = call.q.new_empty(*call.q.shape[:2], values.shape[-1], dtype=torch.float32)
        if num_decodes:
            width = rows.block_tables.shape[1] * BLOCK_SIZE
            few = max(1, MAX_SCORES // (width * keys.shape[1] * max(keys.shape[3], values.shape[3])))
            for begin in range(0, num_decodes, few):
                part = slice(begin, min(begin + few, num_decodes))
                known = rows.lengths[part, None]
                q = call.q[part, None]
                out[part] = attend(q, keys, values, rows.block_tables[part], known - 1, known, call)[:, 0]
        for begin, end, table, first, last in self._pieces(call.q.shape[1]):
            at = torch.arange(first, last, device=out.device)[None]
            known = torch.full((1, 1), last, device=out.device)
            q = call.q[None, begin:end]
            out[begin:end] = attend(q, keys, values, table[None], at, known, call)[0]
        return out

    def _attend_bidirectional(
        self,
        bidirectional: BidirectionalRows,
        call: AttentionCall,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Recompute the rows of an image with bidirectional attention, because the kernels are causal."""
        known = bidirectional.first + bidirectional.end - bidirectional.begin
        table = bidirectional.table[None, : -(-known // BLOCK_SIZE)]
        last = torch.full((1, 1), known, device=out.device)
        step = max(1, MAX_SCORES // (call.q.shape[1] * known))
        for row in range(bidirectional.begin, bidirectional.end, step):
            stop = min(row + step, bidirectional.end)
            at = torch.arange(
                bidirectional.first + row - bidirectional.begin,
                bidirectional.first + stop - bidirectional.begin,
                device=out.device,
            )
            q = call.q[None, row:stop]
            out[row:stop] = attend(q, keys, values, table, at[None], last, call, bidirectional=True)[0]

    @cached_property
    def _lengths(self) -> list[tuple[int, int, int]]:
        """(first row, end row, first position) of each prefill sequence. Synchronizes with the device once."""
        prefill = self.rows.prefill
        if prefill is None:
            return []
        pairs = zip(pairwise(prefill.row_starts.tolist()), prefill.first_positions.tolist(), strict=True)
        return [(begin, end, first) for (begin, end), first in pairs]

    def _pieces(self, heads: int) -> Iterator[tuple[int, int, torch.Tensor, int, int]]:
        """Yield prefill rows in pieces: (first row, end row, block table, first position, end position)."""
        prefill: PrefillInput | None = self.rows.prefill
        num_decodes = len(self.rows.lengths)
        for s, (begin, end, first) in enumerate(self._lengths):
            assert prefill is not None
            step = max(1, MAX_SCORES // (heads * (first + end - begin)))
            for row in range(begin, end, step):
                stop = min(row + step, end)
                last = first + stop - begin
                table = prefill.block_tables[s, : -(-last // BLOCK_SIZE)]
                yield num_decodes + row, num_decodes + stop, table, first + row - begin, last


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    at: torch.Tensor,
    known: torch.Tensor,
    call: AttentionCall,
    *,
    bidirectional: bool = False,
) -> torch.Tensor:
    """Attention in PyTorch with every option of a call. Return `[sequences, rows, heads, value size]`, fp32.

    `q`: `[sequences, rows, heads, size]`; `at`: `[sequences, rows]`, the positions of the rows; `known`:
    `[sequences, 1]`, the number of tokens in the cache; `bidirectional`: rows also attend to later ones.
    """
    (count, rows, heads, size), kv_heads = q.shape, keys.shape[1]
    k, v = (cache[tables.long()].transpose(1, 2).flatten(2, 3).float() for cache in (keys, values))
    key = torch.arange(k.shape[2], device=q.device)
    v = v.masked_fill((key >= known)[:, None, :, None], 0.0)  # unwritten memory may hold NaN
    visible = key < known[..., None] if bidirectional else key <= at[..., None]
    if call.window:
        visible = visible & (key > at[..., None] - call.window)
    grouped = q.float().reshape(count, rows, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    scores = grouped @ k[:, :, None].transpose(-1, -2) * call.scale
    if call.softcap:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    if call.sinks is not None:
        sink = call.sinks.float().view(kv_heads, -1, 1, 1).expand(count, -1, -1, rows, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v[:, :, None]).permute(0, 3, 1, 2, 4).reshape(count, rows, heads, -1)


def can_capture_graphs(decoder: HFGpuDecoder) -> bool:
    """Return whether a decode step can be captured as a CUDA graph and its replay gives the same logits."""
    device, cache = decoder.device, decoder.cache_shape.allocate(1)
    zero, one = (torch.full((1,), value, dtype=torch.int32, device=device) for value in (0, 1))
    rows = ModelInput(zero, -one, zero, zero.expand(16)[None].contiguous(), one, position_deltas=zero)
    sampled = torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.zeros(1, decoder.vocabulary, dtype=torch.float32, device=device)

    def step(_: int) -> None:
        decoder.forward(rows, sampled, cache, out)

    graphs = CudaGraphRunner([1], step, device)
    try:
        expected = decoder.forward(rows, sampled, cache)
        with _forbid_synchronization():  # find failures before capture: a failed capture is harder to clean up
            step(1)
        graphs.capture_all()
        out.fill_(float("nan"))
        graphs.run(1)
        return torch.allclose(out, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))
    except RuntimeError as error:
        logger.info("CUDA graphs disabled for this model: %s", str(error).partition("\n")[0])
        return False


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """Make operations that synchronize with the device raise `RuntimeError`."""
    with warnings.catch_warnings():  # torch warns that this mode may miss some
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _kernels_support(shape: LayerShape) -> bool:
    return shape.key_size == shape.value_size and shape.key_size in KERNEL_HEAD_SIZES


def _view(cache: torch.Tensor, kv_heads: int, size: int) -> torch.Tensor:
    """Return a view of the cache with one layer's heads, using the beginning of each block."""
    return cache.flatten(1)[:, : kv_heads * BLOCK_SIZE * size].view(len(cache), kv_heads, BLOCK_SIZE, size)
