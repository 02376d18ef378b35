# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Linear layer of one or two rows with INT4 weights, on CUDA cores.

Matrix units would need the weights in their own layout, which costs a pass through shared memory for each of them. Here
a thread loads words of eight weights, makes an fp32 number of each with one byte permute, and multiplies it by its
input. A program computes a few outputs from their whole weight rows, as in `gemv`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.gemv import epilogue_and_store
from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait
from syringa.engine.gpu.packed_weight import PackedWeight

MAX_ROWS = 2
ROWS_PER_PROGRAM = 4  # of weights
WEIGHTS_PER_WORD = 8


class Int4GemvConfig(NamedTuple):
    inputs: int  # per iteration
    warps: int


# The upper half of the fp32 number 128 + n is 0x4300 + n, for n < 128.
_TO_FP32 = tl.constexpr(
    """{
    .reg .b32 low, high;
    and.b32 low, $8, 0x0f0f0f0f;
    shr.u32 high, $8, 4;
    and.b32 high, high, 0x0f0f0f0f;
    prmt.b32 $0, low, 0x43, 0x4055;
    prmt.b32 $1, low, 0x43, 0x4155;
    prmt.b32 $2, low, 0x43, 0x4255;
    prmt.b32 $3, low, 0x43, 0x4355;
    prmt.b32 $4, high, 0x43, 0x4055;
    prmt.b32 $5, high, 0x43, 0x4155;
    prmt.b32 $6, high, 0x43, 0x4255;
    prmt.b32 $7, high, 0x43, 0x4355;
    }"""
)
_EIGHT_FP32 = tl.constexpr((tl.float32,) * 8)


@triton.jit
def _unpack_weights(words, ASM: tl.constexpr):
    """Return 128 + code for the four low and the four high codes of the bytes of each word."""
    if ASM:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _TO_FP32, "=r,=r,=r,=r,=r,=r,=r,=r,r", [words], dtype=_EIGHT_FP32, is_pure=True, pack=1
        )
    else:  # Triton's interpreter has no assembly
        a = (words & 15).to(tl.float32) + 128.0
        b = (words >> 8 & 15).to(tl.float32) + 128.0
        c = (words >> 16 & 15).to(tl.float32) + 128.0
        d = (words >> 24 & 15).to(tl.float32) + 128.0
        e = (words >> 4 & 15).to(tl.float32) + 128.0
        f = (words >> 12 & 15).to(tl.float32) + 128.0
        g = (words >> 20 & 15).to(tl.float32) + 128.0
        h = (words >> 28 & 15).to(tl.float32) + 128.0
    return a, b, c, d, e, f, g, h


@triton.jit
def _load_inputs(pointers, mask, UNIT_WORDS: tl.constexpr, EVEN: tl.constexpr):
    """Return the inputs of words of weights in fp32: eight each, and the sums of either four.

    `pointers`: to 64-bit words of four bf16 numbers.
    """
    if EVEN:
        first, second = tl.load(pointers), tl.load(pointers + UNIT_WORDS)
    else:
        first, second = tl.load(pointers, mask, 0), tl.load(pointers + UNIT_WORDS, mask, 0)
    low, high = first.to(tl.int32), (first >> 32).to(tl.int32)
    a = (low << 16).to(tl.float32, bitcast=True)
    b = (low & -65536).to(tl.float32, bitcast=True)
    c = (high << 16).to(tl.float32, bitcast=True)
    d = (high & -65536).to(tl.float32, bitcast=True)
    low, high = second.to(tl.int32), (second >> 32).to(tl.int32)
    e = (low << 16).to(tl.float32, bitcast=True)
    f = (low & -65536).to(tl.float32, bitcast=True)
    g = (high << 16).to(tl.float32, bitcast=True)
    h = (high & -65536).to(tl.float32, bitcast=True)
    return a, b, c, d, e, f, g, h, a + b + c + d, e + f + g + h


@triton.jit
def _load_scales(scale_ptr, zero_ptr, at, next_group, mask, ZEROS: tl.constexpr, SHARED: tl.constexpr):
    """Return the scales of both halves of units, and 128 + their codes of zero."""
    scale = tl.load(scale_ptr + at, mask, 0.0).to(tl.float32)[:, None]
    if ZEROS:
        zero = tl.load(zero_ptr + at, mask, 0).to(tl.float32)[:, None] + 128.0
    else:
        zero = tl.full([1, 1], 136.0, tl.float32)
    scale_high, zero_high = scale, zero
    if not SHARED:
        scale_high = tl.load(scale_ptr + at + next_group, mask, 0.0).to(tl.float32)[:, None]
        if ZEROS:
            zero_high = tl.load(zero_ptr + at + next_group, mask, 0).to(tl.float32)[:, None] + 128.0
    return scale, zero, scale_high, zero_high


@triton.jit
def _dot(w, x, s, SHARED: tl.constexpr):
    """Return the products of words of weights `w` with inputs `x`, summed for each word. `s`: from `_load_scales`."""
    if SHARED:
        product = w[0] * x[0] - s[1] * (x[8] + x[9])
        product = w[3] * x[3] + (w[2] * x[2] + (w[1] * x[1] + product))
        product = w[7] * x[7] + (w[6] * x[6] + (w[5] * x[5] + (w[4] * x[4] + product)))
        product *= s[0]
    else:
        low = w[3] * x[3] + (w[2] * x[2] + (w[1] * x[1] + (w[0] * x[0] - s[1] * x[8])))
        high = w[7] * x[7] + (w[6] * x[6] + (w[5] * x[5] + (w[4] * x[4] - s[3] * x[9])))
        product = low * s[0] + high * s[2]
    return product


@triton.jit
def _int4_gemv_kernel(
    x_ptr,  # 64-bit words of four inputs
    w_ptr,  # 32-bit words of eight weights
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N,
    x_stride,
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
    # Four rows of weights per program, so that unpacked inputs are used four times: rows of outputs, or two of gates
    # and the two that they multiply. Rows after the last are computed like it and not stored.
    first = tl.program_id(0) * (2 if GATED else 4)
    n0, n1 = tl.minimum(first, N - 1), tl.minimum(first + 1, N - 1)
    n2 = N + n0 if GATED else tl.minimum(first + 2, N - 1)
    n3 = N + n1 if GATED else tl.minimum(first + 3, N - 1)
    unit_offsets = tl.arange(0, BLOCK_U)
    word_offsets = tl.arange(0, UNIT_WORDS)
    row_words: tl.constexpr = UNITS * UNIT_WORDS
    a0 = tl.zeros([BLOCK_U, UNIT_WORDS], tl.float32)
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
        x_at = x_ptr + unit[:, None] * (2 * UNIT_WORDS) + word_offsets[None, :]
        x = _load_inputs(x_at, mask, UNIT_WORDS, even)
        u0 = _unpack_weights(w0, ASM)
        a0 += _dot(u0, x, s0, shared)
        u1 = _unpack_weights(w1, ASM)
        a1 += _dot(u1, x, s1, shared)
        u2 = _unpack_weights(w2, ASM)
        a2 += _dot(u2, x, s2, shared)
        u3 = _unpack_weights(w3, ASM)
        a3 += _dot(u3, x, s3, shared)
        if M == 2:
            y = _load_inputs(x_at + x_stride, mask, UNIT_WORDS, even)
            b0 += _dot(u0, y, s0, shared)
            b1 += _dot(u1, y, s1, shared)
            b2 += _dot(u2, y, s2, shared)
            b3 += _dot(u3, y, s3, shared)
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
    if weight.format != "int4" or rows > MAX_ROWS or dtype != torch.bfloat16:
        return False
    return weight.inputs % weight.unit == 0 and (weight.group % weight.unit == 0 or weight.unit == 2 * weight.group)


def int4_gemv(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: Int4GemvConfig,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Multiply one or two bf16 rows with INT4 weights; see `supports_int4_gemv`."""
    outputs = out.shape[1]
    words = weight.data.view(torch.int32)
    inputs = x.contiguous().view(torch.int64)
    _int4_gemv_kernel[(triton.cdiv(outputs, ROWS_PER_PROGRAM // 2 if gated else ROWS_PER_PROGRAM),)](
        inputs, words, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias, x if residual is None else residual, out, outputs, inputs.stride(0),
        0 if residual is None else residual.stride(0), out.stride(0), weight.scales.stride(0),
        UNITS=weight.inputs // weight.unit, UNIT_WORDS=weight.unit // WEIGHTS_PER_WORD,
        UNITS_PER_GROUP=weight.group // weight.unit, M=len(x), ZEROS=weight.zeros is not None,
        BIAS=bias is not None, GATED=gated, RESIDUAL=residual is not None,
        BLOCK_U=triton.next_power_of_2(max(1, config.inputs // weight.unit)),
        ASM=x.is_cuda, num_warps=config.warps, **pdl_options(pdl),
    )  # fmt: skip
