# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Decode attention over the paged cache: one new token per sequence. Bound by reading keys and values.

A program handles the query heads that share a key-value head, for one split of a sequence, so that every key is read
once. The splits of a long sequence run in parallel; the last one to finish combines them, in a fixed order. The program
of the last split can also normalize, rotate and store the new token's key and value, so that no other kernel is needed
between the QKV projection and attention.

The grid depends on the batch size alone and lengths are read on the device, so one CUDA graph serves all lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import get_workspace, pdl_launch_dependents, pdl_options, pdl_wait, prefetch_l2
from syringa.engine.gpu.kernels.prefill_attention import add_sinks, soft_cap
from syringa.engine.gpu.kernels.rotary import to_cache_dtype


class DecodeConfig(NamedTuple):
    splits: int  # programs that may share a sequence
    min_keys_per_split: int = 1
    keys: int = 64  # per iteration
    warps: int = 4
    stages: int = 2  # iterations in flight
    registers: int = 128  # maximum per thread: four programs of four warps then share a multiprocessor


@triton.jit
def _split_range(length, split, splits, min_keys_per_split, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Return the key range of a split and the number of non-empty splits. Depends on the length alone."""
    begin = tl.maximum(length - WINDOW, 0) // KEYS * KEYS if WINDOW else 0
    split_length = tl.maximum(tl.cdiv(tl.cdiv(length - begin, KEYS), splits), tl.cdiv(min_keys_per_split, KEYS)) * KEYS
    low = begin + split * split_length
    return low, tl.minimum(low + split_length, length), tl.cdiv(length - begin, tl.maximum(split_length, 1))


@triton.jit
def _prefetch_keys(keys_ptr, values_ptr, table, low, high, block_stride, slot_stride, HEAD_DIM: tl.constexpr,
                   BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Prefetch the keys and values of two iterations. Runs before `pdl_wait`: a stale length or table is harmless."""
    key_position = low + tl.arange(0, 2 * KEYS)
    block = tl.load(table + key_position // BLOCK_SIZE, key_position < high, 0).to(tl.int64)
    kv_offset = block * block_stride + (key_position % BLOCK_SIZE) * slot_stride
    line_size: tl.constexpr = 1024 // keys_ptr.dtype.element_ty.primitive_bitwidth
    for line in tl.static_range(0, HEAD_DIM, line_size):
        prefetch_l2(keys_ptr + kv_offset + line, key_position < high, PDL)
        prefetch_l2(values_ptr + kv_offset + line, key_position < high, PDL)


@triton.jit
def _norm_and_rotate(head_ptr, weight_ptr, cosine_ptr, sine_ptr, dim, mask, eps, HEAD_DIM: tl.constexpr,
                     ROTARY_HALF: tl.constexpr, NORM: tl.constexpr, ROTATE: tl.constexpr):  # fmt: skip
    """Return normalized and rotated heads, `[rows, head size]`. The other half of a rotated pair is loaded again."""
    x = tl.load(head_ptr + dim, mask, 0.0).to(tl.float32)
    partner = tl.where(dim < ROTARY_HALF, dim + ROTARY_HALF, dim - ROTARY_HALF)
    rotary_mask = mask & (dim < 2 * ROTARY_HALF)
    if ROTATE:
        y = tl.load(head_ptr + partner, rotary_mask, 0.0).to(tl.float32)
    if NORM:
        inv_rms = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x = x * inv_rms * tl.load(weight_ptr + dim, mask, 0.0).to(tl.float32)
        if ROTATE:
            y = y * inv_rms * tl.load(weight_ptr + partner, rotary_mask, 0.0).to(tl.float32)
    if ROTATE:
        angle = tl.where(dim < ROTARY_HALF, dim, dim - ROTARY_HALF)
        cosine = tl.load(cosine_ptr + angle, dim < 2 * ROTARY_HALF, 1.0)
        sine = tl.load(sine_ptr + angle, dim < 2 * ROTARY_HALF, 0.0)
        x = x * cosine + tl.where(dim < ROTARY_HALF, -y, y) * sine
    return x


@triton.jit(do_not_specialize=["splits", "min_keys_per_split"])
def _decode_kernel(
    q_ptr,  # rows of [q], or of [q | k | v] with STORE
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    slots_ptr,
    cosine_ptr,
    sine_ptr,
    q_weight_ptr,
    k_weight_ptr,
    sinks_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale,
    eps,
    splits,
    min_keys_per_split,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0: none
    ROTARY_HALF: tl.constexpr,
    STORE: tl.constexpr,
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    group: tl.constexpr = HEADS // KV_HEADS
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys_ptr += kv_head * head_stride
    values_ptr += kv_head * head_stride
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    pdl_launch_dependents(PDL)
    if PDL:
        low, high, active_splits = _split_range(
            tl.load(lengths_ptr + sequence), split, splits, min_keys_per_split, WINDOW, KEYS
        )
        _prefetch_keys(
            keys_ptr, values_ptr, table, low, high, block_stride, slot_stride, HEAD_DIM, BLOCK_SIZE, KEYS, PDL
        )
    pdl_wait(PDL)
    length = tl.load(lengths_ptr + sequence)
    low, high, active_splits = _split_range(length, split, splits, min_keys_per_split, WINDOW, KEYS)
    head = tl.arange(0, ROWS)[:, None]
    dim = tl.arange(0, PADDED_HEAD_DIM)[None, :]
    heads = (head < group) & (dim < HEAD_DIM)
    out = out_ptr + sequence.to(tl.int64) * out_stride + (kv_head * group + head) * HEAD_DIM + dim
    out_dtype = out_ptr.dtype.element_ty
    if length <= 0:
        if split == 0:
            tl.store(out, tl.zeros([ROWS, PADDED_HEAD_DIM], out_dtype), heads)
    elif split < active_splits:
        row = q_ptr + sequence.to(tl.int64) * q_stride
        qk_scale = scale * 1.44269504  # log2(e): the hardware computes exp2
        running_max = tl.full([ROWS], float("-inf"), tl.float32)
        running_sum = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32)
        if STORE:
            # The row after the queries is the new key, so that one pass normalizes and rotates all of them.
            is_last_split = split == active_splits - 1
            slot = tl.load(slots_ptr + sequence).to(tl.int64)
            new_v = tl.load(row + (HEADS + KV_HEADS + kv_head) * HEAD_DIM + dim, dim < HEAD_DIM, 0.0)
            head_ptrs = row + tl.where(head < group, kv_head * group + head, HEADS + kv_head) * HEAD_DIM
            weight = tl.where(head < group, q_weight_ptr, k_weight_ptr)
            table_offset = (length - 1).to(tl.int64) * ROTARY_HALF
            mask = (head <= group) & (dim < HEAD_DIM)
            x = _norm_and_rotate(
                head_ptrs,
                weight,
                cosine_ptr + table_offset,
                sine_ptr + table_offset,
                dim,
                mask,
                eps,
                HEAD_DIM,
                ROTARY_HALF,
                NORM,
                ROTATE,
            )
            q = tl.where(head < group, x, 0.0).to(out_dtype)
            new_k = to_cache_dtype(tl.sum(tl.where(head == group, x, 0.0), 0)[None, :], keys_ptr)
            new_v = to_cache_dtype(new_v.to(tl.float32), values_ptr)
            target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
            stored = (dim < HEAD_DIM) & is_last_split & (slot >= 0)
            tl.store(keys_ptr + target + dim, new_k, stored)
            tl.store(values_ptr + target + dim, new_v, stored)
            # The new token initializes the running softmax and is excluded from the loop: it is not read back.
            score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1)
            if SOFTCAP > 0:
                score = soft_cap(score, qk_scale, SOFTCAP)
            running_max = tl.where(is_last_split, score * qk_scale, running_max)
            running_sum = tl.where(is_last_split, running_sum + 1.0, running_sum)
            acc = tl.where(is_last_split, acc + new_v.to(tl.float32), acc)
            high = tl.where(is_last_split, high - 1, high)
        else:
            q = tl.load(row + (kv_head * group + head) * HEAD_DIM + dim, heads, 0.0)
        n = tl.arange(0, KEYS)
        if keys_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
            q = q.to(tl.float16)  # FP8 becomes fp16, exactly, in one instruction, and bf16 in several
        for start in tl.range(low, high, KEYS, num_stages=STAGES):
            key_position = start + n
            visible = key_position < high
            if WINDOW:
                visible = visible & (key_position >= length - WINDOW)
            block = tl.load(table + key_position // BLOCK_SIZE, key_position < high, 0).to(tl.int64)
            kv_offset = block * block_stride + (key_position % BLOCK_SIZE) * slot_stride
            within = (key_position < high)[:, None] & (dim < HEAD_DIM)
            k = tl.load(keys_ptr + kv_offset[:, None] + dim, within, 0.0).to(q.dtype)
            scores = tl.dot(q, tl.trans(k))
            if SOFTCAP > 0:
                scores = soft_cap(scores, qk_scale, SOFTCAP)
            scores = tl.where(visible[None, :], scores * qk_scale, float("-inf"))
            new_max = tl.maximum(running_max, tl.max(scores, 1))
            # The window may mask a whole iteration: avoid -inf minus -inf.
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weights = tl.exp2(scores - safe_max[:, None])
            rescale = tl.exp2(running_max - safe_max)
            running_sum = running_sum * rescale + tl.sum(weights, 1)
            v = tl.load(values_ptr + kv_offset[:, None] + dim, within, 0.0).to(q.dtype)
            acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None])
            running_max = new_max

        head_index = tl.arange(0, ROWS)
        if SINKS:
            sink = tl.load(sinks_ptr + kv_head * group + head_index, head_index < group, 0.0)
        if active_splits == 1:
            if SINKS:
                running_sum, acc = add_sinks(running_max, running_sum, acc, sink)
            tl.store(out, (acc / running_sum[:, None]).to(out_dtype), heads)
        else:
            pair = sequence * KV_HEADS + kv_head
            cells: tl.constexpr = group * (HEAD_DIM + 2)
            part = partials_ptr + pair.to(tl.int64) * splits * cells
            part_ptr = part + split * cells
            tl.store(part_ptr + head * HEAD_DIM + dim, acc, heads)
            tl.store(part_ptr + group * HEAD_DIM + head_index, running_max, head_index < group)
            tl.store(part_ptr + group * HEAD_DIM + group + head_index, running_sum, head_index < group)
            tl.debug_barrier()  # all threads have written their part before the counter is incremented
            if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel") == active_splits - 1:
                tl.store(counters_ptr + pair, 0)  # ready for the next launch
                running_max = tl.full([ROWS], float("-inf"), tl.float32)
                running_sum = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, PADDED_HEAD_DIM], tl.float32)
                for i in range(active_splits):
                    part_ptr = part + i * cells
                    part_max = tl.load(
                        part_ptr + group * HEAD_DIM + head_index, head_index < group, 0.0, cache_modifier=".cg"
                    )
                    part_sum = tl.load(
                        part_ptr + group * HEAD_DIM + group + head_index, head_index < group, 1.0, cache_modifier=".cg"
                    )
                    part_acc = tl.load(part_ptr + head * HEAD_DIM + dim, heads, 0.0, cache_modifier=".cg")
                    new_max = tl.maximum(running_max, part_max)
                    old, new = tl.exp2(running_max - new_max), tl.exp2(part_max - new_max)
                    running_sum = running_sum * old + part_sum * new
                    acc = acc * old[:, None] + part_acc * new[:, None]
                    running_max = new_max
                if SINKS:
                    running_sum, acc = add_sinks(running_max, running_sum, acc, sink)
                tl.store(out, (acc / running_sum[:, None]).to(out_dtype), heads)


class NewTokens(NamedTuple):
    """What is needed to store the new tokens' keys and values. Tensors as for `rotate_and_store`."""

    slots: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None
    norms: tuple[torch.Tensor, torch.Tensor] | None
    eps: float


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    heads: int,
    *,
    new: NewTokens | None = None,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the attention of the last token of each sequence, `[sequences, heads · size]`.

    `q` has one row per sequence: normalized and rotated queries, or with `new` the raw `[q | k | v]` projection.
    `keys`, `values`: `[blocks, kv_heads, block, size]`, the dtype of `q` or FP8, equal strides; `tables`: int32, any
    width; `lengths`: int32, the new token included. A row of length 0 is padding and yields zeros. `sinks`: a logit per
    query head that joins the denominator of the softmax. `softcap`: a score s becomes softcap · tanh(s / softcap); 0:
    none.
    """
    _, kv_heads, block, size = keys.shape
    rows = len(lengths)
    out = q.new_empty(rows, heads * size) if out is None else out
    config = choose_config(rows, kv_heads, size, keys.dtype) if config is None else config
    partials, counters = get_workspace(q.device, rows * config.splits * heads * (size + 2), rows * kv_heads)
    rotary, norms = (new.rotary, new.norms) if new else (None, None)
    _decode_kernel[(rows, kv_heads, config.splits)](
        q,
        keys,
        values,
        tables,
        lengths,
        new.slots if new else lengths,
        *(rotary or (q, q)),
        *(norms or (q, q)),
        q if sinks is None else sinks,
        out,
        partials,
        counters,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        size**-0.5 if scale is None else scale,
        new.eps if new else 0.0,
        config.splits,
        config.min_keys_per_split,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=size,
        BLOCK_SIZE=block,
        WINDOW=window,
        SINKS=sinks is not None,
        SOFTCAP=softcap,
        ROTARY_HALF=rotary[0].shape[1] if rotary else 0,
        STORE=new is not None,
        NORM=norms is not None,
        ROTATE=rotary is not None,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads + (new is not None))),
        PADDED_HEAD_DIM=triton.next_power_of_2(size),
        KEYS=config.keys,
        STAGES=config.stages,
        num_warps=config.warps,
        maxnreg=config.registers,
        **pdl_options(pdl),
    )
    return out


def choose_config(rows: int, kv_heads: int, size: int, cache: torch.dtype = torch.bfloat16) -> DecodeConfig:
    """Return the configuration measured best on an H200 (132 multiprocessors, four programs each).

    Combining splits costs a few microseconds: worth it for small batches, for larger ones only with long sequences.
    """
    programs = rows * kv_heads
    splits = min(16, max(2 if programs <= 1024 else 1, 512 // programs))
    min_keys_per_split = 64 if programs <= 32 else 128 if programs <= 256 else 512
    if size > 128:
        return DecodeConfig(splits, min_keys_per_split, keys=32, warps=8)
    if cache.itemsize == 1:
        return DecodeConfig(splits, min_keys_per_split, keys=128, registers=168)
    return DecodeConfig(splits, min_keys_per_split)
