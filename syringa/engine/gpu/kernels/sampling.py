# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""From logits to tokens for a whole batch, steps 6 to 10 of `sampler`, without a look from the host.

The draws are `draw.py`'s: one number in [0, 1) per row, from the same generator to the bit, falls into the cumulative
distribution in the order of the vocabulary. A token differs from the CPU's only where that number lies within a
rounding of the border between two tokens.

Two launches. The first reads the logits once, many programs a row, and keeps the best logit and the mass of every block
of 128. The second has a program per row: it finds the block in which the noise falls, and reads that block alone. A
filtered row looks for its least logit first, among the few that can be kept; where they are not few, in the whole row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.cutoff import key_of, least_key, list_blocks
from syringa.engine.gpu.kernels.launch import overlap, release, scratch, wait
from syringa.engine.gpu.kernels.reference import GREEDY_BELOW, NO_TOKEN

BLOCK = 128  # _BLOCK in draw.py
_CHUNK = 16  # blocks that a program of the first launch reads
_TILE = 32  # blocks that the second reads together
_FEW = 8192  # candidates that are copied together

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


@triton.jit
def _blocks_kernel(
    logits_ptr,
    temperatures_ptr,
    maxima_ptr,
    masses_ptr,
    stride,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    release(PDL)
    wait(PDL)
    x = tl.load(logits_ptr + row * stride + at, at < SIZE, float("-inf"))
    temperature = tl.maximum(tl.load(temperatures_ptr + row), _GREEDY_BELOW)
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    best = tl.max(x, 1)
    mass = tl.sum(tl.exp((x - tl.where(best == float("-inf"), 0.0, best)[:, None]) / temperature), 1)
    tl.store(maxima_ptr + row * BLOCKS + block, tl.where(broken, float("inf"), best), block < BLOCKS)
    tl.store(masses_ptr + row * BLOCKS + block, mass, block < BLOCKS)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, choice, position):
    """`draw.uniforms`, of int64 words that hold the same bits."""
    state = seed.to(tl.uint64, bitcast=True)
    state = _mix(_mix(state) + (choice.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15)
    state = _mix(_mix(state) + (position.to(tl.uint64) + 1) * 0xD1B54A32D192ED03)
    return (_mix(state) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _draw_kernel(
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
    few_ptr,
    tokens_ptr,
    stride,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    release(PDL)
    wait(PDL)
    logits = logits_ptr + row * stride
    maxima_row, masses_row = maxima_ptr + row * BLOCKS, masses_ptr + row * BLOCKS
    index = tl.arange(0, SPAN)
    within = tl.arange(0, BLOCK)
    maxima = tl.load(maxima_row + index, index < BLOCKS, float("-inf"))
    best = tl.max(maxima)
    temperature = tl.load(temperatures_ptr + row)
    token = tl.full([], _NO_TOKEN, tl.int64)
    if best == float("-inf") or best == float("inf"):
        token = tl.full([], _NO_TOKEN, tl.int64)
    elif temperature < _GREEDY_BELOW:
        block = tl.min(tl.where(maxima == best, index, SPAN))
        at = block * BLOCK + within
        x = tl.load(logits + at, at < SIZE, float("-inf"))
        token = tl.min(tl.where(x == best, at, SIZE)).to(tl.int64)
    else:
        masses = tl.load(masses_row + index, index < BLOCKS, 0.0) * tl.exp((maxima - best) / temperature)
        least = tl.full([], 0, tl.uint32)
        share = tl.zeros([], tl.float32)
        if FILTERED:
            top_k = tl.load(top_k_ptr + row).to(tl.int32)
            top_p = tl.load(top_p_ptr + row).to(tl.float64)
            share = tl.load(min_p_ptr + row).to(tl.float32)
            searched = ((top_k > 0) & (top_k < SIZE)) | (top_p < 1)
            if searched or share > 0:
                listed = few_ptr + row * (FEW + SPAN)
                if searched:
                    total = tl.sum(masses.to(tl.float64))
                    least, count = least_key(logits, listed, listed + SPAN, maxima, index, best, temperature, total,
                                             top_k, top_p, SIZE, BLOCKS, BLOCK, FEW, CHUNK * BLOCK)  # fmt: skip
                else:
                    count = list_blocks(maxima, index, best + temperature * (tl.log(share) - 0.01), listed)
                tl.store(masses_row + index, tl.zeros([SPAN], tl.float32), index < BLOCKS)
                tl.debug_barrier()  # before others of these are written
                for first in range(0, count, CHUNK):
                    each = first + tl.arange(0, CHUNK)
                    block = tl.load(listed + each, each < count, 0.0).to(tl.int32)
                    at = block[:, None] * BLOCK + within[None, :]
                    x = tl.load(logits + at, at < SIZE, float("-inf"))
                    weights = tl.exp((x - best) / temperature)
                    kept = tl.sum(tl.where((key_of(x) >= least) & (weights >= share), weights, 0.0), 1)
                    tl.store(masses_row + block, kept, each < count)
                tl.debug_barrier()  # other threads read them next
                masses = tl.load(masses_row + index, index < BLOCKS, 0.0)
        number = _uniform(
            tl.load(seeds_ptr + row), tl.load(choices_ptr + row).to(tl.int64), tl.load(positions_ptr + row).to(tl.int64)
        )
        # Only where there is mass can the noise fall, though a parallel sum may rise by a rounding elsewhere.
        exact = masses.to(tl.float64)
        reached = tl.cumsum(exact)
        held = masses > 0
        target = number * tl.max(tl.where(held, reached, 0.0))
        block = tl.min(tl.where(held & (reached > target), index, SPAN))
        target -= tl.sum(tl.where(index == block, reached - exact, 0.0))
        at = block * BLOCK + within
        x = tl.load(logits + at, at < SIZE, float("-inf"))
        weights = tl.exp((x - best) / temperature)
        if FILTERED:
            weights = tl.where((key_of(x) >= least) & (weights >= share), weights, 0.0)
        reached = tl.cumsum(weights.to(tl.float64))
        held = weights > 0
        place = tl.min(tl.where(held & (reached > target), within, BLOCK))
        place = tl.minimum(place, tl.max(tl.where(held, within, 0)))
        token = (block * BLOCK + place).to(tl.int64)
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
    """A token per row, int64: `NO_TOKEN` where there is nothing to draw from.

    `logits`: fp32 `[rows, vocabulary]`, its rows contiguous; `temperatures`: fp32, below `GREEDY_BELOW` the best token;
    `seeds`: int64, the bits of `draw.uniforms`' words; `choices`, `positions`, `top_k`: integers; `top_p`: float64;
    `min_p`: floats. A rule is off at 0, 1 and 0. All three or none are given; none saves registers, not reads.
    """
    rows, size = logits.shape
    blocks = triton.cdiv(size, BLOCK)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    filtered = top_k is not None
    span = triton.next_power_of_2(blocks)
    cells, few = rows * blocks, rows * (_FEW + span) if filtered else 0
    room, _ = scratch(logits.device, 2 * cells + few, 0)
    maxima, masses, gathered = room[:cells], room[cells : 2 * cells], room[2 * cells :]
    _blocks_kernel[(rows, triton.cdiv(blocks, _CHUNK))](
        logits,
        temperatures,
        maxima,
        masses,
        logits.stride(0),
        SIZE=size,
        BLOCKS=blocks,
        CHUNK=_CHUNK,
        BLOCK=BLOCK,
        num_warps=4,
        **overlap(pdl),
    )
    rules = (top_k, top_p, min_p) if filtered else (temperatures,) * 3
    _draw_kernel[(rows,)](
        logits,
        temperatures,
        seeds,
        choices,
        positions,
        *rules,
        maxima,
        masses,
        gathered,
        out,
        logits.stride(0),
        SIZE=size,
        BLOCKS=blocks,
        FILTERED=filtered,
        CHUNK=_TILE,
        BLOCK=BLOCK,
        FEW=_FEW,
        SPAN=span,
        num_warps=8,
        **overlap(pdl),
    )
    return out
