# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Products with quantized weights: FP8, INT4 and MXFP4 weights times bf16 rows, or FP8 times FP8, dense or of experts.

Weights are read in their stored precision and converted to bf16 in registers, so that a few rows are bound by reading a
half or a quarter of the bytes of bf16. Rows in FP8 are multiplied without a conversion. As in `skinny_gemm`, the
weights are the left operand, and several programs may split the inputs of a tile. Scales are applied to the fp32 sums
of each group of inputs, so no weight is rounded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from syringa.engine.gpu.kernels.launch import fit_stages, get_workspace, pdl_launch_dependents, pdl_options, pdl_wait
from syringa.engine.gpu.packed_weight import PackedWeight
from syringa.engine.models.config import ClampedSwiglu

FORMATS = {"fp8": 0, "int4": 1, "mxfp4": 2}
_FP8 = tl.constexpr(FORMATS["fp8"])
_INT4 = tl.constexpr(FORMATS["int4"])


class QuantizedConfig(NamedTuple):
    """Tile sizes of a product."""

    rows: int  # per program: a multiple of 16
    outputs: int  # per program
    inputs: int  # per iteration: a multiple of the inputs that share a scale
    warps: int
    stages: int  # iterations in flight
    splits: int = 1  # programs that split a tile's inputs
    fp8_rows: bool = False  # rows are quantized first (FP8 weights only)


class PairBlocks(NamedTuple):
    """(token, expert) pairs in blocks of one expert each; see `moe.Routing`."""

    pairs: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


# Conversions of the low or high four bits of four bytes to four bf16 numbers.
# INT4: a bf16 number from 128 to 255 has an integer in its last bits.
_INT4_TO_BF16 = "and.b32 b, b, 0x0f0f0f0f; prmt.b32 $0, b, 0x43, 0x4140; prmt.b32 $1, b, 0x43, 0x4342; }"
_INT4_LOW = tl.constexpr("{ .reg .b32 b; mov.b32 b, $2;" + _INT4_TO_BF16)
_INT4_HIGH = tl.constexpr("{ .reg .b32 b; shr.u32 b, $2, 4;" + _INT4_TO_BF16)
# E2M1: its bits are moved to sign, exponent and mantissa, and the exponent is corrected by a product.
_E2M1_TO_BF16 = """
    prmt.b32 a, b, 0, 0x1404;
    prmt.b32 b, b, 0, 0x3424;
    shr.u32 c, a, 6;
    shr.u32 d, b, 6;
    and.b32 c, c, 0x01c001c0;
    and.b32 d, d, 0x01c001c0;
    lop3.b32 a, a, 0x80008000, c, 0xea;
    lop3.b32 b, b, 0x80008000, d, 0xea;
"""
_PRODUCT = "    mul.rn.bf16x2 $0, a, f;\n    mul.rn.bf16x2 $1, b, f;\n}"  # from Hopper on
_PRODUCT_BEFORE = (
    "    mov.b32 c, 0x80008000;\n    fma.rn.bf16x2 $0, a, f, c;\n    fma.rn.bf16x2 $1, b, f, c;\n}"  # plus -0
)
_REGISTERS = "{ .reg .b32 a, b, c, d, f; mov.b32 f, 0x7e807e80;"
_E2M1_LOW = tl.constexpr(f"{_REGISTERS} shl.b32 b, $2, 4;{_E2M1_TO_BF16}{_PRODUCT}")
_E2M1_HIGH = tl.constexpr(f"{_REGISTERS} mov.b32 b, $2;{_E2M1_TO_BF16}{_PRODUCT}")
_E2M1_LOW_BEFORE = tl.constexpr(f"{_REGISTERS} shl.b32 b, $2, 4;{_E2M1_TO_BF16}{_PRODUCT_BEFORE}")
_E2M1_HIGH_BEFORE = tl.constexpr(f"{_REGISTERS} mov.b32 b, $2;{_E2M1_TO_BF16}{_PRODUCT_BEFORE}")


@triton.jit
def _to_numbers(packed, zero, HIGH: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """Return the low or high 4-bit codes of bytes as numbers, without scale. `zero`: the code of 0 (INT4)."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        if FORMAT == _INT4:
            numbers = tl.inline_asm_elementwise(
                _INT4_HIGH if HIGH else _INT4_LOW, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4
            ) - (zero + 128.0).to(tl.bfloat16)
        elif cuda_capability_geq(9, 0):
            numbers = tl.inline_asm_elementwise(
                _E2M1_HIGH if HIGH else _E2M1_LOW, "=r,=r,r", [packed], dtype=tl.bfloat16, is_pure=True, pack=4
            )
        else:
            numbers = tl.inline_asm_elementwise(
                _E2M1_HIGH_BEFORE if HIGH else _E2M1_LOW_BEFORE, "=r,=r,r", [packed],
                dtype=tl.bfloat16, is_pure=True, pack=4,
            )  # fmt: skip
    else:
        codes = packed >> 4 if HIGH else packed & 15
        if FORMAT == _INT4:
            numbers = codes.to(DTYPE) - zero.to(DTYPE)
        else:
            bits = codes.to(tl.int32)
            bits = ((bits & 8) << 28) | ((bits & 7) << 22)
            numbers = (bits.to(tl.float32, bitcast=True) * 2.0**126).to(DTYPE)
    return numbers


@triton.jit
def _load_zero(pointers, mask, outputs: tl.constexpr, ZEROS: tl.constexpr):
    if ZEROS:
        zero = tl.load(pointers, mask, 0).to(tl.float32)[:, None]
    else:
        zero = tl.full([outputs, 1], 8.0, tl.float32)
    return zero


@triton.jit
def _accumulate(
    acc,
    weights,
    weights_mask,
    scales,
    zeros,
    next_scale,  # elements to the scale of the next group
    n_mask,
    x,
    x_second,
    x_scale,
    FORMAT: tl.constexpr,
    GROUPED: tl.constexpr,
    FP8_ROWS: tl.constexpr,
    SHARED: tl.constexpr,  # both halves of the unit have the same scale
    ZEROS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """Add the product of one unit of inputs to `acc`."""
    if EVEN_K:
        raw = tl.load(weights, eviction_policy="evict_first")
    else:
        raw = tl.load(weights, weights_mask, 0.0 if FORMAT == _FP8 else 0, eviction_policy="evict_first")
    if FORMAT == _FP8:
        if FP8_ROWS:
            w = raw
        else:
            w = raw.to(tl.float16).to(tl.float32).to(x.dtype)  # exact; faster than directly to bf16
        if GROUPED and FP8_ROWS:
            acc += tl.dot(w, x) * (tl.load(scales, n_mask, 0.0).to(tl.float32)[:, None] * x_scale[None, :])
        elif GROUPED:
            acc += tl.dot(w, x) * tl.load(scales, n_mask, 0.0).to(tl.float32)[:, None]
        else:
            acc = tl.dot(w, x, acc)
    else:
        zero = _load_zero(zeros, n_mask, raw.shape[0], ZEROS)
        scale = tl.load(scales, n_mask, 0.0).to(tl.float32)[:, None]
        product = tl.dot(_to_numbers(raw, zero, False, FORMAT, x.dtype), x)
        if SHARED:
            acc += tl.dot(_to_numbers(raw, zero, True, FORMAT, x.dtype), x_second, product) * scale
        else:
            zero = _load_zero(zeros + next_scale, n_mask, raw.shape[0], ZEROS)
            second = tl.dot(_to_numbers(raw, zero, True, FORMAT, x.dtype), x_second)
            acc += product * scale + second * tl.load(scales + next_scale, n_mask, 0.0).to(tl.float32)[:, None]
    return acc


@triton.jit(do_not_specialize=["M"])
def _quantized_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    partials_ptr,
    counters_ptr,
    pairs_ptr,
    experts_ptr,
    pair_weights_ptr,
    M,
    N,
    x_stride,
    residual_stride,
    out_stride,
    K: tl.constexpr,
    W_STRIDE: tl.constexpr,  # bytes of a row of weights
    GROUPS: tl.constexpr,  # scales of a row of weights
    GROUP: tl.constexpr,  # inputs of a scale
    UNIT: tl.constexpr,  # inputs that are multiplied at once; of 4-bit weights, a byte has inputs i and i + UNIT / 2
    INPUTS_PER_SPLIT: tl.constexpr,  # a multiple of BLOCK_K
    SPLITS: tl.constexpr,
    FORMAT: tl.constexpr,
    ZEROS: tl.constexpr,
    FP8_ROWS: tl.constexpr,  # rows are in FP8, with a scale per row, and per group if the weights have groups
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROUTED: tl.constexpr,  # rows are pairs of tokens and experts
    TOP_K: tl.constexpr,
    CLAMPED: tl.constexpr,  # the gate is that of `ClampedSwiglu`
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Programs of the same weights and other rows are neighbors, so that the weights are read from memory once.
    if ROUTED:
        tiles = tl.cdiv(N, BLOCK_N)
        row_tile, tile, split = tl.program_id(0) // tiles, tl.program_id(0) % tiles, 0
    else:
        row_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_mask = n < N
    m = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    height = 2 * N if GATED else N
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    expert = 0
    if ROUTED:
        expert = tl.load(experts_ptr + row_tile)
        if expert < 0:
            return
        pair = tl.load(pairs_ptr + m)
        valid = pair >= 0
        row = tl.where(valid, pair // TOP_K if GATED else pair, 0).to(tl.int64)
    else:
        valid = m < M
        row = tl.where(valid, m, 0).to(tl.int64)
    row_mask = valid[None, :]
    four_bits: tl.constexpr = FORMAT != _FP8
    span: tl.constexpr = UNIT // 2 if four_bits else UNIT
    grouped: tl.constexpr = four_bits or GROUPS > 1  # otherwise the scale is applied at the end
    even_k: tl.constexpr = K % BLOCK_K == 0
    offsets = tl.arange(0, span)
    output = tl.where(n_mask, n, 0).to(tl.int64) + (expert * height if ROUTED else 0)
    weights = w_ptr + output[:, None] * W_STRIDE + offsets[None, :]
    up_weights = weights + N.to(tl.int64) * W_STRIDE
    # Scales are stored by group: [experts, groups, outputs].
    scale_at = n + (expert * GROUPS * height if ROUTED else 0)
    shared: tl.constexpr = GROUP >= UNIT
    rows = x_ptr + row[None, :] * x_stride + offsets[:, None]
    begin = split * INPUTS_PER_SPLIT
    end = tl.minimum(begin + INPUTS_PER_SPLIT, K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_up = acc
    for k in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        for unit in tl.static_range(0, BLOCK_K, UNIT):
            at = k + unit
            w_at = at // 2 if four_bits else at
            group_at = (at // GROUP) * height
            # Packed weights are padded to whole units, rows of x are not.
            w_mask = (w_at + offsets < W_STRIDE)[None, :]
            x_mask = row_mask if even_k else row_mask & (at + offsets < K)[:, None]
            x = tl.load(rows + at, x_mask, 0.0)
            x_second = x
            if four_bits:
                second_mask = row_mask if even_k else row_mask & (at + span + offsets < K)[:, None]
                x_second = tl.load(rows + at + span, second_mask, 0.0)
            scale_mask = n_mask if even_k else n_mask & (at < K)
            scales = scale_ptr + scale_at + group_at
            zeros = zero_ptr + scale_at + group_at
            x_scale = 0.0
            if FP8_ROWS and grouped:
                x_scale = tl.load(x_scale_ptr + (at // GROUP) * M + row, valid if even_k else valid & (at < K), 0.0)
            acc = _accumulate(
                acc, weights + w_at, w_mask, scales, zeros, height, scale_mask, x, x_second, x_scale,
                FORMAT, grouped, FP8_ROWS, shared, ZEROS, even_k,
            )  # fmt: skip
            if GATED:
                acc_up = _accumulate(
                    acc_up, up_weights + w_at, w_mask, scales + N, zeros + N, height, scale_mask, x, x_second, x_scale,
                    FORMAT, grouped, FP8_ROWS, shared, ZEROS, even_k,
                )  # fmt: skip

    last = True
    if SPLITS > 1:
        cells = BLOCK_N * BLOCK_M * (2 if GATED else 1)
        tile_offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        slot = tile * tl.num_programs(0) + row_tile
        part = partials_ptr + (slot.to(tl.int64) * SPLITS + split) * cells + tile_offsets
        tl.store(part, acc)
        if GATED:
            tl.store(part + BLOCK_N * BLOCK_M, acc_up)
        tl.debug_barrier()  # all threads have written their part before the counter is incremented
        last = tl.atomic_add(counters_ptr + slot, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(counters_ptr + slot, 0)  # ready for the next launch
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            acc_up = acc
            part = partials_ptr + slot.to(tl.int64) * SPLITS * cells + tile_offsets
            for _ in range(SPLITS):
                acc += tl.load(part, cache_modifier=".cg")
                if GATED:
                    acc_up += tl.load(part + BLOCK_N * BLOCK_M, cache_modifier=".cg")
                part += cells
    if last:
        if not grouped:
            acc *= tl.load(scale_ptr + scale_at, n_mask, 0.0).to(tl.float32)[:, None]
            if GATED:
                acc_up *= tl.load(scale_ptr + scale_at + N, n_mask, 0.0).to(tl.float32)[:, None]
            if FP8_ROWS:
                x_scale = tl.load(x_scale_ptr + row, valid, 0.0)[None, :]
                acc *= x_scale
                if GATED:
                    acc_up *= x_scale
        if BIAS:
            bias_at = bias_ptr + expert * height + n
            acc += tl.load(bias_at, n_mask, 0.0).to(tl.float32)[:, None]
            if GATED:
                acc_up += tl.load(bias_at + N, n_mask, 0.0).to(tl.float32)[:, None]
        if CLAMPED:
            acc = tl.minimum(acc, LIMIT)
            acc_up = tl.minimum(tl.maximum(acc_up, -LIMIT), LIMIT)
            acc = acc / (1.0 + tl.exp(-ALPHA * acc)) * (acc_up + 1.0)
        elif GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * acc_up
        mask = row_mask & n_mask[:, None]
        target = m
        if ROUTED:
            target = pair
            if not GATED:
                acc *= tl.load(pair_weights_ptr + pair, valid, 0.0)[None, :]
        if RESIDUAL:
            at = residual_ptr + target.to(tl.int64)[None, :] * residual_stride + n[:, None]
            acc += tl.load(at, mask, 0.0).to(tl.float32)
        out = out_ptr + target.to(tl.int64)[None, :] * out_stride + n[:, None]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask)


def quantized_gemm(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    config: QuantizedConfig,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    routed: PairBlocks | None = None,
    swiglu: ClampedSwiglu | None = None,
    x_scales: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Write `x @ weight.T + bias` to `out`, with the options of `linear.linear`.

    `routed`: the weights are those of experts, `[experts, outputs, inputs]`, each block of `config.rows` pairs has one
    of them, and `out` has a row per pair. With `gated`, rows of `x` are tokens, without, they are pairs, whose results
    are multiplied with their weights. `x_scales`: of rows in FP8, as `fp8.quantize_rows` returns them.
    """
    outputs, inputs = out.shape[1], weight.inputs
    unit = weight.unit or config.inputs
    block_k = max(config.inputs // unit, 1) * unit
    tiles = triton.cdiv(outputs, config.outputs)
    splits = 1
    inputs_per_split = triton.cdiv(inputs, block_k) * block_k
    if routed is None:
        row_tiles = triton.cdiv(len(x), config.rows)
        inputs_per_split = triton.cdiv(triton.cdiv(inputs, config.splits), block_k) * block_k
        splits = triton.cdiv(inputs, inputs_per_split)
        grid: tuple[int, ...] = (row_tiles, tiles, splits)
        slots = row_tiles * tiles
        pairs = experts = pair_weights = x
    else:
        grid, slots = (len(routed.experts) * tiles,), 1
        pairs, experts, pair_weights = routed
    cells = slots * splits * config.outputs * config.rows * (2 if gated else 1) if splits > 1 else 0
    partials, counters = get_workspace(out.device, cells, slots)
    alpha, limit = swiglu or (0.0, 0.0)
    weight_bytes = block_k * config.outputs * (2 if gated else 1) // (1 if weight.format == "fp8" else 2)
    stages = fit_stages(config.stages, block_k * config.rows * x.element_size() + weight_bytes)
    _quantized_kernel[grid](
        x, weight.scales if x_scales is None else x_scales,
        weight.data, weight.scales, weight.scales if weight.zeros is None else weight.zeros,
        x if bias is None else bias, x if residual is None else residual, out, partials, counters,
        pairs, experts, pair_weights, len(x), outputs,
        x.stride(0), 0 if residual is None else residual.stride(0), out.stride(0),
        K=inputs, W_STRIDE=weight.data.shape[-1], GROUPS=weight.scales.shape[-2], GROUP=weight.group, UNIT=unit,
        INPUTS_PER_SPLIT=inputs_per_split, SPLITS=splits,
        FORMAT=FORMATS[weight.format], ZEROS=weight.zeros is not None, FP8_ROWS=x_scales is not None,
        BIAS=bias is not None, GATED=gated,
        RESIDUAL=residual is not None, ROUTED=routed is not None,
        TOP_K=1 if routed is None else pair_weights.shape[1],
        CLAMPED=swiglu is not None, ALPHA=alpha, LIMIT=limit,
        BLOCK_M=config.rows, BLOCK_N=config.outputs, BLOCK_K=block_k, STAGES=stages,
        num_warps=config.warps, **pdl_options(pdl),
    )  # fmt: skip


@triton.jit
def _dequantize_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, N, K: tl.constexpr, W_STRIDE: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, UNIT: tl.constexpr, FORMAT: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a few rows' weights of one unit of inputs in the dtype of `out`."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * UNIT
    expert = tl.program_id(2)
    row = (expert.to(tl.int64) * N + n)[:, None]
    mask = (n < N)[:, None]
    four_bits: tl.constexpr = FORMAT != _FP8
    span: tl.constexpr = UNIT // 2 if four_bits else UNIT
    offsets = tl.arange(0, span)
    w_at = (first // 2 if four_bits else first) + offsets
    w_mask = mask & (w_at < W_STRIDE)[None, :]
    other: tl.constexpr = 0 if four_bits else 0.0
    raw = tl.load(w_ptr + row * W_STRIDE + w_at[None, :], w_mask, other)
    for half in tl.static_range(2 if four_bits else 1):
        at = first + half * span
        group = (expert * GROUPS + at // GROUP) * N + n
        scale_mask = (n < N) & (at < K)
        scale = tl.load(scale_ptr + group, scale_mask, 0.0).to(tl.float32)[:, None]
        if four_bits:
            zero = tl.full([BLOCK_N, 1], 8.0, tl.float32)
            if ZEROS:
                zero = tl.load(zero_ptr + group, scale_mask, 0).to(tl.float32)[:, None]
            numbers = _to_numbers(raw, zero, half == 1, FORMAT, tl.float32)
        else:
            numbers = raw.to(tl.float32)
        out = out_ptr + row * K + (at + offsets)[None, :]
        tl.store(out, (numbers * scale).to(out_ptr.dtype.element_ty), mask & (at + offsets < K)[None, :])


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix as `[outputs, inputs]`, or those of experts with one more dimension in front, in `dtype`."""
    outputs, inputs = weight.shape[-2:]
    out = torch.empty(weight.shape, dtype=dtype, device=weight.data.device)
    unit = weight.unit or 128
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    _dequantize_kernel[(triton.cdiv(outputs, 32), triton.cdiv(inputs, unit), experts)](
        weight.data, weight.scales, weight.scales if weight.zeros is None else weight.zeros, out, outputs,
        K=inputs, W_STRIDE=weight.data.shape[-1], GROUP=weight.group, GROUPS=weight.scales.shape[-2], UNIT=unit,
        FORMAT=FORMATS[weight.format], ZEROS=weight.zeros is not None, BLOCK_N=32, num_warps=4,
    )  # fmt: skip
    return out
