# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Attention of one new token per sequence, to the bits that it would have as one row of a prompt.

It walks over the keys as `prefill` does, from the first on and as many at a time; no stretches side by side, whose
number would depend on the batch. The query heads that share a key-value head are rows of one tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import overlap, release, wait
from syringa.engine.gpu.kernels.prefill_attention import choose, walk

LEAST_ROWS = 64  # fewer are other instructions, for whose sums nobody vouches


@triton.jit
def _row_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
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
    group: tl.constexpr = HEADS // KV_HEADS
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    release(PDL)
    wait(PDL)
    length = tl.load(lengths_ptr + sequence)
    m = tl.arange(0, ROWS)
    d = tl.arange(0, SPAN)[None, :]
    inside = (m < group)[:, None] & (d < SIZE)
    at = (kv_head * group + m)[:, None] * SIZE + d
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    gathered = tl.zeros([ROWS, SPAN], tl.float32)
    if length > 0:
        q = tl.load(q_ptr + sequence * q_stride + at, inside, 0.0)
        position = length - 1 + tl.zeros([ROWS], tl.int32)
        table = tables_ptr + sequence * table_stride
        keys = keys_ptr + kv_head * head_stride
        values = values_ptr + kv_head * head_stride
        rate = scale * 1.44269504  # exp2 is what the hardware has
        low = tl.maximum(length - WINDOW, 0) // KEYS * KEYS if WINDOW else 0
        middle = length // KEYS * KEYS
        best, total, gathered = walk(
            q, best, total, gathered, keys, values, table, low, middle, position, d, rate, block_stride, slot_stride,
            SIZE, BLOCK_SIZE, WINDOW, False, KEYS, STAGES,
        )  # fmt: skip
        best, total, gathered = walk(
            q, best, total, gathered, keys, values, table, tl.maximum(low, middle), length, position, d, rate,
            block_stride, slot_stride, SIZE, BLOCK_SIZE, WINDOW, True, KEYS, STAGES,
        )  # fmt: skip
    result = gathered / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + sequence * out_stride + at, result.to(out_ptr.dtype.element_ty), inside)


def row_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    heads: int,
    *,
    window: int = 0,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`decode_attention`'s contract, for tokens that are in the cache."""
    _, kv_heads, block, size = keys.shape
    config = choose(size)
    out = q.new_empty(len(lengths), heads * size) if out is None else out
    _row_kernel[(len(lengths), kv_heads)](
        q,
        keys,
        values,
        tables,
        lengths,
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
        ROWS=max(LEAST_ROWS, triton.next_power_of_2(heads // kv_heads)),
        SPAN=triton.next_power_of_2(size),
        KEYS=config.keys,
        STAGES=config.stages,
        num_warps=4,
        **overlap(pdl),
    )
    return out
