"""The operations of a decoder: by the kernels where there is a GPU, by their references elsewhere.

Both have the same contract, so everything above can be tested without a GPU. Rows are `[rows, width]`; caches are
`[blocks, kv_heads, block, size]`; `out` and `pdl` are for the kernels' sake, and a reference without a GPU copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from syringa.engine.gpu.kernels import reference
from syringa.errors import ConfigError

logger = logging.getLogger("syringa.worker")


class Turning(NamedTuple):
    """How a layer's queries and keys are made ready for attention."""

    rotary: tuple[torch.Tensor, torch.Tensor] | None
    norms: tuple[torch.Tensor, torch.Tensor] | None
    eps: float


class Ops(Protocol):
    narrow_rows: int  # up to so many, `linear` is at its best with all that it fuses

    def begin(self, rows: int, alike: bool) -> None:
        """A step of so many rows follows; `alike`: each adds one token to its sequence."""
        ...

    def embed(
        self, table: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor
    ) -> torch.Tensor:
        """The rows of `tokens`; where a source is not negative, of the token that was `drawn` there."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gain: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Of any number of rows, and nothing beside."""
        ...

    def head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Logits, fp32."""
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        turning: Turning,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: int,
    ) -> None: ...

    def decode_attention(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        heads: int,
        window: int,
        store: tuple[torch.Tensor, Turning] | None,
        out: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        """With `store` (slots, and how to turn) q, k and v are as the product gave them; else they were stored."""
        ...

    def tiles(self, starts: Sequence[int], first: Sequence[int]) -> Any:
        """What `prefill_attention` wants to know of the rows' layout, as an int32 array on the host. Asked for once,
        shortly before each step that has such rows."""
        ...

    def prefill_attention(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        tiles: torch.Tensor,
        starts: torch.Tensor,
        first: torch.Tensor,
        heads: int,
        window: int,
        out: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor: ...

    def sample(
        self, logits: torch.Tensor, fields: Sequence[torch.Tensor], rules: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """`fields`: temperatures, seeds, choices, positions; `rules`: top-k, top-p, min-p, or none."""
        ...


class ReferenceOps:
    """Plain PyTorch on any device."""

    narrow_rows = 4  # small, so that tests take both ways

    def begin(self, rows: int, alike: bool) -> None:
        pass

    def embed(
        self, table: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor
    ) -> torch.Tensor:
        # What could not be drawn (a negative token) is computed as any other, and thrown away.
        known = torch.where(sources >= 0, drawn[sources.clamp(min=0).long()], tokens.long())
        return F.embedding(known.clamp(min=0), table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return reference.silu_mul(gate_up)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        gain: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y = reference.linear(x, weight, bias, gain=gain, eps=eps, gated=gated, residual=residual)
        return y if out is None else out.copy_(y)

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(reference.linear(x, weight, out_dtype=torch.float32))

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        turning: Turning,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: int,
    ) -> None:
        reference.rotate_and_store(qkv, positions, slots, *turning, keys, values, heads)

    def decode_attention(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        heads: int,
        window: int,
        store: tuple[torch.Tensor, Turning] | None,
        out: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        if store is not None:
            slots, turning = store
            reference.rotate_and_store(qkv, (lengths - 1).clamp(min=0), slots, *turning, keys, values, heads)
        q = _queries(qkv, heads, keys.shape[3])
        y = reference.decode_attention(q, keys, values, tables, lengths, window=window, scale=scale).flatten(1)
        return y if out is None else out.copy_(y)

    def tiles(self, starts: Sequence[int], first: Sequence[int]) -> Any:
        import numpy as np

        return np.zeros((0, 2), dtype=np.int32)

    def prefill_attention(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        tiles: torch.Tensor,
        starts: torch.Tensor,
        first: torch.Tensor,
        heads: int,
        window: int,
        out: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        q = _queries(qkv, heads, keys.shape[3])
        y = reference.paged_attention(q, keys, values, tables, starts, first, window=window, scale=scale)
        return out.copy_(y.flatten(1))

    def sample(
        self, logits: torch.Tensor, fields: Sequence[torch.Tensor], rules: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        out.copy_(reference.sample(logits, *fields, *rules))


def _queries(qkv: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    return qkv[:, : heads * size].view(len(qkv), heads, size)


def choose_ops(device: torch.device, attention: str = "auto", *, deterministic: bool = False) -> Ops:
    """The kernels on a GPU, the references elsewhere.

    `attention`: whose kernel prompts get. `deterministic`: a row's bits never depend on the rows beside it. Raises
    `ConfigError` where "flashinfer" is wanted and cannot be had.
    """
    if device.type != "cuda":
        return ReferenceOps()
    from syringa.engine.gpu.ops.triton_ops import TritonOps

    if deterministic:
        from syringa.engine.gpu.ops.batch_invariant_ops import SteadyOps

        return SteadyOps()
    if attention == "triton":
        return TritonOps()
    from syringa.engine.gpu.ops import flashinfer_ops

    wanted = attention == "flashinfer"
    reason = flashinfer_ops.missing(torch.cuda.get_device_capability(device))
    if reason is None:
        try:
            return flashinfer_ops.FlashInferOps(required=wanted)
        except Exception as error:  # an installation that is broken in whatever way
            reason = f"FlashInfer is installed and cannot be imported ({str(error).strip().split(chr(10), 1)[0]})"
            logger.log(logging.DEBUG if wanted else logging.WARNING, "%s: ours is used", reason)
    if wanted:
        raise ConfigError(f"--attention flashinfer: {reason}")
    return TritonOps()
