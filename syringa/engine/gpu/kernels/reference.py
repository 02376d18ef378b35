"""Reference implementations of the kernels in plain PyTorch: for tests, and for machines without Triton.

Computes in `dtype` (float32; tests also use float64) and rounds once, to the dtype of the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from syringa.engine.gpu.cache import store_tokens
from syringa.engine.models.config import ClampedSwiglu

NO_TOKEN = -1
GREEDY_BELOW = 1e-5  # _GREEDY_BELOW in sampling/rows.py


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return _rms_normalize(x.to(dtype), weight, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Add `x` to `residual` in place and return the RMS norm of the unrounded sum."""
    total = x.to(dtype) + residual.to(dtype)
    residual.copy_(total)
    return _rms_normalize(total, weight, eps).to(x.dtype)


def silu_mul(gate_up: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    gate, up = gate_up.to(dtype).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def gelu_mul(gate_up: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    gate, up = gate_up.to(dtype).chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotary: tuple[torch.Tensor, torch.Tensor] | None,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    heads: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Normalize and rotate q and k of `[q | k | v]` rows in place; write k and v to their cache slots.

    `keys`, `values`: `[blocks, kv_heads, block, size]`. A row with a negative slot is padding: nothing is stored.
    """
    _, kv_heads, block, size = keys.shape
    rows = qkv[:, : (heads + 2 * kv_heads) * size].unflatten(1, (-1, size))  # gates may follow
    q, k, v = rows.to(dtype).split([heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = _rms_normalize(q, norms[0], eps), _rms_normalize(k, norms[1], eps)
    if rotary is not None:
        q, k = _rotate(q, positions, rotary), _rotate(k, positions, rotary)
    rows[:, : heads + kv_heads] = torch.cat([q, k], dim=1).to(qkv.dtype)
    real = slots >= 0
    at = slots[real].long()
    store_tokens(keys, at // block, at % block, k[real])
    store_tokens(values, at // block, at % block, v[real])


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    first: torch.Tensor,
    *,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the attention of all rows, `[tokens, heads, size]`.

    `q`: `[tokens, heads, size]`; sequence s has the rows `starts[s]` up to `starts[s + 1]`, at positions from
    `first[s]` on. The cache already holds their keys and values. Rows of no sequence yield zeros. `sinks`: a logit per
    head that joins the denominator of the softmax. `softcap`: a score s becomes softcap · tanh(s / softcap); 0: none.
    """
    _, kv_heads, _, size = keys.shape
    out = torch.zeros_like(q)
    scale = size**-0.5 if scale is None else scale
    for s in range(len(first)):
        begin, end, first_position = int(starts[s]), int(starts[s + 1]), int(first[s])
        if begin == end:
            continue
        known = first_position + end - begin
        k, v = (_gather_blocks(cache, tables[s], known).to(dtype) for cache in (keys, values))
        rows = q[begin:end].to(dtype).view(end - begin, kv_heads, -1, size).permute(1, 2, 0, 3)
        at = torch.arange(first_position, known, device=q.device)[:, None]
        key = torch.arange(known, device=q.device)[None, :]
        visible = (key <= at) & (key > at - window) if window else key <= at
        scores = rows @ k[:, None].transpose(-1, -2) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            sink = sinks.to(dtype).view(kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        result = scores.softmax(-1)[..., :known] @ v[:, None]
        out[begin:end] = result.permute(2, 0, 1, 3).reshape(end - begin, -1, size).to(q.dtype)
    return out


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return the attention of the last token of each sequence. `lengths` includes it; 0 is padding."""
    starts = F.pad((lengths > 0).cumsum(0), (1, 0))
    real = lengths > 0
    out = torch.zeros_like(q)
    out[real] = paged_attention(
        q[real],
        keys,
        values,
        tables[real],
        torch.arange(int(starts[-1]) + 1),
        lengths[real] - 1,
        window=window,
        scale=scale,
        sinks=sinks,
        softcap=softcap,
        dtype=dtype,
    )
    return out


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return `x @ weight.T + bias`.

    `norm_weight` applies RMS norm to the rows first; `gated` returns silu(first half) · second half; `residual` is
    added at the end.
    """
    rows = x.to(dtype)
    if norm_weight is not None:
        rows = _rms_normalize(rows, norm_weight, eps)
    y = rows @ weight.to(dtype).T
    if bias is not None:
        y = y + bias.to(dtype)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = y + residual.to(dtype)
    return y.to(out_dtype or x.dtype)


def uniforms(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`draw.uniforms` for int64 tensors that hold the bits of the unsigned words."""
    state = seeds.clone()
    for counters, increment in ((choices, 0x9E3779B97F4A7C15), (positions, 0xD1B54A32D192ED03)):
        state = _mix(_mix(state) + (counters.long() + 1) * _signed(increment))
    return _logical_shift_right(_mix(state), 11).double() * 2.0**-53


def sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    choices: torch.Tensor,
    positions: torch.Tensor,
    top_k: torch.Tensor | None = None,
    top_p: torch.Tensor | None = None,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sample a token per row, greedily for temperatures below `GREEDY_BELOW`, otherwise by inverse transform."""
    best, greedy = logits.max(-1)
    off = logits.new_zeros(len(logits))
    filters = (off if top_k is None else top_k, off + 1 if top_p is None else top_p, off if min_p is None else min_p)
    temperature_or_one = torch.where(temperatures < GREEDY_BELOW, 1.0, temperatures)
    weights = ((logits - best[:, None]) / temperature_or_one[:, None]).softmax(-1)
    kept = torch.where(weights >= _cutoffs(weights, *filters)[:, None], weights, 0.0)
    mass = kept.double().cumsum(-1)
    target = uniforms(seeds, choices, positions)[:, None] * mass[:, -1:]
    reached = (kept > 0) & (mass > target)
    last = (kept > 0).long().mul(torch.arange(logits.shape[-1], device=logits.device)).argmax(-1)
    drawn = torch.where(reached.any(-1), reached.byte().argmax(-1), last)
    tokens = torch.where(temperatures < GREEDY_BELOW, greedy, drawn)
    return torch.where(best.isfinite(), tokens, NO_TOKEN)


def _cutoffs(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Return the smallest weight that each row keeps; equal weights are kept too."""
    size = weights.shape[-1]
    ordered = weights.double().sort(dim=-1, descending=True).values
    by_k = (top_k > 0) & (top_k < size)
    kth = torch.where(by_k, ordered.gather(-1, torch.where(by_k, top_k - 1, 0).long()[:, None])[:, 0], 0.0)
    mass = torch.where(ordered >= kth[:, None], ordered, 0.0).cumsum(-1)
    num_below = (mass < top_p.double()[:, None] * mass[:, -1:]).sum(-1, keepdim=True).clamp(max=size - 1)
    by_p = torch.where(top_p < 1, ordered.gather(-1, num_below)[:, 0], 0.0)
    cutoff = torch.maximum(torch.maximum(kth, by_p), min_p.float() * ordered[:, 0])
    return torch.minimum(cutoff, ordered[:, 0]).float()


def _mix(x: torch.Tensor) -> torch.Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ _logical_shift_right(x, shift)) * _signed(factor)
    return x


def _logical_shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without sign extension."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _rms_normalize(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _rotate(x: torch.Tensor, positions: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = (table[positions.long()][:, None].to(x.dtype) for table in rotary)
    half = cosine.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], dim=-1)


def _gather_blocks(cache: torch.Tensor, table: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` tokens of a sequence as `[kv_heads, count, size]`."""
    blocks = table[: -(-count // cache.shape[2])].long()
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :count]


class SigmoidScores(NamedTuple):
    """Routing of GLM-4.5: experts are chosen by sigmoid(logit) + correction, and weighted by sigmoid(logit)."""

    correction: torch.Tensor  # [experts], fp32
    scale: float = 1.0  # of the weights


def route(
    logits: torch.Tensor, top_k: int, *, normalize: bool, sigmoid: SigmoidScores | None = None, shared: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and the ids of the experts of each row of router logits: the `top_k` best, best first.

    They are followed by `shared` experts, which come after the others and have the weight 1.
    """
    if sigmoid is None:
        weights, ids = logits.float().softmax(-1).topk(top_k, dim=-1)
    else:
        scores = logits.float().sigmoid()
        ids = (scores + sigmoid.correction).topk(top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if sigmoid is not None:
        weights = weights * sigmoid.scale
    always = torch.arange(logits.shape[1], logits.shape[1] + shared, device=ids.device)
    always = always.expand(len(logits), shared)
    return torch.cat([weights, torch.ones_like(always, dtype=weights.dtype)], -1), torch.cat([ids, always], -1)


def moe_mlp(
    x: torch.Tensor,
    router_logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    *,
    normalize: bool = True,
    sigmoid: SigmoidScores | None = None,
    shared: int = 0,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    swiglu: ClampedSwiglu | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts. The arguments are those of `kernels.moe.moe_mlp`."""
    weights, ids = route(router_logits, top_k, normalize=normalize, sigmoid=sigmoid, shared=shared)
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate_up_bias, down_bias = (None, None) if biases is None else (bias[expert] for bias in biases)
        gate, up = F.linear(x[token], gate_up[expert], gate_up_bias).chunk(2, -1)
        hidden = F.silu(gate) * up if swiglu is None else _clamped_swiglu(gate, up, swiglu)
        y = F.linear(hidden, down[expert], down_bias)
        out.index_add_(0, token, y * weights[token, choice, None].to(x.dtype))
    return out


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, swiglu: ClampedSwiglu) -> torch.Tensor:
    gate, up = gate.clamp(max=swiglu.limit), up.clamp(-swiglu.limit, swiglu.limit)
    return gate * torch.sigmoid(swiglu.alpha * gate) * (up + 1)
