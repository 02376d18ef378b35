# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Sampling for a whole batch on the device: steps 6 to 10 of `sampling.sampler`, without host synchronization.

Uses the random numbers of `sampling.draw`, bit for bit: one uniform number per row is looked up in the cumulative
distribution in vocabulary order. A token differs from the CPU's only if that number lies within a rounding error of the
boundary between two tokens.

Two launches. The first reads the logits once, with many programs per row, and stores the maximum and the probability
mass of every block of 128 logits. The second has one program per row: it finds the block that contains the random
number and reads only that block. Filtered rows first find their threshold logit among candidates (`top_k_top_p`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import get_workspace, pdl_launch_dependents, pdl_options, pdl_wait
from syringa.engine.gpu.kernels.reference import GREEDY_BELOW, NO_TOKEN
from syringa.engine.gpu.kernels.top_k_top_p import find_threshold_key, list_candidate_blocks, sortable_key

BLOCK = 128  # _BLOCK in sampling/draw.py
_CHUNK = 16  # blocks per program of the first launch
_TILE = 32  # blocks per iteration of the second launch
_MAX_CANDIDATES = 8192  # candidates gathered per row; with more, the whole row is searched

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _block_stats_kernel(
    logits_ptr,
    temperatures_ptr,
    maxima_ptr,
    masses_ptr,
    stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    x = tl.load(logits_ptr + row * stride + at, at < VOCAB_SIZE, float("-inf"))
    temperature = tl.maximum(tl.load(temperatures_ptr + row), _GREEDY_BELOW)
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    max_logit = tl.max(x, 1)
    mass = tl.sum(tl.exp((x - tl.where(max_logit == float("-inf"), 0.0, max_logit)[:, None]) / temperature), 1)
    tl.store(maxima_ptr + row * BLOCKS + block, tl.where(has_nan, float("inf"), max_logit), block < BLOCKS)
    tl.store(masses_ptr + row * BLOCKS + block, mass, block < BLOCKS)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, choice, position):
    """`draw.uniforms` for int64 words that hold the bits of the unsigned ones."""
    state = seed.to(tl.uint64, bitcast=True)
    state = _mix(_mix(state) + (choice.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    state = _mix(_mix(state) + (position.to(tl.uint64) + 1) * 0xD1B54A32D192ED03)
    return (_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    choices_ptr,
    positions_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maxima_ptr,
    masses_ptr,
    candidates_ptr,
    tokens_ptr,
    stride,
    VOCAB_SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    MAX_CANDIDATES: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    logits = logits_ptr + row * stride
    maxima_row, masses_row = maxima_ptr + row * BLOCKS, masses_ptr + row * BLOCKS
    index = tl.arange(0, PADDED_BLOCKS)
    within = tl.arange(0, BLOCK)
    maxima = tl.load(maxima_row + index, index < BLOCKS, float("-inf"))
    max_logit = tl.max(maxima)
    temperature = tl.load(temperatures_ptr + row)
    token = tl.full([], _NO_TOKEN, tl.int64)
    if max_logit == float("-inf") or max_logit == float("inf"):
        token = tl.full([], _NO_TOKEN, tl.int64)
    elif temperature < _GREEDY_BELOW:
        block = tl.min(tl.where(maxima == max_logit, index, PADDED_BLOCKS))
        at = block * BLOCK + within
        x = tl.load(logits + at, at < VOCAB_SIZE, float("-inf"))
        token = tl.min(tl.where(x == max_logit, at, VOCAB_SIZE)).to(tl.int64)
    else:
        masses = tl.load(masses_row + index, index < BLOCKS, 0.0) * tl.exp((maxima - max_logit) / temperature)
        threshold = tl.full([], 0, tl.uint32)
        min_p_ratio = tl.zeros([], tl.float32)
        if FILTERED:
            top_k = tl.load(top_k_ptr + row).to(tl.int32)
            top_p = tl.load(top_p_ptr + row).to(tl.float64)
            min_p_ratio = tl.load(min_p_ptr + row).to(tl.float32)
            has_threshold = ((top_k > 0) & (top_k < VOCAB_SIZE)) | (top_p < 1)
            if has_threshold or min_p_ratio > 0:
                listed = candidates_ptr + row * (MAX_CANDIDATES + PADDED_BLOCKS)
                if has_threshold:
                    total = tl.sum(masses.to(tl.float64))
                    threshold, count = find_threshold_key(
                        logits, listed, listed + PADDED_BLOCKS, maxima, index, max_logit, temperature, total, top_k,
                        top_p, VOCAB_SIZE, BLOCKS, BLOCK, MAX_CANDIDATES, CHUNK * BLOCK,
                    )  # fmt: skip
                else:
                    count = list_candidate_blocks(
                        maxima, index, max_logit + temperature * (tl.log(min_p_ratio) - 0.01), listed
                    )
                tl.store(masses_row + index, tl.zeros([PADDED_BLOCKS], tl.float32), index < BLOCKS)
                tl.debug_barrier()  # the zeros are written before the kept masses
                for first in range(0, count, CHUNK):
                    each = first + tl.arange(0, CHUNK)
                    block = tl.load(listed + each, each < count, 0.0).to(tl.int32)
                    at = block[:, None] * BLOCK + within[None, :]
                    x = tl.load(logits + at, at < VOCAB_SIZE, float("-inf"))
                    weights = tl.exp((x - max_logit) / temperature)
                    kept = tl.sum(tl.where((sortable_key(x) >= threshold) & (weights >= min_p_ratio), weights, 0.0), 1)
                    tl.store(masses_row + block, kept, each < count)
                tl.debug_barrier()  # other threads read them next
                masses = tl.load(masses_row + index, index < BLOCKS, 0.0)
        uniform = _uniform(
            tl.load(seeds_ptr + row), tl.load(choices_ptr + row).to(tl.int64), tl.load(positions_ptr + row).to(tl.int64)
        )
        # Only blocks with mass may be chosen: rounding in the parallel prefix sum can also increase it elsewhere.
        masses64 = masses.to(tl.float64)
        cumulative = tl.cumsum(masses64)
        nonzero = masses > 0
        target = uniform * tl.max(tl.where(nonzero, cumulative, 0.0))
        block = tl.min(tl.where(nonzero & (cumulative > target), index, PADDED_BLOCKS))
        target -= tl.sum(tl.where(index == block, cumulative - masses64, 0.0))
        at = block * BLOCK + within
        x = tl.load(logits + at, at < VOCAB_SIZE, float("-inf"))
        weights = tl.exp((x - max_logit) / temperature)
        if FILTERED:
            weights = tl.where((sortable_key(x) >= threshold) & (weights >= min_p_ratio), weights, 0.0)
        cumulative = tl.cumsum(weights.to(tl.float64))
        nonzero = weights > 0
        index_in_block = tl.min(tl.where(nonzero & (cumulative > target), within, BLOCK))
        index_in_block = tl.minimum(index_in_block, tl.max(tl.where(nonzero, within, 0)))
        token = (block * BLOCK + index_in_block).to(tl.int64)
    tl.store(tokens_ptr + row, token)


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Return a token per row, int64; `NO_TOKEN` for rows without a finite logit or with NaN.

    `logits`: fp32 `[rows, vocabulary]`, rows contiguous; `temperatures`: fp32, greedy below `GREEDY_BELOW`; `seeds`:
    int64, the bits of the words of `draw.uniforms`; `choices`, `positions`, `top_k`: integers; `top_p`: float64;
    `min_p`: floats. Top-k 0, top-p 1 and min-p 0 disable a filter. Pass all three filters or none.
    """
    rows, size = logits.shape
    blocks = triton.cdiv(size, BLOCK)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    filtered = top_k is not None
    span = triton.next_power_of_2(blocks)
    # Aligned to 16 bytes: for other alignments, Triton compiles the kernels again.
    num_cells, candidates = triton.cdiv(rows * blocks, 4) * 4, rows * (_MAX_CANDIDATES + span) if filtered else 0
    workspace, _ = get_workspace(logits.device, 2 * num_cells + candidates, 0)
    maxima, masses, candidates_buffer = (
        workspace[:num_cells],
        workspace[num_cells : 2 * num_cells],
        workspace[2 * num_cells :],
    )
    _block_stats_kernel[(rows, triton.cdiv(blocks, _CHUNK))](
        logits,
        temperatures,
        maxima,
        masses,
        logits.stride(0),
        VOCAB_SIZE=size,
        BLOCKS=blocks,
        CHUNK=_CHUNK,
        BLOCK=BLOCK,
        num_warps=4,
        **pdl_options(pdl),
    )
    filters = (top_k, top_p, min_p) if filtered else (temperatures,) * 3
    _sample_kernel[(rows,)](
        logits,
        temperatures,
        seeds,
        choices,
        positions,
        *filters,
        maxima,
        masses,
        candidates_buffer,
        out,
        logits.stride(0),
        VOCAB_SIZE=size,
        BLOCKS=blocks,
        FILTERED=filtered,
        CHUNK=_TILE,
        BLOCK=BLOCK,
        MAX_CANDIDATES=_MAX_CANDIDATES,
        PADDED_BLOCKS=span,
        num_warps=8,
        **pdl_options(pdl),
    )
    return out
