# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Between the QKV product and attention, in one launch: norms of q and k, rotation, and the way into the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import overlap, release, wait


@triton.jit
def _rotary_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cosine_ptr,
    sine_ptr,
    q_weight_ptr,
    k_weight_ptr,
    keys_ptr,
    values_ptr,
    qkv_stride,
    block_stride,
    head_stride,
    slot_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HALF: tl.constexpr,  # components that turn, halved
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    ROWS: tl.constexpr,  # heads a program takes
    SPAN: tl.constexpr,  # a power of two that HALF fits in
    REST: tl.constexpr,  # a power of two that the components fit in that do not turn
    PDL: tl.constexpr,
):
    # A head is read as the two halves that turn and what is left: each component then stays with its thread, so
    # writing q to where it was read from cannot overtake a neighbour's read.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    known = head < HEADS + 2 * KV_HEADS
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    at = tl.arange(0, SPAN)[None, :]
    release(PDL)
    wait(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    first = known & (at < HALF)
    source = qkv_ptr + token * qkv_stride + head * SIZE
    a = tl.load(source + at, first, 0.0).to(tl.float32)
    b = tl.load(source + HALF + at, first, 0.0).to(tl.float32)
    more = tl.arange(0, REST)[None, :] + 2 * HALF
    behind = known & (more < SIZE)
    if 2 * HALF < SIZE:
        c = tl.load(source + more, behind, 0.0).to(tl.float32)
    if NORM:
        normed = is_q | is_k
        total = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * HALF < SIZE:
            total += tl.sum(c * c, 1)
        rate = tl.rsqrt(total / SIZE + eps)[:, None]
        weight = tl.where(is_q, q_weight_ptr, k_weight_ptr)
        a = tl.where(normed, a * rate * tl.load(weight + at, first, 0.0), a)
        b = tl.where(normed, b * rate * tl.load(weight + HALF + at, first, 0.0), b)
        if 2 * HALF < SIZE:
            c = tl.where(normed, c * rate * tl.load(weight + more, behind, 0.0), c)
    if TURN:
        position = tl.load(positions_ptr + token).to(tl.int64)
        cosine = tl.load(cosine_ptr + position * HALF + at, at < HALF, 0.0)
        sine = tl.load(sine_ptr + position * HALF + at, at < HALF, 0.0)
        turned = is_q | is_k
        x = tl.where(turned, a * cosine - b * sine, a)
        b = tl.where(turned, b * cosine + a * sine, b)
        a = x
    cell = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    key = keys_ptr + cell + (head - HEADS) * head_stride
    value = values_ptr + cell + (head - HEADS - KV_HEADS) * head_stride
    target = tl.where(is_q, source, tl.where(is_k, key, value))
    # A negative slot is padding, which must not be stored anywhere.
    stored = is_q | (slot >= 0)
    kind = qkv_ptr.dtype.element_ty
    tl.store(target + at, a.to(kind), first & stored)
    tl.store(target + HALF + at, b.to(kind), first & stored)
    if 2 * HALF < SIZE:
        tl.store(target + more, c.to(kind), behind & stored)


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    *,
    pdl: bool = False,
) -> None:
    """Norms and turns q and k of `[q | k | v]` rows; q stays in its place, k and v go to their slots of the cache.

    `keys`, `values`: `[blocks, kv_heads, block, size]`, alike in type and strides; `rotary`: cosines and sines,
    `[positions, turned / 2]`, fp32; `norms`: the weights for q and k, fp32. A negative slot is padding.
    """
    _, kv_heads, block, size = keys.shape
    half = rotary[0].shape[1] if rotary else size // 2
    cosine, sine = rotary or (qkv, qkv)
    q_weight, k_weight = norms or (qkv, qkv)
    rows = min(8, triton.next_power_of_2(heads + 2 * kv_heads))
    _rotary_kernel[(len(qkv), triton.cdiv(heads + 2 * kv_heads, rows))](
        qkv,
        positions,
        slots,
        cosine,
        sine,
        q_weight,
        k_weight,
        keys,
        values,
        qkv.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        BLOCK_SIZE=block,
        HALF=half,
        NORM=norms is not None,
        TURN=rotary is not None,
        ROWS=rows,
        SPAN=triton.next_power_of_2(half),
        REST=triton.next_power_of_2(max(size - 2 * half, 1)),
        num_warps=4,
        **overlap(pdl),
    )
