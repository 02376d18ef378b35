# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Prefill attention. Bound by arithmetic.

A program handles a tile of one sequence's rows for one query head and iterates over the keys that they see. The paged
cache holds all keys, the new tokens' too. Where the rows are `[q | k | v]`, keys of this step are read from there: they
are tiles of a matrix, which tensor descriptors load, in 0.75 of the time (H200, prompts of 580 to 8,192 tokens). The
host, which knows the lengths, lists the tiles, the longest first, so that none of those starts last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from syringa.engine.gpu.kernels.launch import (
    has_large_shared_memory,
    pdl_launch_dependents,
    pdl_options,
    pdl_wait,
    shared_memory,
)

ROWS = 128
WIDE_SHARED_MEMORY = 105 << 10  # of 32 keys of 256 numbers of 16 bits in three stages


class PrefillConfig(NamedTuple):
    rows: int = ROWS  # queries per program
    keys: int = 32  # of the cache per iteration
    warps: int = 4
    stages: int = 5  # iterations in flight
    row_keys: int = 64  # of the rows per iteration
    row_stages: int = 2


@triton.jit
def soft_cap(scores, qk_scale, SOFTCAP: tl.constexpr):
    """Return scores so that c · tanh(s / c) of the scaled ones results when they are scaled by `qk_scale`."""
    # tanh(x) is 2 · sigmoid(2 x) - 1; `qk_scale` contains log2(e).
    tanh = 2.0 * tl.sigmoid(scores * (qk_scale * (2 * 0.69314718 / SOFTCAP))) - 1.0
    return tanh * (SOFTCAP * 1.44269504 / qk_scale)


@triton.jit
def attend_keys(
    q, running_max, running_sum, acc, keys_ptr, values_ptr, table, low, high, position, dim, qk_scale, block_stride,
    slot_stride, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Accumulate the cached keys from `low` up to `high`. Without `MASKED` all of them precede all rows."""
    n = tl.arange(0, KEYS)
    if keys_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)  # FP8 becomes fp16, exactly, in one instruction, and bf16 in several
    for start in tl.range(low, high, KEYS, num_stages=STAGES):
        key_position = start + n
        if MASKED:
            block = tl.load(table + key_position // BLOCK_SIZE, key_position < high, 0).to(tl.int64)
        else:
            block = tl.load(table + key_position // BLOCK_SIZE).to(tl.int64)
        kv_offset = (block * block_stride + (key_position % BLOCK_SIZE) * slot_stride)[:, None] + dim
        if MASKED:
            k = tl.load(keys_ptr + kv_offset, (key_position < high)[:, None] & (dim < HEAD_DIM), 0.0)
        elif dim.shape[1] == HEAD_DIM:
            k = tl.load(keys_ptr + kv_offset)
        else:
            k = tl.load(keys_ptr + kv_offset, dim < HEAD_DIM, 0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)))
        weights, rescale, running_max, running_sum = _softmax_step(
            scores, running_max, running_sum, key_position, position, high, qk_scale, WINDOW, SOFTCAP, MASKED
        )
        acc = acc * rescale[:, None]
        if MASKED:
            v = tl.load(values_ptr + kv_offset, (key_position < high)[:, None] & (dim < HEAD_DIM), 0.0)
        elif dim.shape[1] == HEAD_DIM:
            v = tl.load(values_ptr + kv_offset)
        else:
            v = tl.load(values_ptr + kv_offset, dim < HEAD_DIM, 0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc)
    return running_max, running_sum, acc


@triton.jit
def _attend_rows(
    q, running_max, running_sum, acc, kv_desc, begin, key_column, value_column, low, high, position, qk_scale,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Accumulate keys of the rows from `begin` on, like `attend_keys`. `TAIL`: `high` ends the sequence in a tile."""
    for start in tl.range(low, high, KEYS, num_stages=STAGES):
        key_position = start + tl.arange(0, KEYS)
        k = kv_desc.load([begin + start, key_column])
        scores = tl.dot(q, tl.trans(k))
        weights, rescale, running_max, running_sum = _softmax_step(
            scores, running_max, running_sum, key_position, position, high, qk_scale, WINDOW, SOFTCAP, MASKED
        )
        acc = acc * rescale[:, None]
        v = kv_desc.load([begin + start, value_column])
        if TAIL:  # rows of the next sequence, which may not be finite
            v = tl.where((key_position < high)[:, None], v, 0.0)
        acc = tl.dot(weights.to(q.dtype), v, acc)
    return running_max, running_sum, acc


@triton.jit
def _softmax_step(scores, running_max, running_sum, key_position, position, high, qk_scale, WINDOW: tl.constexpr,
                  SOFTCAP: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """Return the weights of more keys, the factor for what was summed before, and the new maximum and sum."""
    if SOFTCAP > 0:
        scores = soft_cap(scores, qk_scale, SOFTCAP)
    if MASKED:
        visible = (key_position[None, :] <= position[:, None]) & (key_position < high)[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    if WINDOW:
        scores = tl.where(key_position[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
    new_max = tl.maximum(running_max, tl.max(scores, 1) * qk_scale)
    if WINDOW:  # a row may have no visible key yet
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        safe_max = new_max
    weights = tl.exp2(scores * qk_scale - safe_max[:, None])
    rescale = tl.exp2(running_max - safe_max)
    return weights, rescale, new_max, running_sum * rescale + tl.sum(weights, 1)


@triton.jit
def add_sinks(running_max, running_sum, acc, sink):
    """Add a logit to the denominator of each row's softmax, once, after all keys."""
    sink = sink.to(tl.float32) * 1.44269504  # log2(e)
    new_max = tl.maximum(running_max, sink)
    rescale = tl.exp2(running_max - new_max)
    return running_sum * rescale + tl.exp2(sink - new_max), acc * rescale[:, None]


@triton.jit
def _prefill_kernel(
    q_ptr,
    q_desc,  # with FROM_ROWS: of the rows, with tiles of queries
    kv_desc,  # the same with tiles of keys
    keys_ptr,
    values_ptr,
    tables_ptr,
    tiles_ptr,
    starts_ptr,
    first_ptr,
    sinks_ptr,
    out_ptr,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    FROM_ROWS: tl.constexpr,  # whether keys of this step are read from the rows, `[q | k | v]`
    FROM_CACHE: tl.constexpr,  # whether any other keys are seen
    ROWS: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_KEYS: tl.constexpr,
    ROW_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    sequence = tl.load(tiles_ptr + 2 * tile)
    offset = tl.load(tiles_ptr + 2 * tile + 1)
    begin = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - begin
    m = offset + tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    mask = (m < count)[:, None] & (dim < HEAD_DIM)
    row = (begin + m).to(tl.int64)[:, None]
    kv_head = head // (HEADS // KV_HEADS)
    qk_scale = scale * 1.44269504  # log2(e): the hardware computes exp2
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32)
    if FROM_ROWS:
        q = q_desc.load([begin + offset, head * HEAD_DIM])
    else:
        q = tl.load(q_ptr + row * q_stride + head * HEAD_DIM + dim, mask, 0.0)
    if FROM_CACHE:
        first = tl.load(first_ptr + sequence)
        position = first + m
        table = tables_ptr + sequence.to(tl.int64) * table_stride
        keys = keys_ptr + kv_head * head_stride
        values = values_ptr + kv_head * head_stride
        earliest = first + offset
        low = tl.maximum(earliest - WINDOW + 1, 0) // KEYS * KEYS if WINDOW else 0
        if FROM_ROWS:
            middle, high = first // KEYS * KEYS, first
        else:
            middle, high = (earliest + 1) // KEYS * KEYS, first + tl.minimum(offset + ROWS, count)
        running_max, running_sum, acc = attend_keys(
            q, running_max, running_sum, acc, keys, values, table, low, middle, position, dim, qk_scale, block_stride,
            slot_stride, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, False, KEYS, STAGES,
        )  # fmt: skip
        running_max, running_sum, acc = attend_keys(
            q, running_max, running_sum, acc, keys, values, table, tl.maximum(low, middle), high, position, dim,
            qk_scale, block_stride, slot_stride, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, True, KEYS, STAGES,
        )  # fmt: skip
    if FROM_ROWS:  # keys are counted from `begin` now
        row_low = tl.maximum(offset - WINDOW + 1, 0) // ROW_KEYS * ROW_KEYS if WINDOW else 0
        row_middle = (offset + 1) // ROW_KEYS * ROW_KEYS
        row_high = tl.minimum(offset + ROWS, count)
        tail = count // ROW_KEYS * ROW_KEYS
        key_column = (HEADS + kv_head) * HEAD_DIM
        value_column = key_column + KV_HEADS * HEAD_DIM
        running_max, running_sum, acc = _attend_rows(
            q, running_max, running_sum, acc, kv_desc, begin, key_column, value_column, row_low, row_middle, m,
            qk_scale, WINDOW, SOFTCAP, False, False, ROW_KEYS, ROW_STAGES,
        )  # fmt: skip
        row_low = tl.maximum(row_low, row_middle)
        running_max, running_sum, acc = _attend_rows(
            q, running_max, running_sum, acc, kv_desc, begin, key_column, value_column, row_low,
            tl.minimum(row_high, tail), m, qk_scale, WINDOW, SOFTCAP, True, False, ROW_KEYS, ROW_STAGES,
        )  # fmt: skip
        running_max, running_sum, acc = _attend_rows(
            q, running_max, running_sum, acc, kv_desc, begin, key_column, value_column, tl.maximum(row_low, tail),
            row_high, m, qk_scale, WINDOW, SOFTCAP, True, True, ROW_KEYS, 1,
        )  # fmt: skip
    if SINKS:
        running_sum, acc = add_sinks(running_max, running_sum, acc, tl.load(sinks_ptr + head))
    # Rows past the end of the sequence may have no visible key: avoid a division by zero, they are not stored.
    result = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    tl.store(out_ptr + row * out_stride + head * HEAD_DIM + dim, result.to(out_ptr.dtype.element_ty), mask)


def query_tiles(starts: Sequence[int], first: Sequence[int], rows: int = ROWS) -> torch.Tensor:
    """Return the tiles as `[tiles, 2]` int32 on the host: sequence and offset into its rows, most keys first."""
    tiles = [(s, offset) for s, (begin, end) in enumerate(pairwise(starts)) for offset in range(0, end - begin, rows)]
    tiles.sort(key=lambda tile: -(first[tile[0]] + tile[1]))
    return torch.from_numpy(np.array(tiles, dtype=np.int32).reshape(-1, 2))


def prefill_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    starts: torch.Tensor,
    first: torch.Tensor,
    heads: int,
    *,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    from_rows: bool = False,
    from_cache: bool = True,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the attention of the rows of all tiles, `[tokens, heads · size]`.

    `q`: rows that begin with normalized and rotated queries. Sequence s has the rows `starts[s]` up to `starts[s + 1]`,
    at positions from `first[s]` on. `tiles`: `query_tiles` for the configured rows, on the device; `starts`, `first`,
    `tables`: int32. `keys`, `values`: `[blocks, kv_heads, block, size]`, the dtype of `q` or FP8, equal strides.
    `sinks`: a logit per head that joins the denominator of the softmax. `softcap`: a score s becomes
    softcap · tanh(s / softcap); 0: none. `from_rows`: keys of this step are read from `q`, for which `has_all_keys`
    holds. `from_cache`: whether there are other keys, or `from_rows` is not set.
    """
    _, kv_heads, block, size = keys.shape
    config = choose_config(size, keys.dtype) if config is None else config
    out = q.new_empty(len(q), heads * size) if out is None else out
    _prefill_kernel[(heads, len(tiles))](
        q,
        TensorDescriptor.from_tensor(q, [config.rows, size]) if from_rows else q,
        TensorDescriptor.from_tensor(q, [config.row_keys, size]) if from_rows else q,
        keys,
        values,
        tables,
        tiles,
        starts,
        first,
        q if sinks is None else sinks,
        out,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        size**-0.5 if scale is None else scale,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=size,
        BLOCK_SIZE=block,
        WINDOW=window,
        SINKS=sinks is not None,
        SOFTCAP=softcap,
        FROM_ROWS=from_rows,
        FROM_CACHE=from_cache,
        ROWS=config.rows,
        PADDED_HEAD_DIM=triton.next_power_of_2(size),
        KEYS=config.keys,
        STAGES=config.stages,
        ROW_KEYS=config.row_keys,
        ROW_STAGES=config.row_stages,
        num_warps=config.warps,
        **pdl_options(pdl),
    )
    return out


def has_all_keys(rows: torch.Tensor, keys: torch.Tensor) -> bool:
    """Return whether `[q | k | v]` rows have the keys that a cache has, and descriptors can load them."""
    size = keys.shape[3]  # FP8 would round
    return keys.dtype == rows.dtype and size == triton.next_power_of_2(size)


def choose_config(size: int, cache: torch.dtype = torch.bfloat16) -> PrefillConfig:
    """Return the configuration measured best on an H200. The rows per tile do not depend on the arguments."""
    if size > 128:
        if has_large_shared_memory():
            return PrefillConfig(keys=64, warps=8, stages=2)
        is_small = 0 < shared_memory() < WIDE_SHARED_MEMORY and cache.itemsize > 1
        return PrefillConfig(keys=16 if is_small else 32, warps=8, stages=3)
    row_stages = 3 if size <= 64 else 2
    if cache.itemsize == 1:
        return PrefillConfig(keys=64, stages=4, row_stages=row_stages)
    return PrefillConfig(row_stages=row_stages)
