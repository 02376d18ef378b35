# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Linear layer of one or two rows with INT4 weights, on CUDA cores.

Matrix units would need the weights in their own layout, which costs a pass through shared memory for each of them. Here
inputs are in 16-bit fixed point (`fixed_point`), so that `dp4a` multiplies four codes with the upper or lower bytes of
their inputs: 1.2 instructions per weight, where fp32 takes 3.8. A program computes a few outputs from their whole
weight rows, as in `gemv`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.fixed_point import CHUNK, FixedPointRows
from syringa.engine.gpu.kernels.gemv import epilogue_and_store
from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait
from syringa.engine.gpu.packed_weight import PackedWeight

MAX_ROWS = 2
ROWS_PER_PROGRAM = 4  # of weights
WEIGHTS_PER_WORD = 8
_CHUNK_WORDS = tl.constexpr(
    CHUNK // 4
)  # words whose low codes belong to one chunk of inputs, their high ones to another


class Int4GemvConfig(NamedTuple):
    inputs: int  # per iteration
    warps: int


_DOT = tl.constexpr(
    """{
    .reg .b32 low, high, sum;
    and.b32 low, $1, 0x0f0f0f0f;
    shr.u32 high, $1, 4;
    and.b32 high, high, 0x0f0f0f0f;
    dp4a.s32.u32 sum, $2, low, 0;
    dp4a.s32.u32 sum, $3, high, sum;
    shl.b32 sum, sum, 8;
    dp4a.u32.u32 sum, $4, low, sum;
    dp4a.u32.u32 $0, $5, high, sum;
    }"""
)
_DOT_HALVES = tl.constexpr(
    """{
    .reg .b32 low, high, sum;
    and.b32 low, $2, 0x0f0f0f0f;
    shr.u32 high, $2, 4;
    and.b32 high, high, 0x0f0f0f0f;
    dp4a.s32.u32 sum, $3, low, 0;
    shl.b32 sum, sum, 8;
    dp4a.u32.u32 $0, $5, low, sum;
    dp4a.s32.u32 sum, $4, high, 0;
    shl.b32 sum, sum, 8;
    dp4a.u32.u32 $1, $6, high, sum;
    }"""
)
_TWO_INT32 = tl.constexpr((tl.int32, tl.int32))


@triton.jit
def _dot_bytes(codes, upper, lower):
    """Return what `dp4a` computes: the codes of the bytes of a word times their inputs."""
    total = (codes & 15) * (256 * ((upper << 24) >> 24) + (lower & 255))
    total += (codes >> 8 & 15) * (256 * ((upper << 16) >> 24) + (lower >> 8 & 255))
    total += (codes >> 16 & 15) * (256 * ((upper << 8) >> 24) + (lower >> 16 & 255))
    return total + (codes >> 24 & 15) * (256 * (upper >> 24) + (lower >> 24 & 255))


@triton.jit
def _sum_words(products, UNITS: tl.constexpr, UNIT_WORDS: tl.constexpr):
    """Return the sums of the words of each chunk in fp32, which is exact."""
    chunks = tl.reshape(products, [UNITS, UNIT_WORDS // _CHUNK_WORDS, _CHUNK_WORDS])
    return tl.sum(chunks, 2).to(tl.float32)


@triton.jit
def _load_inputs(
    high_ptr, low_ptr, x_scale_ptr, sum_ptr, unit, UNIT_WORDS: tl.constexpr, UNITS: tl.constexpr, EVEN: tl.constexpr
):
    """Return a row's inputs of some units: upper bytes of either half, lower bytes, scales, and sums of the halves."""
    words = unit[:, None] * (2 * UNIT_WORDS) + tl.arange(0, UNIT_WORDS)[None, :]
    unit_chunks: tl.constexpr = UNIT_WORDS // _CHUNK_WORDS
    chunks = unit[:, None] * (2 * unit_chunks) + tl.arange(0, unit_chunks)[None, :]
    if EVEN:
        a, b = tl.load(high_ptr + words), tl.load(high_ptr + words + UNIT_WORDS)
        c, d = tl.load(low_ptr + words), tl.load(low_ptr + words + UNIT_WORDS)
        s = tl.load(x_scale_ptr + unit)
        e, f = tl.load(sum_ptr + chunks), tl.load(sum_ptr + chunks + unit_chunks)
    else:
        mask = unit < UNITS
        each = mask[:, None]
        a, b = tl.load(high_ptr + words, each, 0), tl.load(high_ptr + words + UNIT_WORDS, each, 0)
        c, d = tl.load(low_ptr + words, each, 0), tl.load(low_ptr + words + UNIT_WORDS, each, 0)
        s = tl.load(x_scale_ptr + unit, mask, 0.0)
        e, f = tl.load(sum_ptr + chunks, each, 0.0), tl.load(sum_ptr + chunks + unit_chunks, each, 0.0)
    return a, b, c, d, s[:, None], e, f


@triton.jit
def _load_scales(scale_ptr, zero_ptr, at, next_group, mask, ZEROS: tl.constexpr, SHARED: tl.constexpr):
    """Return the scales of both halves of units, and their codes of zero."""
    scale = tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)[:, None]
    if ZEROS:
        zero = tl.load(zero_ptr + at, mask, 0).to(tl.float32)[:, None]
    else:
        zero = tl.full([1, 1], 8.0, tl.float32)
    scale_high, zero_high = scale, zero
    if not SHARED:
        scale_high = tl.load(scale_ptr + at + next_group, mask, 0.0).to(tl.float32)[:, None]
        if ZEROS:
            zero_high = tl.load(zero_ptr + at + next_group, mask, 0).to(tl.float32)[:, None]
    return scale, zero, scale_high, zero_high


@triton.jit
def _dot(w, x, s, UNITS: tl.constexpr, UNIT_WORDS: tl.constexpr, SHARED: tl.constexpr, ASM: tl.constexpr):
    """Return products of words of weights, summed for each chunk. `x`: `_load_inputs`; `s`: `_load_scales`."""
    if SHARED:
        if ASM:
            products = tl.inline_asm_elementwise(
                _DOT, "=r,r,r,r,r,r", [w, x[0], x[1], x[2], x[3]], dtype=tl.int32, is_pure=True, pack=1
            )
        else:  # Triton's interpreter has no assembly
            products = _dot_bytes(w, x[0], x[2]) + _dot_bytes(w >> 4, x[1], x[3])
        total = _sum_words(products, UNITS, UNIT_WORDS) - s[1] * (x[5] + x[6])
        result = total * (s[0] * x[4])
    else:
        if ASM:
            low, high = tl.inline_asm_elementwise(
                _DOT_HALVES, "=r,=r,r,r,r,r,r", [w, x[0], x[1], x[2], x[3]], dtype=_TWO_INT32, is_pure=True, pack=1
            )
        else:
            low, high = _dot_bytes(w, x[0], x[2]), _dot_bytes(w >> 4, x[1], x[3])
        total = (_sum_words(low, UNITS, UNIT_WORDS) - s[1] * x[5]) * s[0]
        result = (total + (_sum_words(high, UNITS, UNIT_WORDS) - s[3] * x[6]) * s[2]) * x[4]
    return result


@triton.jit
def _int4_gemv_kernel(
    high_ptr,  # upper and lower bytes of the inputs, in words of four
    low_ptr,
    x_scale_ptr,
    sum_ptr,
    w_ptr,  # words of eight weights
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    residual_stride,
    out_stride,
    next_group,  # elements to the scale of the next group
    UNITS: tl.constexpr,  # of a row of weights
    UNIT_WORDS: tl.constexpr,  # words of weights in a unit: inputs 4 i to 4 i + 3 of either half are in word i
    UNITS_PER_GROUP: tl.constexpr,  # 0: each half of a unit has its own group
    M: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_U: tl.constexpr,  # units per iteration
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    shared: tl.constexpr = UNITS_PER_GROUP > 0
    even: tl.constexpr = UNITS % BLOCK_U == 0
    # Four rows of weights per program, so that inputs are used four times: rows of outputs, or two of gates and the two
    # that they multiply. Rows after the last are computed like it and not stored.
    first = tl.program_id(0) * (2 if GATED else 4)
    n0, n1 = tl.minimum(first, N - 1), tl.minimum(first + 1, N - 1)
    n2 = N + n0 if GATED else tl.minimum(first + 2, N - 1)
    n3 = N + n1 if GATED else tl.minimum(first + 3, N - 1)
    unit_offsets = tl.arange(0, BLOCK_U)
    word_offsets = tl.arange(0, UNIT_WORDS)
    row_words: tl.constexpr = UNITS * UNIT_WORDS
    x_words: tl.constexpr = 2 * row_words  # of a row of inputs
    a0 = tl.zeros([BLOCK_U, UNIT_WORDS // _CHUNK_WORDS], tl.float32)
    a1, a2, a3, b0, b1, b2, b3 = a0, a0, a0, a0, a0, a0, a0
    pdl_launch_dependents(PDL)
    for i in tl.static_range(0, UNITS, BLOCK_U):
        unit = i + unit_offsets
        unit_mask = unit < UNITS
        mask = unit_mask[:, None]
        at = w_ptr + unit[:, None] * UNIT_WORDS + word_offsets[None, :]
        if even:
            w0 = tl.load(at + n0.to(tl.int64) * row_words, eviction_policy="evict_first")
            w1 = tl.load(at + n1.to(tl.int64) * row_words, eviction_policy="evict_first")
            w2 = tl.load(at + n2.to(tl.int64) * row_words, eviction_policy="evict_first")
            w3 = tl.load(at + n3.to(tl.int64) * row_words, eviction_policy="evict_first")
        else:
            w0 = tl.load(at + n0.to(tl.int64) * row_words, mask, 0, eviction_policy="evict_first")
            w1 = tl.load(at + n1.to(tl.int64) * row_words, mask, 0, eviction_policy="evict_first")
            w2 = tl.load(at + n2.to(tl.int64) * row_words, mask, 0, eviction_policy="evict_first")
            w3 = tl.load(at + n3.to(tl.int64) * row_words, mask, 0, eviction_policy="evict_first")
        group = unit // UNITS_PER_GROUP if shared else 2 * unit
        s_at = group * next_group
        s0 = _load_scales(scale_ptr, zero_ptr, s_at + n0, next_group, unit_mask, ZEROS, shared)
        s1 = _load_scales(scale_ptr, zero_ptr, s_at + n1, next_group, unit_mask, ZEROS, shared)
        s2 = _load_scales(scale_ptr, zero_ptr, s_at + n2, next_group, unit_mask, ZEROS, shared)
        s3 = _load_scales(scale_ptr, zero_ptr, s_at + n3, next_group, unit_mask, ZEROS, shared)
        if i == 0:  # the first weights do not depend on the previous kernel
            pdl_wait(PDL)
        x = _load_inputs(high_ptr, low_ptr, x_scale_ptr, sum_ptr, unit, UNIT_WORDS, UNITS, even)
        a0 += _dot(w0, x, s0, BLOCK_U, UNIT_WORDS, shared, ASM)
        a1 += _dot(w1, x, s1, BLOCK_U, UNIT_WORDS, shared, ASM)
        a2 += _dot(w2, x, s2, BLOCK_U, UNIT_WORDS, shared, ASM)
        a3 += _dot(w3, x, s3, BLOCK_U, UNIT_WORDS, shared, ASM)
        if M == 2:
            y = _load_inputs(
                high_ptr + x_words, low_ptr + x_words, x_scale_ptr + UNITS, sum_ptr + x_words // _CHUNK_WORDS, unit,
                UNIT_WORDS, UNITS, even,
            )  # fmt: skip
            b0 += _dot(w0, y, s0, BLOCK_U, UNIT_WORDS, shared, ASM)
            b1 += _dot(w1, y, s1, BLOCK_U, UNIT_WORDS, shared, ASM)
            b2 += _dot(w2, y, s2, BLOCK_U, UNIT_WORDS, shared, ASM)
            b3 += _dot(w3, y, s3, BLOCK_U, UNIT_WORDS, shared, ASM)
    _store_outputs(out_ptr, bias_ptr, residual_ptr, a0, a1, a2, a3, first, N, BIAS, GATED, RESIDUAL)
    if M == 2:
        out, residual = out_ptr + out_stride, residual_ptr + residual_stride
        _store_outputs(out, bias_ptr, residual, b0, b1, b2, b3, first, N, BIAS, GATED, RESIDUAL)


@triton.jit
def _store_outputs(
    out_ptr, bias_ptr, residual_ptr, a0, a1, a2, a3, n, N, BIAS: tl.constexpr, GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):  # fmt: skip
    v0, v1, v2, v3 = tl.sum(a0), tl.sum(a1), tl.sum(a2), tl.sum(a3)
    epilogue_and_store(out_ptr, out_ptr, bias_ptr, residual_ptr, v0, v2, n, N, False, BIAS, GATED, RESIDUAL)
    epilogue_and_store(out_ptr, out_ptr, bias_ptr, residual_ptr, v1, v3, n + 1, N, False, BIAS, GATED, RESIDUAL)
    if not GATED:
        epilogue_and_store(out_ptr, out_ptr, bias_ptr, residual_ptr, v2, v2, n + 2, N, False, BIAS, GATED, RESIDUAL)
        epilogue_and_store(out_ptr, out_ptr, bias_ptr, residual_ptr, v3, v3, n + 3, N, False, BIAS, GATED, RESIDUAL)


def supports_int4_gemv(weight: PackedWeight, rows: int, dtype: torch.dtype) -> bool:
    """Return whether `int4_gemv` has a product for so many rows of `dtype`."""
    if weight.format != "int4" or rows > MAX_ROWS or dtype != torch.bfloat16 or weight.unit % (2 * CHUNK):
        return False
    return weight.inputs % weight.unit == 0 and (weight.group % weight.unit == 0 or weight.unit == 2 * weight.group)


def int4_gemv(
    x: FixedPointRows,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Int4GemvConfig,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Multiply one or two rows with INT4 weights; see `supports_int4_gemv`. `x`: with a scale per `weight.unit`."""
    rows, outputs = out.shape
    _int4_gemv_kernel[(triton.cdiv(outputs, ROWS_PER_PROGRAM // 2 if gated else ROWS_PER_PROGRAM),)](
        x.high.view(torch.int32), x.low.view(torch.int32), x.scales, x.sums, weight.data.view(torch.int32),
        weight.scales, weight.scales if weight.zeros is None else weight.zeros, out if bias is None else bias,
        out if residual is None else residual, out, outputs, 0 if residual is None else residual.stride(0),
        out.stride(0), weight.scales.stride(0),
        UNITS=weight.inputs // weight.unit, UNIT_WORDS=weight.unit // WEIGHTS_PER_WORD,
        UNITS_PER_GROUP=weight.group // weight.unit, M=rows, ZEROS=weight.zeros is not None,
        BIAS=bias is not None, GATED=gated, RESIDUAL=residual is not None,
        BLOCK_U=triton.next_power_of_2(max(1, config.inputs // weight.unit)),
        ASM=out.is_cuda, num_warps=config.warps, **pdl_options(pdl),
    )  # fmt: skip
