"""The operations of a decoder: the interface, a PyTorch reference, and the choice of an implementation.

The kernels and the reference have the same contract, so that everything above can be tested without a GPU. Activations
are `[rows, width]`, caches `[blocks, kv_heads, block, head size]`. `out` lets a kernel write in place; the reference
copies.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from syringa.engine.gpu.delta_net_rows import DeltaNet, DeltaNetRows, reference_delta_net
from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.kernels.reference import SigmoidScores
from syringa.engine.gpu.packed_weight import Fp8Rows, PackedWeight, unpack_weight
from syringa.engine.models.config import ClampedSwiglu
from syringa.errors import ConfigError

logger = logging.getLogger("syringa.worker")


class QKNormRope(NamedTuple):
    """How a layer normalizes and rotates queries and keys before attention."""

    rotary: tuple[torch.Tensor, torch.Tensor] | None  # cosine and sine tables
    norms: tuple[torch.Tensor, torch.Tensor] | None  # norm weights of q and k
    eps: float


class GpuOps(Protocol):
    """Operations of one step. `begin_step` is called before the first one."""

    max_fused_rows: int  # up to this many rows, `linear` with fused norm, gate and residual is fastest

    def begin_step(self, rows: int, decode_only: bool) -> None:
        """Announce a step. `decode_only`: every row is a sequence that adds one token."""
        ...

    def embed(
        self, table: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        """Return the embeddings of `tokens`, or of `sampled[source]` for rows whose source is not negative."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: torch.Tensor | PackedWeight | None = None,
    ) -> torch.Tensor | Fp8Rows:
        """Add `x` to `residual` in place and return the RMS norm of the sum.

        `consumer`: the weights of the only `matmul` that takes the result, which may then be quantized for it.
        """
        ...

    def silu_mul(
        self, gate_up: torch.Tensor, consumer: torch.Tensor | PackedWeight | None = None
    ) -> torch.Tensor | Fp8Rows:
        """Return silu(first half) · second half. `consumer` as in `add_rms_norm`."""
        ...

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return gelu(first half) · second half, with gelu's approximation by tanh."""
        ...

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | PackedWeight,
        bias: torch.Tensor | None,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def matmul(
        self, x: torch.Tensor | Fp8Rows, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """A linear layer for any number of rows, without fusion."""
        ...

    def moe_mlp(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor | PackedWeight,
        down: torch.Tensor | PackedWeight,
        top_k: int,
        *,
        normalize: bool,
        sigmoid: SigmoidScores | None = None,
        shared: int = 0,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        swiglu: ClampedSwiglu | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts, plus `residual`.

        `biases`: of `gate_up` and `down`. `swiglu`: the gate; None: silu(gate) · up. The last `shared` experts are
        those that every row uses, with the weight 1.
        """
        ...

    def compute_logits(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the fp32 logits to `out` and return it."""
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        qk_norm_rope: QKNormRope,
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
        store: tuple[torch.Tensor, QKNormRope] | None,
        out: torch.Tensor | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attention of one token per sequence.

        With `store` (slots and normalization), `qkv` is the raw projection, and its keys and values are stored first.
        Without, they are in the cache already and the queries are ready. `sinks`: a logit per query head that joins the
        denominator of the softmax. `softcap`: a score s becomes softcap · tanh(s / softcap); 0: none.
        """
        ...

    def plan_prefill(self, starts: Sequence[int], first: Sequence[int]) -> Any:
        """Plan the prefill attention of the next step and return its tiles, an int32 array on the host.

        Called once before each step that has prefill rows. `starts`: first row of each sequence and the end of the
        last; `first`: position of each sequence's first row.
        """
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
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        new_keys: bool = False,
    ) -> torch.Tensor:
        """Attention of several tokens per sequence, whose keys and values are in the cache already.

        `new_keys`: `qkv` is `[q | k | v]` after `rotate_and_store`, so keys of this step may be read from there.
        """
        ...

    def delta_net(
        self,
        projected: torch.Tensor,
        net: DeltaNet,
        rows: DeltaNetRows,
        conv_states: torch.Tensor,
        recurrent_states: torch.Tensor,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output of a delta net for rows `[q | k | v | z | b | a]`, and update its states.

        `gates`: rows `[b | a]`, if `projected` ends with z.
        """
        ...

    def sigmoid_mul(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        """Multiply `x` by sigmoid(gates), in place."""
        ...

    def add_weighted(self, out: torch.Tensor, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Add the rows of `y`, each times sigmoid(x · weight), to `out` in place. `weight`: `[1, inputs]`."""
        ...

    def sample(
        self, logits: torch.Tensor, params: Sequence[torch.Tensor], filters: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        """Write a sampled token per row to `out`.

        `params`: temperatures, seeds, choices, positions; `filters`: top-k, top-p and min-p, or empty.
        """
        ...


class ReferenceOps:
    """Plain PyTorch on any device."""

    max_fused_rows = 4  # small, so that tests cover the fused and the unfused path

    def begin_step(self, rows: int, decode_only: bool) -> None:
        pass

    def embed(
        self, table: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        # A row without a sampled token (negative) is computed like any other and discarded later.
        known = torch.where(sources >= 0, sampled[sources.clamp(min=0).long()], tokens.long())
        return F.embedding(known.clamp(min=0), table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return reference.rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: torch.Tensor | PackedWeight | None = None,
    ) -> torch.Tensor:
        return reference.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor, consumer: torch.Tensor | PackedWeight | None = None) -> torch.Tensor:
        return reference.silu_mul(gate_up)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return reference.gelu_mul(gate_up)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | PackedWeight,
        bias: torch.Tensor | None,
        *,
        norm_weight: torch.Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        matrix = _dense(weight, torch.float32)
        y = reference.linear(x, matrix, bias, norm_weight=norm_weight, eps=eps, gated=gated, residual=residual)
        return y if out is None else out.copy_(y)

    def matmul(
        self, x: torch.Tensor | Fp8Rows, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return F.linear(x, _dense(weight, x.dtype), bias)

    def moe_mlp(
        self,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        gate_up: torch.Tensor | PackedWeight,
        down: torch.Tensor | PackedWeight,
        top_k: int,
        *,
        normalize: bool,
        sigmoid: SigmoidScores | None = None,
        shared: int = 0,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        swiglu: ClampedSwiglu | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        matrices = _dense(gate_up, x.dtype), _dense(down, x.dtype)
        y = reference.moe_mlp(
            x,
            router_logits,
            *matrices,
            top_k,
            normalize=normalize,
            sigmoid=sigmoid,
            shared=shared,
            biases=biases,
            swiglu=swiglu,
        )
        return y if residual is None else y + residual

    def compute_logits(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(reference.linear(x, weight, out_dtype=torch.float32))

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        qk_norm_rope: QKNormRope,
        keys: torch.Tensor,
        values: torch.Tensor,
        heads: int,
    ) -> None:
        reference.rotate_and_store(qkv, positions, slots, *qk_norm_rope, keys, values, heads)

    def decode_attention(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        heads: int,
        window: int,
        store: tuple[torch.Tensor, QKNormRope] | None,
        out: torch.Tensor | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        if store is not None:
            slots, qk_norm_rope = store
            reference.rotate_and_store(qkv, (lengths - 1).clamp(min=0), slots, *qk_norm_rope, keys, values, heads)
        q = _queries(qkv, heads, keys.shape[3])
        y = reference.decode_attention(
            q, keys, values, tables, lengths, window=window, scale=scale, sinks=sinks, softcap=softcap
        )
        return y.flatten(1) if out is None else out.copy_(y.flatten(1))

    def plan_prefill(self, starts: Sequence[int], first: Sequence[int]) -> Any:
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
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        new_keys: bool = False,
    ) -> torch.Tensor:
        q = _queries(qkv, heads, keys.shape[3])
        y = reference.paged_attention(
            q, keys, values, tables, starts, first, window=window, scale=scale, sinks=sinks, softcap=softcap
        )
        return out.copy_(y.flatten(1))

    def delta_net(
        self,
        projected: torch.Tensor,
        net: DeltaNet,
        rows: DeltaNetRows,
        conv_states: torch.Tensor,
        recurrent_states: torch.Tensor,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if gates is not None:
            projected = torch.cat([projected, gates], 1)
        return reference_delta_net(projected, net, rows, conv_states, recurrent_states)

    def sigmoid_mul(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return x.copy_(x.float() * gates.float().sigmoid())

    def add_weighted(self, out: torch.Tensor, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        share = (x.float() @ weight.float().T).sigmoid()
        return out.copy_(out.float() + y.float() * share)

    def sample(
        self, logits: torch.Tensor, params: Sequence[torch.Tensor], filters: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        out.copy_(reference.sample(logits, *params, *filters))


def _dense(weight: torch.Tensor | PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return weights with their columns in the order of the inputs; quantized ones in `dtype`."""
    if not isinstance(weight, PackedWeight):
        return weight
    matrix = unpack_weight(weight).to(dtype)
    if weight.order is None:
        return matrix
    restored = torch.empty_like(matrix)
    restored[..., weight.order] = matrix
    return restored


def _queries(qkv: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    return qkv[:, : heads * size].view(len(qkv), heads, size)


def choose_ops(device: torch.device, attention: str = "auto", *, deterministic: bool = False) -> GpuOps:
    """Return the kernels on a GPU, the reference elsewhere.

    `attention`: auto, triton or flashinfer, for prefill. `deterministic`: use batch-invariant kernels only. Raises
    `ConfigError` if "flashinfer" is required and not usable.
    """
    if device.type != "cuda":
        return ReferenceOps()
    from syringa.engine.gpu.ops.triton_ops import TritonOps

    if deterministic:
        from syringa.engine.gpu.ops.batch_invariant_ops import BatchInvariantOps

        return BatchInvariantOps()
    if attention == "triton":
        return TritonOps()
    from syringa.engine.gpu.ops import flashinfer_ops

    required = attention == "flashinfer"
    reason = flashinfer_ops.missing_flashinfer(torch.cuda.get_device_capability(device))
    if reason is None:
        try:
            return flashinfer_ops.FlashInferOps(required=required)
        except Exception as error:  # a broken installation can fail in any way
            reason = f"FlashInfer is installed and cannot be imported ({str(error).strip().split(chr(10), 1)[0]})"
            logger.log(logging.DEBUG if required else logging.WARNING, "%s; using the Triton attention kernel", reason)
    if required:
        raise ConfigError(f"--attention flashinfer: {reason}")
    return TritonOps()
