# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Batch-invariant decode attention: the same bits as the token would get as a row of a prefill.

Iterates over the keys in the same order and steps as `prefill_attention`, without splits, whose number would depend on
the batch. The query heads that share a key-value head are the rows of one tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait
from syringa.engine.gpu.kernels.prefill_attention import add_sinks, attend_keys, choose_config

MIN_TILE_ROWS = 64  # smaller tiles use other instructions, which may sum in another order


@triton.jit
def _batch_invariant_decode_kernel(
    q_ptr,
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
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
    ROWS: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    group: tl.constexpr = HEADS // KV_HEADS
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    length = tl.load(lengths_ptr + sequence)
    m = tl.arange(0, ROWS)
    dim = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    mask = (m < group)[:, None] & (dim < HEAD_DIM)
    offset = (kv_head * group + m)[:, None] * HEAD_DIM + dim
    running_max = tl.full([ROWS], float("-inf"), tl.float32)
    running_sum = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32)
    if length > 0:
        q = tl.load(q_ptr + sequence * q_stride + offset, mask, 0.0)
        position = length - 1 + tl.zeros([ROWS], tl.int32)
        table = tables_ptr + sequence * table_stride
        keys = keys_ptr + kv_head * head_stride
        values = values_ptr + kv_head * head_stride
        qk_scale = scale * 1.44269504  # log2(e): the hardware computes exp2
        low = tl.maximum(length - WINDOW, 0) // KEYS * KEYS if WINDOW else 0
        middle = length // KEYS * KEYS
        running_max, running_sum, acc = attend_keys(
            q, running_max, running_sum, acc, keys, values, table, low, middle, position, dim, qk_scale, block_stride,
            slot_stride, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, False, KEYS, STAGES,
        )  # fmt: skip
        running_max, running_sum, acc = attend_keys(
            q, running_max, running_sum, acc, keys, values, table, tl.maximum(low, middle), length, position, dim,
            qk_scale, block_stride, slot_stride, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFTCAP, True, KEYS, STAGES,
        )  # fmt: skip
        if SINKS:
            sink = tl.load(sinks_ptr + kv_head * group + m, m < group, 0.0)
            running_sum, acc = add_sinks(running_max, running_sum, acc, sink)
    result = acc / tl.where(running_sum > 0, running_sum, 1.0)[:, None]
    tl.store(out_ptr + sequence * out_stride + offset, result.to(out_ptr.dtype.element_ty), mask)


def batch_invariant_decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    heads: int,
    *,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`decode_attention` for tokens whose keys and values are already in the cache."""
    _, kv_heads, block, size = keys.shape
    config = choose_config(size, keys.dtype)
    out = q.new_empty(len(lengths), heads * size) if out is None else out
    _batch_invariant_decode_kernel[(len(lengths), kv_heads)](
        q,
        keys,
        values,
        tables,
        lengths,
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
        ROWS=max(MIN_TILE_ROWS, triton.next_power_of_2(heads // kv_heads)),
        PADDED_HEAD_DIM=triton.next_power_of_2(size),
        KEYS=config.keys,
        STAGES=config.stages,
        num_warps=4,
        **pdl_options(pdl),
    )
    return out
