# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Where top-k and top-p end in a row of logits: found bit by bit, without sorting.

The order of floats is that of integers made from their bits, so 32 questions ("do k of them reach this?") find the k-th
largest exactly. Each question reads all candidates, which are mostly few enough to be copied together first.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """The same order in unsigned integers."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _gather(row_ptr, maxima_ptr, few_ptr, least, SIZE: tl.constexpr, BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
            BLOCK: tl.constexpr, FEW: tl.constexpr):  # fmt: skip
    """Copies the possible logits from `least` up together, and counts them. Past `FEW` they are only counted."""
    count = 0
    for first in range(0, BLOCKS, CHUNK):
        block = first + tl.arange(0, CHUNK)
        maxima = tl.load(maxima_ptr + block, block < BLOCKS, float("-inf"))
        if tl.max(maxima) >= least:
            at = first * BLOCK + tl.arange(0, CHUNK * BLOCK)
            x = tl.load(row_ptr + at, at < SIZE, float("-inf"))
            chosen = ((x >= least) & (x > float("-inf"))).to(tl.int32)
            place = count + tl.cumsum(chosen) - 1
            tl.store(few_ptr + place, x, (chosen > 0) & (place < FEW))
            count += tl.sum(chosen)
    tl.debug_barrier()  # other threads read them next
    return count


@triton.jit
def _above(source_ptr, count, least, best, temperature, TILE: tl.constexpr):
    """How many logits have a key from `least` up, and their mass."""
    number = 0
    mass = tl.zeros([], tl.float64)
    for first in range(0, count, TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(source_ptr + at, at < count, float("-inf"))
        chosen = (at < count) & (key_of(x) >= least)
        number += tl.sum(chosen.to(tl.int32))
        mass += tl.sum(tl.where(chosen, tl.exp((x - best) / temperature), 0.0)).to(tl.float64)
    return number, mass


@triton.jit
def _kth_key(keys, k):
    """The k-th largest of keys in registers."""
    found = tl.full([], 0, tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):
        tried = found | bit
        bit = bit >> 1
        if tl.sum((keys >= tried).to(tl.int32)) >= k:
            found = tried
    return found


@triton.jit
def _float(key):
    """The number whose key this is."""
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def least_key(row_ptr, maxima_ptr, few_ptr, maxima, best, temperature, total, top_k, top_p, SIZE: tl.constexpr,
               BLOCKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
               FLOOR: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """The key of the least logit that top-k, and top-p of what it leaves, keep."""
    by_k = (top_k > 0) & (top_k < SIZE)
    wanted = top_p * total
    # A bound that what is kept cannot lie below. k blocks reach the k-th best block maximum, so k tokens do.
    bound = best + temperature * tl.log(FLOOR * total).to(tl.float32)
    if by_k:
        bound = _float(_kth_key(key_of(maxima), top_k)) if top_k <= BLOCKS else float("-inf")
    count = _gather(row_ptr, maxima_ptr, few_ptr, bound, SIZE, BLOCKS, CHUNK, BLOCK, FEW)
    few = count <= FEW
    if few and not by_k:
        number, mass = _above(few_ptr, count, tl.full([], 0, tl.uint32), best, temperature, TILE)
        few = mass >= wanted
    source = row_ptr
    if few:
        source = few_ptr
    else:
        count = SIZE
    least = tl.full([], 0, tl.uint32)
    if by_k:
        bit = tl.full([], 0x80000000, tl.uint32)
        for _ in range(32):
            tried = least | bit
            bit = bit >> 1
            number, mass = _above(source, count, tried, best, temperature, TILE)
            if number >= top_k:
                least = tried
        number, mass = _above(source, count, least, best, temperature, TILE)
        wanted = top_p * mass
    if top_p < 1:
        edge = tl.full([], 0, tl.uint32)
        bit = tl.full([], 0x80000000, tl.uint32)
        for _ in range(32):
            tried = edge | bit
            bit = bit >> 1
            number, mass = _above(source, count, tried, best, temperature, TILE)
            if mass >= wanted:
                edge = tried
        least = tl.maximum(least, edge)
    return least
