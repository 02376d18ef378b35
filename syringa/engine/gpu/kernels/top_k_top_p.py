# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Top-k and top-p thresholds of a row of logits, found by bisection instead of sorting.

Floats are mapped to unsigned integers of the same order, so that about 25 passes ("how many logits reach this key?")
find the k-th largest exactly. Every pass reads all candidates, so those that can be kept are gathered first: usually
few, found through the maxima of the blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sortable_key(x):
    """Return unsigned integers in the order of the floats. Both zeros map to the same key."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _from_sortable_key(key):
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _midpoint(low, high):
    """Return a key above `low`, up to `high`."""
    span = high - low
    return low + (span >> 1) + (span & 1)


@triton.jit
def list_candidate_blocks(maxima, index, bound, block_list_ptr):
    """List the blocks that reach the bound and return their number. Indices are stored as fp32, exactly."""
    reaches = ((maxima >= bound) & (maxima > float("-inf"))).to(tl.int32)
    tl.store(block_list_ptr + tl.cumsum(reaches) - 1, index.to(tl.float32), reaches > 0)
    tl.debug_barrier()  # other threads read them next
    return tl.sum(reaches)


@triton.jit
def _gather_candidates(row_ptr, block_list_ptr, num_blocks, candidates_ptr, bound, VOCAB_SIZE: tl.constexpr,
                       BLOCK: tl.constexpr, MAX_CANDIDATES: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Gather the logits that reach the bound and return their number. Beyond MAX_CANDIDATES they are only counted."""
    count = 0
    for first in range(0, num_blocks * BLOCK, TILE):
        each = first + tl.arange(0, TILE)
        block = tl.load(block_list_ptr + each // BLOCK, each < num_blocks * BLOCK, 0.0).to(tl.int32)
        at = block * BLOCK + each % BLOCK
        x = tl.load(row_ptr + at, (each < num_blocks * BLOCK) & (at < VOCAB_SIZE), float("-inf"))
        selected = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
        position = count + tl.cumsum(selected) - 1
        tl.store(candidates_ptr + position, x, (selected > 0) & (position < MAX_CANDIDATES))
        count += tl.sum(selected)
    tl.debug_barrier()  # other threads read them next
    return count


@triton.jit
def _count_and_mass_above(source_ptr, count, threshold, max_logit, temperature, TILE: tl.constexpr):
    """Return the number and probability mass of the logits whose key is at least `threshold`."""
    num_blocks = 0
    mass = tl.zeros([], tl.float64)
    for first in range(0, count, TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(source_ptr + at, at < count, float("-inf"))
        selected = (at < count) & (sortable_key(x) >= threshold)
        num_blocks += tl.sum(selected.to(tl.int32))
        mass += tl.sum(tl.where(selected, tl.exp((x - max_logit) / temperature), 0.0)).to(tl.float64)
    return num_blocks, mass


@triton.jit
def _kth_largest(maxima, max_logit, k):
    """Return the k-th largest block maximum, or -inf."""
    keys = sortable_key(maxima)
    low = sortable_key(tl.full([], float("-inf"), tl.float32))
    high = sortable_key(max_logit)
    while low < high:
        midpoint = _midpoint(low, high)
        if tl.sum((keys >= midpoint).to(tl.int32)) >= k:
            low = midpoint
        else:
            high = midpoint - 1
    return _from_sortable_key(low)


@triton.jit
def find_threshold_key(row_ptr, block_list_ptr, candidates_ptr, maxima, index, max_logit, temperature, total, top_k,
                       top_p, VOCAB_SIZE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
                       MAX_CANDIDATES: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """Return the key of the smallest logit that top-k, then top-p, keep, and the number of listed blocks."""
    by_k = (top_k > 0) & (top_k < VOCAB_SIZE)
    # All logits below this bound together have less mass than top-p cuts off.
    bound = max_logit + temperature * (tl.log((1 - top_p) * total / VOCAB_SIZE).to(tl.float32) - 0.01)
    if by_k:
        # At least k blocks, and so k tokens, reach the k-th largest block maximum.
        bound = _kth_largest(maxima, max_logit, top_k) if top_k <= BLOCKS else tl.full([], float("-inf"), tl.float32)
    num_blocks = list_candidate_blocks(maxima, index, bound, block_list_ptr)
    count = _gather_candidates(
        row_ptr, block_list_ptr, num_blocks, candidates_ptr, bound, VOCAB_SIZE, BLOCK, MAX_CANDIDATES, TILE
    )
    source = candidates_ptr
    if count > MAX_CANDIDATES:
        source = row_ptr
        count = VOCAB_SIZE
    low = sortable_key(bound)
    target_mass = top_p * total
    if by_k:
        high = sortable_key(max_logit)
        while low < high:
            midpoint = _midpoint(low, high)
            reached, mass = _count_and_mass_above(source, count, midpoint, max_logit, temperature, TILE)
            if reached >= top_k:
                low = midpoint
            else:
                high = midpoint - 1
        reached, mass = _count_and_mass_above(source, count, low, max_logit, temperature, TILE)
        target_mass = top_p * mass
    if top_p < 1:
        high = sortable_key(max_logit)
        while low < high:
            midpoint = _midpoint(low, high)
            reached, mass = _count_and_mass_above(source, count, midpoint, max_logit, temperature, TILE)
            if mass >= target_mass:
                low = midpoint
            else:
                high = midpoint - 1
    return low, num_blocks
