# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Attention of many new tokens per sequence over the paged cache, which already holds them: bound by arithmetic.

A program takes a tile of one sequence's rows for one query head and walks over the keys that they see. Which tiles
there are is decided on the host, which knows the lengths; the longest walks come first, so that none starts last.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import overlap, release, wait

ROWS = 128


class PrefillConfig(NamedTuple):
    rows: int = ROWS  # queries per program
    keys: int = 32  # per round
    warps: int = 4
    stages: int = 5  # rounds under way


@triton.jit
def walk(
    q, best, total, gathered, keys_ptr, values_ptr, table, low, high, position, d, rate, block_stride, slot_stride,
    SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Rounds from `low` up to `high`. Not `CAUSAL`: all of these keys precede all of the rows."""
    n = tl.arange(0, KEYS)
    for start in tl.range(low, high, KEYS, num_stages=STAGES):
        at = start + n
        if CAUSAL:
            block = tl.load(table + at // BLOCK_SIZE, at < high, 0).to(tl.int64)
        else:
            block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        cell = (block * block_stride + (at % BLOCK_SIZE) * slot_stride)[:, None] + d
        if CAUSAL:
            k = tl.load(keys_ptr + cell, (at < high)[:, None] & (d < SIZE), 0.0)
        elif d.shape[1] == SIZE:
            k = tl.load(keys_ptr + cell)
        else:
            k = tl.load(keys_ptr + cell, d < SIZE, 0.0)
        scores = tl.dot(q, tl.trans(k))
        if CAUSAL:
            scores = tl.where(at[None, :] <= position[:, None], scores, float("-inf"))
        if WINDOW:
            scores = tl.where(at[None, :] > position[:, None] - WINDOW, scores, float("-inf"))
        better = tl.maximum(best, tl.max(scores, 1) * rate)
        if WINDOW:  # a row may not have seen anything yet
            floor = tl.where(better == float("-inf"), 0.0, better)
        else:
            floor = better
        weights = tl.exp2(scores * rate - floor[:, None])
        fade = tl.exp2(best - floor)
        total = total * fade + tl.sum(weights, 1)
        gathered = gathered * fade[:, None]
        if CAUSAL:
            v = tl.load(values_ptr + cell, (at < high)[:, None] & (d < SIZE), 0.0)
        elif d.shape[1] == SIZE:
            v = tl.load(values_ptr + cell)
        else:
            v = tl.load(values_ptr + cell, d < SIZE, 0.0)
        gathered = tl.dot(weights.to(v.dtype), v, gathered)
        best = better
    return best, total, gathered


@triton.jit
def _prefill_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    tiles_ptr,
    starts_ptr,
    first_ptr,
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
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head, tile = tl.program_id(0), tl.program_id(1)
    release(PDL)
    wait(PDL)
    sequence = tl.load(tiles_ptr + 2 * tile)
    offset = tl.load(tiles_ptr + 2 * tile + 1)
    begin = tl.load(starts_ptr + sequence)
    count = tl.load(starts_ptr + sequence + 1) - begin
    first = tl.load(first_ptr + sequence)
    m = offset + tl.arange(0, ROWS)
    d = tl.arange(0, SPAN)[None, :]
    inside = (m < count)[:, None] & (d < SIZE)
    row = (begin + m).to(tl.int64)[:, None]
    q = tl.load(q_ptr + row * q_stride + head * SIZE + d, inside, 0.0)
    position = first + m
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    kv_head = head // (HEADS // KV_HEADS)
    keys = keys_ptr + kv_head * head_stride
    values = values_ptr + kv_head * head_stride
    rate = scale * 1.44269504  # exp2 is what the hardware has
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, SPAN], tl.float32)
    earliest = first + offset
    low = tl.maximum(earliest - WINDOW + 1, 0) // KEYS * KEYS if WINDOW else 0
    middle = (earliest + 1) // KEYS * KEYS
    high = first + tl.minimum(offset + ROWS, count)
    best, total, gathered = walk(
        q, best, total, gathered, keys, values, table, low, middle, position, d, rate, block_stride, slot_stride,
        SIZE, BLOCK_SIZE, WINDOW, False, KEYS, STAGES,
    )  # fmt: skip
    best, total, gathered = walk(
        q, best, total, gathered, keys, values, table, tl.maximum(low, middle), high, position, d, rate, block_stride,
        slot_stride, SIZE, BLOCK_SIZE, WINDOW, True, KEYS, STAGES,
    )  # fmt: skip
    # Rows past the sequence's end saw nothing in a window: they are divided by one, and not stored.
    result = gathered / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + row * out_stride + head * SIZE + d, result.to(out_ptr.dtype.element_ty), inside)


def query_tiles(starts: Sequence[int], first: Sequence[int], rows: int = ROWS) -> torch.Tensor:
    """`[tiles, 2]` int32, on the host: a sequence and an offset into its rows each, the longest walks first."""
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
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Rows that begin with `[q …]`, normed and turned: those of sequence s are `starts[s]` up to `starts[s + 1]`, from
    position `first[s]` on. `[tokens, heads · size]`.

    `tiles` is `query_tiles` of the config's rows, on the device; `starts`, `first`, `tables`: int32. `keys`, `values`:
    `[blocks, kv_heads, block, size]`, alike in strides.
    """
    _, kv_heads, block, size = keys.shape
    config = choose(size) if config is None else config
    out = q.new_empty(len(q), heads * size) if out is None else out
    _prefill_kernel[(heads, len(tiles))](
        q,
        keys,
        values,
        tables,
        tiles,
        starts,
        first,
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
        SIZE=size,
        BLOCK_SIZE=block,
        WINDOW=window,
        ROWS=config.rows,
        SPAN=triton.next_power_of_2(size),
        KEYS=config.keys,
        STAGES=config.stages,
        num_warps=config.warps,
        **overlap(pdl),
    )
    return out


def choose(size: int) -> PrefillConfig:
    """By what was measured on an H200; larger heads need more threads to hold them. The rows are always the same."""
    return PrefillConfig() if size <= 128 else PrefillConfig(warps=8, stages=3)
