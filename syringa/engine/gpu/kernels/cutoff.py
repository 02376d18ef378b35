# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Where top-k and top-p end in a row of logits: found by halving, without sorting.

The order of floats is that of integers made from their bits, so some 25 questions ("do k of them reach this?") find the
k-th largest exactly. Each question reads all candidates. Nothing below a bound can be kept, so what reaches it is first
copied together; that is mostly little, and the blocks' best logits say where it lies.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """The same order in unsigned integers. The two zeros are one."""
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _float_of(key):
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Above `low`, up to `high`."""
    span = high - low
    return low + (span >> 1) + (span & 1)


@triton.jit
def list_blocks(maxima, index, bound, list_ptr):
    """Writes down which blocks reach the bound, and counts them. Numbers so small are exact in fp32."""
    reach = ((maxima >= bound) & (maxima > float("-inf"))).to(tl.int32)
    tl.store(list_ptr + tl.cumsum(reach) - 1, index.to(tl.float32), reach > 0)
    tl.debug_barrier()  # other threads read them next
    return tl.sum(reach)


@triton.jit
def _gather(row_ptr, list_ptr, number, few_ptr, bound, SIZE: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
            TILE: tl.constexpr):  # fmt: skip
    """Copies the logits that reach the bound together, and counts them. Past `FEW` they are only counted."""
    count = 0
    for first in range(0, number * BLOCK, TILE):
        each = first + tl.arange(0, TILE)
        block = tl.load(list_ptr + each // BLOCK, each < number * BLOCK, 0.0).to(tl.int32)
        at = block * BLOCK + each % BLOCK
        x = tl.load(row_ptr + at, (each < number * BLOCK) & (at < SIZE), float("-inf"))
        chosen = ((x >= bound) & (x > float("-inf"))).to(tl.int32)
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
def _kth(maxima, best, k):
    """The k-th largest block maximum, or the least number there is."""
    keys = key_of(maxima)
    low = key_of(tl.full([], float("-inf"), tl.float32))
    high = key_of(best)
    while low < high:
        middle = _middle(low, high)
        if tl.sum((keys >= middle).to(tl.int32)) >= k:
            low = middle
        else:
            high = middle - 1
    return _float_of(low)


@triton.jit
def least_key(row_ptr, list_ptr, few_ptr, maxima, index, best, temperature, total, top_k, top_p,
              SIZE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
              TILE: tl.constexpr):  # fmt: skip
    """The key of the least logit that top-k, and top-p of what it leaves, keep; and how many blocks are listed."""
    by_k = (top_k > 0) & (top_k < SIZE)
    # All the logits below this could not make up what top-p leaves out.
    bound = best + temperature * (tl.log((1 - top_p) * total / SIZE).to(tl.float32) - 0.01)
    if by_k:
        # k blocks reach the k-th best block maximum, so k tokens do.
        bound = _kth(maxima, best, top_k) if top_k <= BLOCKS else tl.full([], float("-inf"), tl.float32)
    number = list_blocks(maxima, index, bound, list_ptr)
    count = _gather(row_ptr, list_ptr, number, few_ptr, bound, SIZE, BLOCK, FEW, TILE)
    source = few_ptr
    if count > FEW:
        source = row_ptr
        count = SIZE
    low = key_of(bound)
    wanted = top_p * total
    if by_k:
        high = key_of(best)
        while low < high:
            middle = _middle(low, high)
            reached, mass = _above(source, count, middle, best, temperature, TILE)
            if reached >= top_k:
                low = middle
            else:
                high = middle - 1
        reached, mass = _above(source, count, low, best, temperature, TILE)
        wanted = top_p * mass
    if top_p < 1:
        high = key_of(best)
        while low < high:
            middle = _middle(low, high)
            reached, mass = _above(source, count, middle, best, temperature, TILE)
            if mass >= wanted:
                low = middle
            else:
                high = middle - 1
    return low, number
