"""Operations between the linear layers, in PyTorch: the reference, and the fallback without compiled kernels.

`NativeOps` in `native_ops.py` implements the same interface on the compiled kernels. Activations are fp32 in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from syringa.engine.cpu.layers.cache import LayerCache, read_cache, write_cache
from syringa.engine.cpu.layers.linear import Gate, LinearLayer, NativeLinear
from syringa.engine.execution.batch import StepTensors
from syringa.engine.models.config import DecoderConfig
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE


class CpuOps(Protocol):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def gate(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
        """Return what a gated layer computes of rows `[gate | up]`."""
        ...

    def sigmoid_mul(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous rows `x` by sigmoid(gates), in place. `gates`: as wide as `x`, or one per row."""
        ...

    def attention(self, layer: int, qkv: torch.Tensor, step: StepTensors, cache: LayerCache) -> torch.Tensor:
        """Normalize and rotate q and k of rows `[q | k | v]`, write the cache, and return the attention output.

        Rows may be longer. The result is `[tokens, heads · size]`.
        """
        ...


class AttentionTensors(NamedTuple):
    """What attention needs beside its projections, for each layer."""

    rotary: list[tuple[torch.Tensor, torch.Tensor]]  # tables of cosines and sines
    norms: list[tuple[torch.Tensor, torch.Tensor] | None]  # of queries and keys
    sinks: list[torch.Tensor | None]  # of each query head, a score without a value, fp32


class TorchOps:
    """`CpuOps` in PyTorch."""

    def __init__(self, config: DecoderConfig, tensors: AttentionTensors) -> None:
        self.config = config
        self.rotary, self.norms, self.sinks = tensors

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def gate(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
        g, u = gate_up.chunk(2, dim=-1)
        if gate.kind == "silu":
            return F.silu(g) * u
        if gate.kind == "gelu_tanh":
            return F.gelu(g, approximate="tanh") * u
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
        return g * torch.sigmoid(gate.alpha * g) * (u + 1)

    def sigmoid_mul(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return x.mul_(gates.sigmoid())

    def attention(self, layer: int, qkv: torch.Tensor, step: StepTensors, cache: LayerCache) -> torch.Tensor:
        c = self.config
        # Gates may follow in the same row.
        heads = c.heads + 2 * c.kv_heads
        rows = qkv[:, : heads * c.head_size].unflatten(1, (heads, c.head_size))
        q, k, v = rows.split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        if (norms := self.norms[layer]) is not None:
            q, k = self.rms_norm(q, norms[0], c.eps), self.rms_norm(k, norms[1], c.eps)
        if c.rotated[layer]:
            tables = self.rotary[layer]
            q, k = self._rotate(q, step.positions, tables), self._rotate(k, step.positions, tables)
        write_cache(cache, k, v, step.slot_mapping)
        attended = paged_attention(
            q, cache, step, window=c.windows[layer], scale=c.score_scale, softcap=c.softcap, sinks=self.sinks[layer]
        )
        return attended.flatten(1)

    def _rotate(
        self, x: torch.Tensor, positions: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        cosine, sine = (table[positions.long()][:, None] for table in tables)
        half = self.config.rotary // 2
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], dim=-1)


def paged_attention(
    q: torch.Tensor,
    cache: LayerCache,
    step: StepTensors,
    *,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of `q`, `[tokens, heads, size]`, fp32, one sequence after the other.

    `softcap` limits scores by tanh (Gemma 2); `sinks` holds one extra score per head without a value (gpt-oss).
    """
    out = torch.empty(q.shape[0], q.shape[1], cache.values.shape[3])
    for s in range(len(step.first_positions)):
        begin, end, first = int(step.row_starts[s]), int(step.row_starts[s + 1]), int(step.first_positions[s])
        known = first + end - begin
        k, v = read_cache(cache, step.block_tables[s, : -(-known // BLOCK_SIZE)].long(), known)
        at = torch.arange(first, known)[:, None]
        key = torch.arange(known)[None, :]
        visible = (key <= at) & (key > at - window) if window else key <= at
        out[begin:end] = attend_rows(q[begin:end], k, v, visible, scale=scale, softcap=softcap, sinks=sinks)
    return out


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor | None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention of one sequence's rows over `read_cache`'s keys and values.

    `visible`: mask `[rows, keys]`; None: all keys.
    """
    (count, heads, size), kv_heads = q.shape, k.shape[0]
    rows = q.view(count, kv_heads, heads // kv_heads, size).permute(1, 2, 0, 3)
    scores = rows @ k[:, None] * (size**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        sink = sinks.view(kv_heads, heads // kv_heads, 1, 1).expand(-1, -1, count, 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(count, heads, -1)


@dataclass
class GatedLinear:
    """A gate projection and an up projection, and what is computed of both."""

    linear: LinearLayer
    gate: Gate
    ops: CpuOps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if isinstance(self.linear, NativeLinear) and self.linear.gated:  # the product has done it
            return y
        return self.ops.gate(y, self.gate)
