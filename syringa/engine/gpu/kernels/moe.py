# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Mixture-of-experts layers: fused routing and grouped matrix products, for 1 to thousands of tokens.

Each token is sent to `top_k` experts. The (token, expert) pairs are sorted by expert into a padded list, in which every
expert begins at a multiple of `BLOCK_M`; each program of the grouped product then multiplies one block of pairs, all of
one expert, with one tile of that expert's weights. Only the experts that a step uses are read.

The sort is a counting sort in which a pair's position depends on the tokens and their order alone, so the same step
gives the same bits every time. The number of launches does not depend on the routing, so a step can be captured in
a CUDA graph: the grid covers the largest possible number of blocks, and programs without pairs return at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from syringa.engine.gpu.kernels.fp8 import quantize_rows
from syringa.engine.gpu.kernels.launch import (
    fit_stages,
    loads_descriptors_ahead,
    pdl_launch_dependents,
    pdl_options,
    pdl_wait,
)
from syringa.engine.gpu.kernels.quantized_gemm import PairBlocks, QuantizedConfig, dequantize, quantized_gemm
from syringa.engine.gpu.kernels.reference import SigmoidScores
from syringa.engine.gpu.packed_weight import PackedWeight
from syringa.engine.models.config import ClampedSwiglu

MAX_CHUNK = 4096  # pairs per iteration of the sort
DEQUANTIZED_TOKENS = {"fp8": 6144, "int4": 512, "mxfp4": 512}  # from here on, converting experts first is faster


class MoeConfig(NamedTuple):
    """Tile sizes of the grouped product."""

    pairs: int  # per block: a multiple of 16
    outputs: int  # per program
    inputs: int  # per iteration
    warps: int
    stages: int


class Routing(NamedTuple):
    """The pairs of a step, sorted by expert."""

    weights: torch.Tensor  # [tokens, top_k] fp32
    pairs: torch.Tensor  # [padded pairs] int32: token × top_k + choice, or -1 for padding
    experts: torch.Tensor  # [blocks] int32: the expert of each block of `block` pairs, or -1 for unused blocks
    block: int


@triton.jit
def _select_kernel(
    logits_ptr,
    correction_ptr,
    ids_ptr,
    weights_ptr,
    pairs_ptr,
    scale,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOICES: tl.constexpr,  # TOP_K and the shared experts
    BLOCK_T: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SINGLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of one token, best first; ties go to the lower expert.

    With `SINGLE` it is the only token, so that each choice is a block of its own and nothing has to be sorted.
    """
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    token = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    choices = tl.arange(0, BLOCK_T)
    logits = tl.load(logits_ptr + token * E + e, e < E, -float("inf")).to(tl.float32)
    top = tl.max(logits, 0)
    if SIGMOID:
        scores = tl.sigmoid(logits)
        logits = tl.where(e < E, scores + tl.load(correction_ptr + e, e < E, 0.0), -float("inf"))
        total = 1.0
    else:
        scores = tl.exp(logits - top)
        total = tl.sum(scores, 0)
    ids = E + choices - TOP_K  # of shared experts
    weights = tl.zeros([BLOCK_T], tl.float32)
    for choice in tl.static_range(TOP_K):
        index = tl.argmax(logits, 0, tie_break_left=True)
        ids = tl.where(choices == choice, index, ids)
        weight = tl.sum(tl.where(e == index, scores, 0.0), 0) if SIGMOID else tl.exp(tl.max(logits, 0) - top)
        weights = tl.where(choices == choice, weight, weights)
        logits = tl.where(e == index, -float("inf"), logits)
    if NORMALIZE:
        total = tl.sum(weights, 0)
    weights = tl.where(choices < TOP_K, weights * (scale / total), 1.0)
    tl.store(ids_ptr + token * CHOICES + choices, ids, choices < CHOICES)
    tl.store(weights_ptr + token * CHOICES + choices, weights, choices < CHOICES)
    if SINGLE:
        m = tl.arange(0, BLOCK_M)
        pairs = tl.where(m[None, :] == 0, choices[:, None], -1)
        tl.store(pairs_ptr + choices[:, None] * BLOCK_M + m[None, :], pairs, (choices < CHOICES)[:, None])


@triton.jit(do_not_specialize=["pair_count"])
def _count_kernel(ids_ptr, counts_ptr, pair_count, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """Count the pairs of each expert in one chunk."""
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + at, at < pair_count, 0)
    tl.store(counts_ptr + chunk * BLOCK_E + tl.arange(0, BLOCK_E), tl.histogram(ids, BLOCK_E, at < pair_count))


@triton.jit(do_not_specialize=["pair_count", "blocks", "chunks"])
def _sort_kernel(
    ids_ptr,
    counts_ptr,
    pairs_ptr,
    experts_ptr,
    pair_count,
    blocks,
    chunks,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,  # `counts` has the pairs of each expert per chunk; otherwise there is one chunk
    PDL: tl.constexpr,
):
    """Write one expert's pairs of one chunk to their places in the sorted list, and the expert to its blocks."""
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    own, chunk = tl.program_id(0), tl.program_id(1)
    e = tl.arange(0, BLOCK_E)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + at, at < pair_count, -1)
    if COUNTED:
        counts = tl.zeros([BLOCK_E], tl.int32)
        earlier = counts
        for other in range(chunks):
            in_chunk = tl.load(counts_ptr + other * BLOCK_E + e)
            counts += in_chunk
            earlier += tl.where(other < chunk, in_chunk, 0)
        before = tl.sum(tl.where(e == own, earlier, 0), 0)
    else:
        counts = tl.histogram(tl.maximum(ids, 0), BLOCK_E, at < pair_count)
        before = 0
    used = (counts + BLOCK_M - 1) // BLOCK_M
    first_block = tl.sum(tl.where(e < own, used, 0), 0)
    own_blocks = tl.sum(tl.where(e == own, used, 0), 0)
    count = tl.sum(tl.where(e == own, counts, 0), 0)
    start = first_block * BLOCK_M
    mine = (ids == own).to(tl.int32)
    tl.store(pairs_ptr + start + before + tl.cumsum(mine, 0) - 1, at, mine == 1)
    if chunk == 0:
        padding = count + tl.arange(0, BLOCK_M)
        tl.store(pairs_ptr + start + padding, -1, padding < own_blocks * BLOCK_M)
        for block in range(first_block, first_block + own_blocks):
            tl.store(experts_ptr + block, own)
        if own == E - 1:
            for first in range(tl.sum(used, 0), blocks, CHUNK):
                unused = first + tl.arange(0, CHUNK)
                tl.store(experts_ptr + unused, -1, unused < blocks)


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    normalize: bool,
    sigmoid: SigmoidScores | None = None,
    shared: int = 0,
    block: int,
    pdl: bool = False,
) -> Routing:
    """Choose `top_k` experts per row of router logits, and the shared ones, and sort the pairs by expert.

    `normalize`: the weights of a token's chosen experts add up to 1. `block`: pairs per block of the grouped product.
    """
    tokens, routed = logits.shape
    experts, choices = routed + shared, top_k + shared
    device = logits.device
    pairs = tokens * choices
    # Every expert that is used may leave one block partly empty.
    blocks = min(triton.cdiv(pairs, block) + experts - 1, pairs)
    single = tokens == 1
    block_experts = torch.empty(blocks, dtype=torch.int32, device=device)
    ids = block_experts if single else torch.empty(pairs, dtype=torch.int32, device=device)
    weights = torch.empty(tokens, choices, dtype=torch.float32, device=device)
    sorted_pairs = torch.empty(blocks * block, dtype=torch.int32, device=device)
    padded = triton.next_power_of_2(experts)
    _select_kernel[(tokens,)](
        logits, logits if sigmoid is None else sigmoid.correction, ids, weights, sorted_pairs,
        1.0 if sigmoid is None else sigmoid.scale,
        E=routed, BLOCK_E=triton.next_power_of_2(routed), TOP_K=top_k, CHOICES=choices,
        BLOCK_T=triton.next_power_of_2(choices), NORMALIZE=normalize, SIGMOID=sigmoid is not None,
        BLOCK_M=block, SINGLE=single, num_warps=1, **pdl_options(pdl),
    )  # fmt: skip
    if single:
        return Routing(weights, sorted_pairs, block_experts, block)
    chunk = min(max(triton.next_power_of_2(pairs), 16), MAX_CHUNK)
    chunks = triton.cdiv(pairs, chunk)
    warps = 8 if chunk > 1024 else 4
    counts = ids
    if chunks > 1:
        counts = torch.empty(chunks, padded, dtype=torch.int32, device=device)
        _count_kernel[(chunks,)](
            ids, counts, pairs, BLOCK_E=padded, CHUNK=chunk, num_warps=warps, **pdl_options(pdl)
        )  # fmt: skip
    _sort_kernel[(experts, chunks)](
        ids, counts, sorted_pairs, block_experts, pairs, blocks, chunks,
        E=experts, BLOCK_E=padded, BLOCK_M=block, CHUNK=chunk, COUNTED=chunks > 1, num_warps=warps, **pdl_options(pdl),
    )  # fmt: skip
    return Routing(weights, sorted_pairs, block_experts, block)


@triton.jit
def _grouped_kernel(
    x_ptr,
    w,  # [experts × outputs, K]: a tensor descriptor, for which what lies beyond K is zero, or a pointer
    bias_ptr,
    weights_ptr,
    pairs_ptr,
    experts_ptr,
    out_ptr,
    N,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,  # silu(gate) × up, with both weights in one tensor, gate first; rows of x are tokens
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,  # gate is that of `ClampedSwiglu`
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One block of pairs times one tile of their expert's weights."""
    tiles = tl.cdiv(N, BLOCK_N)
    block, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    height = 2 * N if GATED else N
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    expert = tl.load(experts_ptr + block)
    if expert < 0:
        return
    pair = tl.load(pairs_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    valid = pair >= 0
    row = tl.where(valid, pair // TOP_K if GATED else pair, 0).to(tl.int64)
    k_offsets = tl.arange(0, BLOCK_K)
    rows = x_ptr + row[:, None] * K + k_offsets[None, :]
    first = expert * height + tile * BLOCK_N  # outputs beyond N are computed and not stored
    even_k: tl.constexpr = K % BLOCK_K == 0
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = k + k_offsets < K
        x = tl.load(rows + k, valid[:, None] if even_k else valid[:, None] & inside[None, :], 0.0)
        mask = (n < N)[:, None] if even_k else (n < N)[:, None] & inside[None, :]
        acc = tl.dot(x, _load_weights(w, first, k, mask, K, BLOCK_N, BLOCK_K, DESCRIBED).T, acc)
        if GATED:
            acc_up = tl.dot(x, _load_weights(w, first + N, k, mask, K, BLOCK_N, BLOCK_K, DESCRIBED).T, acc_up)
    if BIAS:
        acc += tl.load(bias_ptr + expert * height + n, n < N, 0.0).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(bias_ptr + expert * height + N + n, n < N, 0.0).to(tl.float32)[None, :]
    if CLAMPED:
        acc = tl.minimum(acc, LIMIT)
        acc_up = tl.minimum(tl.maximum(acc_up, -LIMIT), LIMIT)
        acc = acc / (1.0 + tl.exp(-ALPHA * acc)) * (acc_up + 1.0)
    elif GATED:
        acc = acc / (1.0 + tl.exp(-acc)) * acc_up
    else:
        acc *= tl.load(weights_ptr + pair, valid, 0.0)[:, None]
    out = out_ptr + pair.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), valid[:, None] & (n < N)[None, :])


@triton.jit
def _load_weights(
    w, first, k, mask, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr
):
    """Load a tile. `mask`: without a descriptor, which elements are inside."""
    if DESCRIBED:
        tile = w.load([first, k])
    else:
        rows = (first + tl.arange(0, BLOCK_N)).to(tl.int64)
        tile = tl.load(w + rows[:, None] * K + (k + tl.arange(0, BLOCK_K))[None, :], mask, 0.0)
    return tile


@triton.jit
def _combine_kernel(
    pairs_ptr, residual_ptr, out_ptr, H, TOP_K: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum a token's expert outputs in the order of its choices, plus the residual."""
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    h = part * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    if RESIDUAL:
        acc = tl.load(residual_ptr + token * H + h, h < H, 0.0).to(tl.float32)
    for choice in tl.static_range(TOP_K):
        acc += tl.load(pairs_ptr + (token * TOP_K + choice) * H + h, h < H, 0.0).to(tl.float32)
    tl.store(out_ptr + token * H + h, acc.to(out_ptr.dtype.element_ty), h < H)


def _grouped(
    x: torch.Tensor,
    w: torch.Tensor | PackedWeight,
    routing: Routing,
    out: torch.Tensor,
    *,
    gated: bool,
    config: MoeConfig | QuantizedConfig,
    bias: torch.Tensor | None = None,
    swiglu: ClampedSwiglu | None = None,
    pdl: bool = False,
) -> None:
    if isinstance(w, PackedWeight):
        assert isinstance(config, QuantizedConfig)
        blocks = PairBlocks(routing.pairs, routing.experts, routing.weights)
        scales = None
        if config.fp8_rows:
            x, scales = quantize_rows(x, w.row_group, pdl=pdl)
        quantized_gemm(
            x, w, bias, out, config, gated=gated, routed=blocks, swiglu=swiglu, x_scales=scales, pdl=pdl
        )  # fmt: skip
        return
    assert isinstance(config, MoeConfig)
    n, k = out.shape[1], x.shape[1]
    described = loads_descriptors_ahead()
    weights = TensorDescriptor.from_tensor(w.view(-1, k), [config.outputs, config.inputs]) if described else w
    alpha, limit = swiglu or (0.0, 0.0)
    stage_bytes = config.inputs * (config.pairs + config.outputs * (2 if gated else 1)) * w.element_size()
    _grouped_kernel[(len(routing.experts) * triton.cdiv(n, config.outputs),)](
        x, weights, x if bias is None else bias, routing.weights, routing.pairs, routing.experts, out, n,
        K=k, TOP_K=routing.weights.shape[1], GATED=gated, BIAS=bias is not None,
        CLAMPED=swiglu is not None, ALPHA=alpha, LIMIT=limit,
        BLOCK_M=config.pairs, BLOCK_N=config.outputs, BLOCK_K=config.inputs,
        STAGES=fit_stages(config.stages, stage_bytes), DESCRIBED=described,
        num_warps=config.warps, **pdl_options(pdl),
    )  # fmt: skip


def choose_moe_configs(tokens: int, top_k: int, experts: int) -> tuple[MoeConfig, MoeConfig]:
    """Return the tiles of the gate-up and of the down product, which share their blocks of pairs."""
    per_expert = tokens * top_k / experts
    if tokens <= 2:
        return MoeConfig(16, 32, 256, 4, 3), MoeConfig(16, 128, 128, 4, 3)
    if per_expert <= 8:  # bound by reading the weights
        return MoeConfig(16, 128, 128, 4, 3), MoeConfig(16, 128, 128, 4, 4)
    if per_expert <= 16:
        return MoeConfig(32, 64, 256, 4, 2), MoeConfig(32, 128, 128, 4, 3)
    if per_expert <= 64:
        return MoeConfig(64, 64, 64, 4, 4), MoeConfig(64, 128, 64, 4, 4)
    return MoeConfig(128, 128, 64, 8, 4), MoeConfig(128, 256, 64, 8, 4)


def choose_quantized_moe_configs(
    tokens: int, top_k: int, experts: int, fp8: bool
) -> tuple[QuantizedConfig, QuantizedConfig]:
    """Return the tiles of quantized gate-up and down products, which share their blocks of pairs."""
    per_expert = tokens * top_k / experts
    if fp8 and per_expert > 2:  # with few pairs, quantizing them takes longer than it saves
        rows = 16 if per_expert <= 8 else 32 if per_expert <= 32 else 64
        config = QuantizedConfig(rows, 64, 128, 4, 4, fp8_rows=True)
    elif fp8:
        config = QuantizedConfig(16, 32, 256, 2, 4)
    elif tokens <= 2:
        config = QuantizedConfig(16, 32, 512, 2, 3)
    else:
        config = QuantizedConfig(32, 32, 256, 2, 3) if per_expert > 16 else QuantizedConfig(16, 32, 128, 2, 6)
    return config, config


def moe_mlp(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor | PackedWeight,
    down: torch.Tensor | PackedWeight,
    top_k: int,
    *,
    normalize: bool = True,
    sigmoid: SigmoidScores | None = None,
    shared: int = 0,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    swiglu: ClampedSwiglu | None = None,
    residual: torch.Tensor | None = None,
    configs: tuple[MoeConfig, MoeConfig] | tuple[QuantizedConfig, QuantizedConfig] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Return the output of the experts for rows `x`, plus `residual`.

    `gate_up`: [experts, 2 × intermediate, hidden], gates first. `down`: [experts, hidden, intermediate]. `biases`: of
    both, [experts, outputs]. `swiglu`: the gate; None: silu(gate) · up. The last `shared` experts are not among those
    of the router: every row uses them, with the weight 1.
    """
    tokens, hidden = x.shape
    choices = top_k + shared
    experts, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    if isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight) and configs is None:
        if tokens >= DEQUANTIZED_TOKENS[gate_up.format]:
            gate_up, down = dequantize(gate_up, x.dtype), dequantize(down, x.dtype)
        else:
            configs = choose_quantized_moe_configs(tokens, choices, experts, gate_up.format == "fp8")
    first, second = configs or choose_moe_configs(tokens, choices, experts)
    block = first.rows if isinstance(first, QuantizedConfig) else first.pairs
    routing = route(
        router_logits, top_k, normalize=normalize, sigmoid=sigmoid, shared=shared, block=block, pdl=pdl
    )  # fmt: skip
    gate_up_bias, down_bias = biases or (None, None)
    activated = torch.empty(tokens * choices, intermediate, dtype=x.dtype, device=x.device)
    _grouped(
        x, gate_up, routing, activated, gated=True, config=first, bias=gate_up_bias, swiglu=swiglu, pdl=pdl
    )  # fmt: skip
    outputs = torch.empty(tokens * choices, hidden, dtype=x.dtype, device=x.device)
    _grouped(activated, down, routing, outputs, gated=False, config=second, bias=down_bias, pdl=pdl)
    combined = torch.empty_like(x)
    part = min(triton.next_power_of_2(hidden), 1024)
    _combine_kernel[(tokens, triton.cdiv(hidden, part))](
        outputs, x if residual is None else residual, combined, hidden,
        TOP_K=choices, RESIDUAL=residual is not None, BLOCK=part, **pdl_options(pdl),
    )  # fmt: skip
    return combined
