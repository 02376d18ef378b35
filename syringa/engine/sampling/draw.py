"""Draw tokens from logits, for rows that take the same path: greedy, plain temperature, or filtered.

Every function gives a row the same bits whatever other rows it is called with. Three rules ensure that: rows are
reduced by kernels that work row by row (`softmax`, sums over a fixed block), elementwise operations are exactly rounded
(no `exp` over the whole batch, because its vector body and its scalar tail may differ), and which branch a row takes
depends on the row alone.

One exception, on GPUs only: the mass that top-p compares is summed in float64 in an order that may depend on the batch.
A difference of some 1e-15 would be needed to show.

A row without anything to draw from (all masked, or not finite) gets `NO_TOKEN`; other rows are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from syringa.engine.sampling.sampler_input import NO_TOKEN

# The two-level search reads the vocabulary once, as sums of blocks, and then a single block of each row.
_BLOCK = 128
# The search for the nucleus starts with the tokens above this probability: at most a thousand, and mostly enough.
_NUCLEUS_FLOOR = np.float32(1e-3)
_NEGATIVE = float("-inf")


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return a number in [0, 1) for each (seed, choice, position), from a counter-based generator without state."""
    word = (1 << 64) - 1
    state = np.array([seed & word for seed in seeds], dtype=np.uint64)
    for counters, increment in ((choices, 0x9E3779B97F4A7C15), (positions, 0xD1B54A32D192ED03)):
        step = (np.array(counters, dtype=np.uint64) + np.uint64(1)) * np.uint64(increment)
        state = _mix(_mix(state) + step)
    return (_mix(state) >> np.uint64(11)) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply the finalizer of splitmix64: every input bit affects every output bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x


def draw_greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the token with the highest logit of each row, the lowest id among equals."""
    blocks = _blocks(logits, _NEGATIVE)
    best, block = blocks.amax(-1).max(-1)
    token = block * _BLOCK + _take(blocks, block).argmax(-1)
    return torch.where(best.isfinite(), token, NO_TOKEN)


def draw_plain(logits: torch.Tensor, temperatures: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row from softmax(logits / temperature). `temperatures` is float32, `uniform` float64."""
    return _pick(_weights(logits, temperatures), uniform)


def draw_filtered(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Draw like `draw_plain` from what top-k, then top-p, then min-p leave. They are float64, and off at 0, 1 and 0."""
    weights = _weights(logits, temperatures)
    if weights.device.type == "cpu":
        cutoffs = torch.from_numpy(cutoffs_by_row(weights.numpy(), top_k.tolist(), top_p.tolist(), min_p.tolist()))
    else:
        cutoffs = cutoffs_by_sort(weights, top_k, top_p, min_p)
    # Equivalent to comparing and selecting, but several times faster on a CPU.
    kept = weights.sub(cutoffs[:, None]).ge_(0).mul_(weights)
    return _pick(kept, uniform)


def cutoffs_by_row(
    weights: np.ndarray, top_k: Sequence[float], top_p: Sequence[float], min_p: Sequence[float]
) -> np.ndarray:
    """Return the lowest probability that each row keeps, on a CPU. Ties are all kept, so their order is irrelevant."""
    cutoffs = np.zeros(len(weights), dtype=np.float32)
    for i, row in enumerate(weights):
        best = row.max()
        if not best > 0:  # not a distribution
            continue
        cutoff = np.float32(min_p[i]) * best
        candidates = None
        if 0 < top_k[i] < len(row):
            candidates = _top_k(row, int(top_k[i]))
            cutoff = max(cutoff, candidates[0])
        if top_p[i] < 1:
            cutoff = max(cutoff, _nucleus(row, candidates, top_p[i]))
        cutoffs[i] = min(cutoff, best)
    return cutoffs


def _top_k(row: np.ndarray, k: int) -> np.ndarray:
    """Return the k largest weights and those equal to the last of them, ascending."""
    count = len(row) // _BLOCK
    if k <= count:
        # k blocks reach the k-th best block maximum, so at least k tokens do: what is below needs no sorting.
        maxima = row[: count * _BLOCK].reshape(count, _BLOCK).max(axis=1)
        row = row[row >= np.partition(maxima, count - k)[count - k]]
    kth = np.partition(row, len(row) - k)[len(row) - k]
    return np.sort(row[row >= kth])


def _nucleus(row: np.ndarray, candidates: np.ndarray | None, top_p: float) -> np.float32:
    """Return the last weight of the smallest set, best first, whose mass reaches `top_p` of the candidates' mass."""
    if candidates is not None:
        before, wanted = 0.0, top_p * candidates.sum(dtype=np.float64)
    else:
        before, wanted = 0.0, top_p  # the whole row's mass is 1
        candidates = row[row >= _NUCLEUS_FLOOR]
        if candidates.sum(dtype=np.float64) < wanted:
            before, candidates = _nucleus_edge(row, wanted)
    ordered = np.sort(candidates)[::-1]
    mass = before + np.cumsum(ordered, dtype=np.float64)
    last: np.float32 = ordered[min(int(np.searchsorted(mass, wanted)), len(ordered) - 1)]
    return last


def _nucleus_edge(row: np.ndarray, wanted: float) -> tuple[float, np.ndarray]:
    """Return the mass of all better weights, and the weights among which the mass, best first, passes `wanted`.

    These weights are a quarter octave, by the leading bits of the floats, whose order is the order of the numbers.
    """
    bins = row.view(np.int32) >> 21
    mass = np.bincount(bins, weights=row)[::-1].cumsum()
    at = int(np.searchsorted(mass, wanted))
    if at == len(mass):  # rounding of the row's sum: everything is needed
        return 0.0, row[:1] * 0
    return float(mass[at - 1]) if at else 0.0, row[bins == len(mass) - 1 - at]


def cutoffs_by_sort(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Compute the same cutoffs without the host: sorting a batch is cheap on a GPU, waiting for the GPU is not."""
    size = weights.shape[-1]
    ordered = weights.sort(dim=-1, descending=True).values
    by_k = (top_k > 0) & (top_k < size)
    kth = ordered.gather(-1, torch.where(by_k, top_k - 1, size - 1).long()[:, None])
    mass = ordered.cumsum(-1, dtype=torch.float64)
    # A row of NaN equals nothing, not even itself: the clamp keeps its index valid, and it gets no token later.
    left = (ordered >= kth).sum(-1, keepdim=True).clamp(min=1)
    whole = torch.where(by_k[:, None], mass.gather(-1, left - 1), 1.0)
    last = torch.minimum((mass < top_p[:, None] * whole).sum(-1, keepdim=True), left - 1)
    by_p = torch.where(top_p[:, None] < 1, ordered.gather(-1, last), 0.0)
    best = ordered[:, :1]
    cutoff = torch.maximum(torch.where(by_k[:, None], kth, 0.0), by_p)
    cutoff = torch.maximum(cutoff, min_p[:, None].float() * best)
    return torch.minimum(cutoff, best)[:, 0]


def top_logits(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest values of each row and their ids, best first."""
    blocks = _blocks(logits, _NEGATIVE)
    if k >= blocks.shape[1] or k >= logits.shape[-1]:
        values, ids = logits.topk(min(k, logits.shape[-1]), dim=-1)
        return values, ids
    chosen = blocks.amax(-1).topk(k, dim=-1).indices.sort(dim=-1).values
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    values, places = inside.topk(k, dim=-1)
    ids = chosen.gather(-1, places // _BLOCK) * _BLOCK + places % _BLOCK
    # Padding can only be reached by a row that has fewer than k tokens of its own above -inf.
    return values, ids.clamp_(max=logits.shape[-1] - 1)


def _weights(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    # Subtracting first keeps the differences exact at low temperatures, where dividing first would round them away.
    best = logits.amax(-1, keepdim=True)
    return by_row(torch.softmax, logits.sub(best).div_(temperatures[:, None]))


def by_row(function: Callable[[torch.Tensor, int], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """Apply `softmax` or `log_softmax` to each row.

    On a GPU their sums start at the row's first 16-byte boundary, which is elsewhere in each row unless the row's
    length is a multiple of it: rows are padded to one.
    """
    length = rows.shape[-1]
    missing = -length % 4 if rows.is_cuda else 0
    return function(F.pad(rows, (0, missing), value=_NEGATIVE), -1)[:, :length] if missing else function(rows, -1)


def _pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return, by inverse CDF, the token in which `uniform` of the row's mass falls; never a token of weight 0."""
    blocks = _blocks(weights, 0.0)
    sums = blocks.sum(-1).double()
    # A GPU's parallel sums may rise by rounding where the weight is 0: only entries with weight may be hit.
    cdf = torch.where(sums > 0, sums.cumsum(-1), -1.0)
    total = cdf.amax(-1, keepdim=True)
    target = uniform[:, None] * total
    block = (cdf > target).byte().argmax(-1)
    before = (cdf - sums).gather(-1, block[:, None])

    inside = _take(blocks, block).double()
    cdf = torch.where(inside > 0, inside.cumsum(-1), -1.0)
    # A block's float32 sum may exceed the float64 sum by rounding: what falls beyond belongs to its last token.
    last = torch.nextafter(cdf.amax(-1, keepdim=True), torch.zeros_like(total))
    place = (cdf > torch.minimum(target - before, last)).byte().argmax(-1)
    return torch.where(total[:, 0] > 0, block * _BLOCK + place, NO_TOKEN)


def _blocks(rows: torch.Tensor, fill: float) -> torch.Tensor:
    rest = -rows.shape[-1] % _BLOCK
    if rest:
        rows = F.pad(rows, (0, rest), value=fill)
    return rows.view(len(rows), rows.shape[-1] // _BLOCK, _BLOCK)


def _take(blocks: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    return blocks.gather(1, block[:, None, None].expand(-1, 1, _BLOCK))[:, 0]
