# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Q and k norms, rotary embedding and the write to the KV cache, in one launch after the QKV projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait


@triton.jit
def to_cache_dtype(x, cache_ptr):
    """Convert fp32 values to the dtype of the cache. FP8 saturates: larger values would become NaN."""
    if cache_ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    return x.to(cache_ptr.dtype.element_ty)


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
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROTARY_HALF: tl.constexpr,  # half of the rotary dimension
    NORM: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,  # heads per program
    PADDED_HALF: tl.constexpr,  # power of two ≥ ROTARY_HALF
    PADDED_REST: tl.constexpr,  # power of two ≥ the components that are not rotated
    PDL: tl.constexpr,
):
    # A head is loaded as its two rotary halves and the rest: each component stays in one thread, so that writing in
    # place cannot race with another thread's load.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    head_mask = head < HEADS + 2 * KV_HEADS
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    at = tl.arange(0, PADDED_HALF)[None, :]
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    half_mask = head_mask & (at < ROTARY_HALF)
    source = qkv_ptr + token * qkv_stride + head * HEAD_DIM
    a = tl.load(source + at, half_mask, 0.0).to(tl.float32)
    b = tl.load(source + ROTARY_HALF + at, half_mask, 0.0).to(tl.float32)
    rest_at = tl.arange(0, PADDED_REST)[None, :] + 2 * ROTARY_HALF
    rest_mask = head_mask & (rest_at < HEAD_DIM)
    if 2 * ROTARY_HALF < HEAD_DIM:
        c = tl.load(source + rest_at, rest_mask, 0.0).to(tl.float32)
    if NORM:
        normed = is_q | is_k
        total = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if 2 * ROTARY_HALF < HEAD_DIM:
            total += tl.sum(c * c, 1)
        inv_rms = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
        weight = tl.where(is_q, q_weight_ptr, k_weight_ptr)
        a = tl.where(normed, a * inv_rms * tl.load(weight + at, half_mask, 0.0), a)
        b = tl.where(normed, b * inv_rms * tl.load(weight + ROTARY_HALF + at, half_mask, 0.0), b)
        if 2 * ROTARY_HALF < HEAD_DIM:
            c = tl.where(normed, c * inv_rms * tl.load(weight + rest_at, rest_mask, 0.0), c)
    if ROTATE:
        position = tl.load(positions_ptr + token).to(tl.int64)
        cosine = tl.load(cosine_ptr + position * ROTARY_HALF + at, at < ROTARY_HALF, 0.0)
        sine = tl.load(sine_ptr + position * ROTARY_HALF + at, at < ROTARY_HALF, 0.0)
        rotated = is_q | is_k
        x = tl.where(rotated, a * cosine - b * sine, a)
        b = tl.where(rotated, b * cosine + a * sine, b)
        a = x
    kv_offset = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride
    key = keys_ptr + kv_offset + (head - HEADS) * head_stride
    value = values_ptr + kv_offset + (head - HEADS - KV_HEADS) * head_stride
    cached = tl.where(is_k, key, value)
    # A negative slot is padding: neither its key nor its value is stored.
    stored = (head >= HEADS) & (slot >= 0)
    kind = qkv_ptr.dtype.element_ty
    tl.store(source + at, a.to(kind), half_mask & (is_q | is_k))
    tl.store(source + ROTARY_HALF + at, b.to(kind), half_mask & (is_q | is_k))
    tl.store(cached + at, to_cache_dtype(a, keys_ptr), half_mask & stored)
    tl.store(cached + ROTARY_HALF + at, to_cache_dtype(b, keys_ptr), half_mask & stored)
    if 2 * ROTARY_HALF < HEAD_DIM:
        tl.store(source + rest_at, c.to(kind), rest_mask & (is_q | is_k))
        tl.store(cached + rest_at, to_cache_dtype(c, keys_ptr), rest_mask & stored)


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
    """Normalize and rotate q and k of `[q | k | v]` rows in place; write k and v to their cache slots.

    `keys`, `values`: `[blocks, kv_heads, block, size]`, equal dtype (that of `qkv`, or FP8) and strides; `rotary`:
    cosines and sines, `[positions, rotary dimension / 2]`, fp32; `norms`: the weights for q and k, fp32. A negative
    slot is padding.
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
        HEAD_DIM=size,
        BLOCK_SIZE=block,
        ROTARY_HALF=half,
        NORM=norms is not None,
        ROTATE=rotary is not None,
        ROWS=rows,
        PADDED_HALF=triton.next_power_of_2(half),
        PADDED_REST=triton.next_power_of_2(max(size - 2 * half, 1)),
        num_warps=4,
        **pdl_options(pdl),
    )
