# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Attention of one new token per sequence over the paged cache: nothing but reading keys and values.

A program takes the query heads that share a key-value head, for one stretch of one sequence, so that every key is read
once. The stretches of a long sequence run side by side; the last to finish joins them, in their order. Whoever holds
the sequence's end can also norm, turn and store the new token's key and value: then nothing runs before attention but
the QKV product.

The grid depends on the batch's size alone and lengths are read on the device, so a captured graph serves all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import overlap, prefetch, release, scratch, wait


class DecodeConfig(NamedTuple):
    splits: int  # programs that may share a sequence
    shortest: int = 1  # keys below which none of them goes alone
    keys: int = 64  # per round
    warps: int = 4
    stages: int = 4  # rounds under way
    registers: int = 128  # per thread at most: four programs of four warps then share a multiprocessor


@triton.jit
def _stretch(length, split, splits, shortest, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """The keys of a split, and how many splits have any: whole rounds, as even as that allows, by the length alone."""
    begin = tl.maximum(length - WINDOW, 0) // KEYS * KEYS if WINDOW else 0
    stretch = tl.maximum(tl.cdiv(tl.cdiv(length - begin, KEYS), splits), tl.cdiv(shortest, KEYS)) * KEYS
    low = begin + split * stretch
    return low, tl.minimum(low + stretch, length), tl.cdiv(length - begin, tl.maximum(stretch, 1))


@triton.jit
def _fetch_ahead(keys_ptr, values_ptr, table, low, high, block_stride, slot_stride, SIZE: tl.constexpr,
                 BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The first two rounds on their way into the cache, whoever wrote length and table: wrong ones do no harm."""
    at = low + tl.arange(0, 2 * KEYS)
    block = tl.load(table + at // BLOCK_SIZE, at < high, 0).to(tl.int64)
    cell = block * block_stride + (at % BLOCK_SIZE) * slot_stride
    for line in tl.static_range(0, SIZE, 64):
        prefetch(keys_ptr + cell + line, at < high, PDL)
        prefetch(values_ptr + cell + line, at < high, PDL)


@triton.jit
def _turned(head_ptr, weight_ptr, cosine_ptr, sine_ptr, d, known, eps, SIZE: tl.constexpr, HALF: tl.constexpr,
            NORM: tl.constexpr, TURN: tl.constexpr):  # fmt: skip
    """Heads, `[rows, size]`, normed and turned. The partner of a component that turns is read a second time."""
    x = tl.load(head_ptr + d, known, 0.0).to(tl.float32)
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    turns = known & (d < 2 * HALF)
    if TURN:
        y = tl.load(head_ptr + partner, turns, 0.0).to(tl.float32)
    if NORM:
        rate = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = x * rate * tl.load(weight_ptr + d, known, 0.0).to(tl.float32)
        if TURN:
            y = y * rate * tl.load(weight_ptr + partner, turns, 0.0).to(tl.float32)
    if TURN:
        angle = tl.where(d < HALF, d, d - HALF)
        cosine = tl.load(cosine_ptr + angle, d < 2 * HALF, 1.0)
        sine = tl.load(sine_ptr + angle, d < 2 * HALF, 0.0)
        x = x * cosine + tl.where(d < HALF, -y, y) * sine
    return x


@triton.jit(do_not_specialize=["splits", "shortest"])
def _decode_kernel(
    q_ptr,  # rows of [q], or of [q | k | v] when the new token is stored here
    keys_ptr,
    values_ptr,
    tables_ptr,
    lengths_ptr,
    slots_ptr,
    cosine_ptr,
    sine_ptr,
    q_weight_ptr,
    k_weight_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    q_stride,
    out_stride,
    table_stride,
    block_stride,
    head_stride,
    slot_stride,
    scale,
    eps,
    splits,
    shortest,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HALF: tl.constexpr,
    STORE: tl.constexpr,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    group: tl.constexpr = HEADS // KV_HEADS
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    keys_ptr += kv_head * head_stride
    values_ptr += kv_head * head_stride
    table = tables_ptr + sequence.to(tl.int64) * table_stride
    release(PDL)
    if PDL:
        low, high, live = _stretch(tl.load(lengths_ptr + sequence), split, splits, shortest, WINDOW, KEYS)
        _fetch_ahead(keys_ptr, values_ptr, table, low, high, block_stride, slot_stride, SIZE, BLOCK_SIZE, KEYS, PDL)
    wait(PDL)
    length = tl.load(lengths_ptr + sequence)
    low, high, live = _stretch(length, split, splits, shortest, WINDOW, KEYS)
    head = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, SPAN)[None, :]
    heads = (head < group) & (d < SIZE)
    out = out_ptr + sequence.to(tl.int64) * out_stride + (kv_head * group + head) * SIZE + d
    kind = out_ptr.dtype.element_ty
    if length <= 0:
        if split == 0:
            tl.store(out, tl.zeros([ROWS, SPAN], kind), heads)
    elif split < live:
        row = q_ptr + sequence.to(tl.int64) * q_stride
        rate = scale * 1.44269504  # exp2 is what the hardware has
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        gathered = tl.zeros([ROWS, SPAN], tl.float32)
        if STORE:
            # The row behind the queries is the new key: one pass norms and turns them all.
            ends = split == live - 1
            slot = tl.load(slots_ptr + sequence).to(tl.int64)
            new_v = tl.load(row + (HEADS + KV_HEADS + kv_head) * SIZE + d, d < SIZE, 0.0)
            own = row + tl.where(head < group, kv_head * group + head, HEADS + kv_head) * SIZE
            weight = tl.where(head < group, q_weight_ptr, k_weight_ptr)
            turn = (length - 1).to(tl.int64) * HALF
            known = (head <= group) & (d < SIZE)
            x = _turned(own, weight, cosine_ptr + turn, sine_ptr + turn, d, known, eps, SIZE, HALF, NORM, TURN)
            q = tl.where(head < group, x, 0.0).to(kind)
            new_k = tl.sum(tl.where(head == group, x, 0.0), 0)[None, :].to(kind)
            target = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
            stored = (d < SIZE) & ends & (slot >= 0)
            tl.store(keys_ptr + target + d, new_k, stored)
            tl.store(values_ptr + target + d, new_v, stored)
            # It is not read back from the cache: the walk begins with it, and ends before it.
            score = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * rate
            best = tl.where(ends, score, best)
            total = tl.where(ends, total + 1.0, total)
            gathered = tl.where(ends, gathered + new_v.to(tl.float32), gathered)
            high = tl.where(ends, high - 1, high)
        else:
            q = tl.load(row + (kv_head * group + head) * SIZE + d, heads, 0.0)
        n = tl.arange(0, KEYS)
        for start in tl.range(low, high, KEYS, num_stages=STAGES):
            at = start + n
            seen = at < high
            if WINDOW:
                seen = seen & (at >= length - WINDOW)
            block = tl.load(table + at // BLOCK_SIZE, at < high, 0).to(tl.int64)
            cell = block * block_stride + (at % BLOCK_SIZE) * slot_stride
            within = (at < high)[:, None] & (d < SIZE)
            k = tl.load(keys_ptr + cell[:, None] + d, within, 0.0)
            scores = tl.where(seen[None, :], tl.dot(q, tl.trans(k)) * rate, float("-inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            # The window may hide a whole round: then nothing was seen, and minus infinity must not meet itself.
            floor = tl.where(better == float("-inf"), 0.0, better)
            weights = tl.exp2(scores - floor[:, None])
            fade = tl.exp2(best - floor)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(values_ptr + cell[:, None] + d, within, 0.0)
            gathered = tl.dot(weights.to(v.dtype), v, gathered * fade[:, None])
            best = better

        if live == 1:
            tl.store(out, (gathered / total[:, None]).to(kind), heads)
        else:
            pair = sequence * KV_HEADS + kv_head
            cells: tl.constexpr = group * (SIZE + 2)
            part = parts_ptr + pair.to(tl.int64) * splits * cells
            mine = part + split * cells
            ones = tl.arange(0, ROWS)
            tl.store(mine + head * SIZE + d, gathered, heads)
            tl.store(mine + group * SIZE + ones, best, ones < group)
            tl.store(mine + group * SIZE + group + ones, total, ones < group)
            tl.debug_barrier()  # every thread's part is written before the arrival is counted
            if tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel") == live - 1:
                tl.store(arrivals_ptr + pair, 0)  # ready for the next launch
                best = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                gathered = tl.zeros([ROWS, SPAN], tl.float32)
                for i in range(live):
                    mine = part + i * cells
                    its = tl.load(mine + group * SIZE + ones, ones < group, 0.0, cache_modifier=".cg")
                    mass = tl.load(mine + group * SIZE + group + ones, ones < group, 1.0, cache_modifier=".cg")
                    value = tl.load(mine + head * SIZE + d, heads, 0.0, cache_modifier=".cg")
                    better = tl.maximum(best, its)
                    old, new = tl.exp2(best - better), tl.exp2(its - better)
                    total = total * old + mass * new
                    gathered = gathered * old[:, None] + value * new[:, None]
                    best = better
                tl.store(out, (gathered / total[:, None]).to(kind), heads)


class NewTokens(NamedTuple):
    """What it takes to store the new tokens' keys and values on the way. The tensors are `rotate_and_store`'s."""

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
    out: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """One row per sequence, its last token's: `[q …]` normed, turned and stored, or with `new` `[q | k | v]` as it came
    from the product. `[sequences, heads · size]`.

    `keys`, `values`: `[blocks, kv_heads, block, size]`, alike in strides; `tables`: int32, any width; `lengths`: int32,
    the new token included. A row of length 0 is padding and gives zeros.
    """
    _, kv_heads, block, size = keys.shape
    rows = len(lengths)
    out = q.new_empty(rows, heads * size) if out is None else out
    config = choose(rows, kv_heads, size) if config is None else config
    parts, arrivals = scratch(q.device, rows * config.splits * heads * (size + 2), rows * kv_heads)
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
        out,
        parts,
        arrivals,
        q.stride(0),
        out.stride(0),
        tables.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        size**-0.5 if scale is None else scale,
        new.eps if new else 0.0,
        config.splits,
        config.shortest,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        BLOCK_SIZE=block,
        WINDOW=window,
        HALF=rotary[0].shape[1] if rotary else 0,
        STORE=new is not None,
        NORM=norms is not None,
        TURN=rotary is not None,
        ROWS=max(16, triton.next_power_of_2(heads // kv_heads + (new is not None))),
        SPAN=triton.next_power_of_2(size),
        KEYS=config.keys,
        STAGES=config.stages,
        num_warps=config.warps,
        maxnreg=config.registers,
        **overlap(pdl),
    )
    return out


def choose(rows: int, kv_heads: int, size: int) -> DecodeConfig:
    """By what was measured on an H200, whose 132 multiprocessors take four programs each.

    Joining splits costs some microseconds. A small batch gains them back at once, a larger one only in long sequences;
    from two programs for each place on, there is nothing to gain.
    """
    programs = rows * kv_heads
    splits = min(16, max(2 if programs <= 1024 else 1, 512 // programs))
    shortest = 64 if programs <= 32 else 128
    return DecodeConfig(splits, shortest) if size <= 128 else DecodeConfig(splits, shortest, keys=32, warps=8)
