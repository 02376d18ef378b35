"""Operations between the linear layers, in PyTorch: the reference, and the fallback without compiled kernels.

`NativeOps` in `native_ops.py` implements the same interface on the compiled kernels. Activations are fp32 in both.
"""

from __future__ import annotations

from typing import Protocol

import torch

from syringa.engine.cpu.layers.cache import LayerCache, read_cache, write_cache
from syringa.engine.execution.batch import StepTensors
from syringa.engine.models.config import DecoderConfig
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE


class CpuOps(Protocol):
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def sigmoid_mul(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Multiply contiguous rows `x` by sigmoid(gates), in place. `gates`: as wide as `x`, or one per row."""
        ...

    def attention(self, layer: int, qkv: torch.Tensor, step: StepTensors, cache: LayerCache) -> torch.Tensor:
        """Normalize and rotate q and k of rows `[q | k | v]`, write the cache, and return the attention output.

        Rows may be longer. The result is `[tokens, heads · size]`.
        """
        ...


class TorchOps:
    """`CpuOps` in PyTorch."""

    def __init__(
        self,
        config: DecoderConfig,
        rotary: tuple[torch.Tensor, torch.Tensor],
        norms: list[tuple[torch.Tensor, torch.Tensor] | None],
    ) -> None:
        self.config = config
        self.cosine, self.sine = rotary
        self.norms = norms

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

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
            q, k = self._rotate(q, step.positions), self._rotate(k, step.positions)
        write_cache(cache, k, v, step.slot_mapping)
        return paged_attention(q, cache, step, window=c.windows[layer]).flatten(1)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cosine, sine = self.cosine[positions.long()][:, None], self.sine[positions.long()][:, None]
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
