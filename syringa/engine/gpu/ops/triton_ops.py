"""`GpuOps` on the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from syringa.engine.gpu.delta_net_rows import DeltaNet, DeltaNetRows
from syringa.engine.gpu.kernels import elementwise, rotary
from syringa.engine.gpu.kernels.decode_attention import DecodeConfig, NewTokens, decode_attention
from syringa.engine.gpu.kernels.delta_net import delta_net_decode, delta_net_prefill
from syringa.engine.gpu.kernels.embedding import embed
from syringa.engine.gpu.kernels.launch import has_large_shared_memory
from syringa.engine.gpu.kernels.moe import moe_mlp
from syringa.engine.gpu.kernels.prefill_attention import has_all_keys, prefill_attention, query_tiles
from syringa.engine.gpu.kernels.reference import SigmoidScores
from syringa.engine.gpu.kernels.sampling import sample
from syringa.engine.gpu.ops.base import QKNormRope
from syringa.engine.gpu.ops.linear import SKINNY_ROWS, linear
from syringa.engine.gpu.ops.quantized_linear import (
    multiplies_fp8_rows,
    quantize_for,
    quantized_linear,
    quantized_matmul,
)
from syringa.engine.gpu.packed_weight import Fp8Rows, PackedWeight
from syringa.engine.models.config import ClampedSwiglu

# Programmatic dependent launch hides launch latency; with more rows, waiting programs occupy the device instead.
OVERLAP_ROWS = 64


class TritonOps:
    """Triton kernels, with cuBLAS for matmuls of many rows."""

    max_fused_rows = SKINNY_ROWS
    reads_new_keys = True  # prefill attention, from the rows instead of the cache

    def __init__(self) -> None:
        # Programmatic dependent launch exists from Hopper on.
        overlaps = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
        self.overlap_rows = OVERLAP_ROWS if overlaps else 0
        self.pdl = False
        self.reads_new_keys = type(self).reads_new_keys and (has_large_shared_memory() or not torch.cuda.is_available())
        self._from_cache = True  # whether sequences of this step have keys of earlier ones

    def begin_step(self, rows: int, decode_only: bool) -> None:
        # Never for other steps: every kernel would have to be compiled twice.
        self.pdl = decode_only and rows <= self.overlap_rows

    def embed(
        self, table: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor
    ) -> torch.Tensor:
        return embed(table, tokens, sources, sampled, pdl=self.pdl)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps, pdl=self.pdl)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: torch.Tensor | PackedWeight | None = None,
    ) -> torch.Tensor | Fp8Rows:
        if isinstance(consumer, PackedWeight) and multiplies_fp8_rows(len(x), consumer):
            return quantize_for(x, consumer, norm_weight=weight, eps=eps, residual=residual)
        return elementwise.add_rms_norm(x, residual, weight, eps, pdl=self.pdl)

    def silu_mul(
        self, gate_up: torch.Tensor, consumer: torch.Tensor | PackedWeight | None = None
    ) -> torch.Tensor | Fp8Rows:
        if isinstance(consumer, PackedWeight) and multiplies_fp8_rows(len(gate_up), consumer):
            return quantize_for(gate_up, consumer, gated=True)
        return elementwise.silu_mul(gate_up, pdl=self.pdl)

    def gelu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return elementwise.gelu_mul(gate_up, pdl=self.pdl)

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
        options: Any = {"norm_weight": norm_weight, "eps": eps, "gated": gated, "residual": residual, "out": out}
        if isinstance(weight, PackedWeight):
            return quantized_linear(x, weight, bias, pdl=self.pdl, **options)
        return linear(x, weight, bias, pdl=self.pdl, **options)

    def matmul(
        self, x: torch.Tensor | Fp8Rows, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(weight, PackedWeight):
            return quantized_matmul(x, weight, bias)
        assert isinstance(x, torch.Tensor)
        return F.linear(x, weight, bias)

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
        return moe_mlp(
            x,
            router_logits,
            gate_up,
            down,
            top_k,
            normalize=normalize,
            sigmoid=sigmoid,
            shared=shared,
            biases=biases,
            swiglu=swiglu,
            residual=residual,
            pdl=self.pdl,
        )

    def compute_logits(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if len(x) <= self.max_fused_rows:
            return linear(x, weight, out=out, pdl=self.pdl)
        if x.dtype == torch.float32:
            return torch.mm(x, weight.t(), out=out)
        return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)

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
        rotary.rotate_and_store(qkv, positions, slots, *qk_norm_rope, keys, values, heads, pdl=self.pdl)

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
        new = None if store is None else NewTokens(store[0], *store[1])
        return decode_attention(
            qkv,
            keys,
            values,
            tables,
            lengths,
            heads,
            new=new,
            window=window,
            scale=scale,
            sinks=sinks,
            softcap=softcap,
            out=out,
            config=self.decode_config(len(lengths), keys.shape[1]),
            pdl=self.pdl,
        )

    def decode_config(self, rows: int, kv_heads: int) -> DecodeConfig | None:
        """Return the attention tiles, or None for the kernel's default. Benchmarks override this."""
        return None

    def plan_prefill(self, starts: Sequence[int], first: Sequence[int]) -> Any:
        self._from_cache = any(first)
        return query_tiles(starts, first).numpy()

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
        from_rows = new_keys and self.reads_new_keys and has_all_keys(qkv, keys)
        return prefill_attention(
            qkv,
            keys,
            values,
            tables,
            tiles,
            starts,
            first,
            heads,
            window=window,
            scale=scale,
            sinks=sinks,
            softcap=softcap,
            from_rows=from_rows,
            from_cache=self._from_cache or not from_rows,
            out=out,
            pdl=self.pdl,
        )

    def delta_net(
        self,
        projected: torch.Tensor,
        net: DeltaNet,
        rows: DeltaNetRows,
        conv_states: torch.Tensor,
        recurrent_states: torch.Tensor,
        gates: torch.Tensor | None = None,
    ) -> torch.Tensor:
        gates = projected[:, -2 * net.shape.value_heads :] if gates is None else gates
        out = projected.new_empty(len(projected), net.shape.value_width)
        states, decodes = rows.states, len(rows.lengths)
        caches = conv_states, recurrent_states
        if decodes:
            delta_net_decode(
                projected[:decodes],
                gates[:decodes],
                *net,
                states.slots[:decodes],
                rows.lengths,
                *caches,
                out[:decodes],
                pdl=self.pdl,
            )
        if states.prefill is not None:
            assert rows.starts is not None
            assert rows.first is not None
            slots = states.slots[decodes:]
            delta_net_prefill(
                projected[decodes:],
                gates[decodes:],
                *net,
                slots,
                rows.starts,
                rows.first,
                states.prefill,
                *caches,
                out[decodes:],
            )
        return out

    def sigmoid_mul(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return elementwise.sigmoid_mul(x, gates, pdl=self.pdl)

    def add_weighted(self, out: torch.Tensor, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return elementwise.add_weighted(out, y, x, weight, pdl=self.pdl)

    def sample(
        self, logits: torch.Tensor, params: Sequence[torch.Tensor], filters: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        top_k, top_p, min_p = filters or (None, None, None)
        temperatures, seeds, choices, positions = params
        sample(logits, temperatures, seeds, choices, positions, top_k, top_p, min_p, out, pdl=self.pdl)
