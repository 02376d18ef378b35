"""The native decoder on a GPU, for all families of `models.decoder` and for mixture-of-experts models.

A step has decode rows, one per sequence that adds one token, followed by prefill rows. Small decode-only steps take the
fused path, in which the matmul kernels also compute norms, the MLP gate and residuals. All other steps take the unfused
path: between two matmuls there is one elementwise kernel, which also quantizes the rows if the next one takes FP8.
Matmuls are those of libraries, but for quantized weights where ours are faster.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from syringa.engine.gpu.cache import GpuCache
from syringa.engine.gpu.delta_net_rows import DeltaNet, DeltaNetRows
from syringa.engine.gpu.kernels.reference import SigmoidScores
from syringa.engine.gpu.ops.base import GpuOps, QKNormRope
from syringa.engine.gpu.packed_weight import Fp8Rows, PackedWeight
from syringa.engine.gpu.state_rows import StateRows
from syringa.engine.models.config import ClampedSwiglu, DecoderConfig

if TYPE_CHECKING:
    from syringa.engine.vision.step_images import StepImages


@dataclass
class GpuLinear:
    """Weights of a linear layer in the model's precision, or quantized."""

    weight: torch.Tensor | PackedWeight  # [outputs, inputs]
    bias: torch.Tensor | None = None


@dataclass
class GpuExperts:
    """The router and the experts of a mixture-of-experts layer."""

    router: GpuLinear  # [experts, hidden]
    gate_up: torch.Tensor | PackedWeight  # [experts, 2 × intermediate, hidden], gates first
    down: torch.Tensor | PackedWeight  # [experts, hidden, intermediate]
    per_token: int
    normalize: bool
    biases: tuple[torch.Tensor, torch.Tensor] | None = None  # of `gate_up` and `down`, [experts, outputs]
    swiglu: ClampedSwiglu | None = None
    sigmoid: SigmoidScores | None = None  # how experts are scored; None: by a softmax
    shared: int = 0  # the last experts, which the router does not know and every token uses
    shared_mlp: GpuMlp | None = None  # an expert that every token uses, and that is not like the others
    shared_gate: torch.Tensor | None = None  # [1, hidden]: the sigmoid of this logit weights it; None: 1 does


@dataclass
class GpuMlp:
    gate_up: GpuLinear
    down: GpuLinear


@dataclass
class GpuLayer:
    """A layer with attention, or with a gated delta net whose input projection is `qkv`, or `qkv` and `gates`."""

    input_norm: torch.Tensor
    qkv: GpuLinear
    out: GpuLinear
    post_norm: torch.Tensor
    mlp: GpuMlp | GpuExperts
    qk_norm_rope: QKNormRope
    window: int
    out_norm: torch.Tensor | None = None  # of the output of `out`, before it is added to the residuals
    mlp_norm: torch.Tensor | None = None  # of the MLP's output, likewise
    sinks: torch.Tensor | None = None  # [heads], fp32
    delta_net: DeltaNet | None = None
    gates: GpuLinear | None = None  # of a delta net: the rows b and a of the input projection, if not in `qkv`

    @property
    def sole_projection(self) -> torch.Tensor | PackedWeight | None:
        """The weights that multiply the layer's normalized inputs, if nothing else takes these."""
        return self.qkv.weight if self.gates is None else None


@dataclass
class PrefillInput:
    """Rows of sequences that compute several tokens in this step. All tensors are int32."""

    positions: torch.Tensor  # of all rows of the step, decode rows included
    block_tables: torch.Tensor
    tiles: torch.Tensor  # what `GpuOps.plan_prefill` returned
    row_starts: torch.Tensor  # first row of each sequence, counted from the first prefill row, and the end of the last
    first_positions: torch.Tensor  # position of each sequence's first row


@dataclass
class ModelInput:
    """The inputs of a step on the device: decode rows (one token per sequence) first, then prefill rows.

    Integer tensors are int32 unless noted.
    """

    tokens: torch.Tensor
    token_sources: torch.Tensor  # index of the token among the previous step's sampled tokens; negative: use `tokens`
    slot_mapping: torch.Tensor  # block · BLOCK_SIZE + offset; negative: padding
    block_tables: torch.Tensor  # of the decode rows
    lengths: torch.Tensor  # of the decode rows: tokens of the sequence including the new one; 0: padding
    prefill: PrefillInput | None = None
    logit_rows: torch.Tensor | None = None  # int64: rows whose logits are needed; None: all
    images: StepImages | None = None
    position_deltas: torch.Tensor | None = None  # of decode rows: rotary position minus token index
    states: StateRows | None = None  # of a hybrid model


class GpuDecoderInterface(Protocol):
    """What the model runner needs of a decoder. Its `ops` also sample the tokens."""

    ops: GpuOps
    supports_cuda_graphs: bool  # whether a decode-only step can be captured
    supports_fp8: bool  # whether --dtype fp8 would make it smaller
    concurrent_bytes: int  # device memory that may be in use beside a step (the vision tower's)

    @property
    def device(self) -> torch.device: ...

    @property
    def vocabulary(self) -> int: ...

    def forward(
        self, rows: ModelInput, sampled: torch.Tensor, cache: GpuCache, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the fp32 logits of `logit_rows`. `sampled`: the tokens that the previous step sampled."""
        ...


class GpuDecoder:
    """The native decoder on a GPU."""

    supports_cuda_graphs = True
    concurrent_bytes = 0

    def __init__(
        self,
        config: DecoderConfig,
        ops: GpuOps,
        embedding: torch.Tensor,
        layers: list[GpuLayer],
        norm: torch.Tensor,
        head: torch.Tensor,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head
        self.fuses = config.activation == "silu" and not config.norm_names.mlp_output  # as the matmul kernels can
        self.supports_fp8 = not any(isinstance(layer.qkv.weight, PackedWeight) for layer in layers)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def vocabulary(self) -> int:
        return len(self.head)

    @torch.inference_mode()
    def forward(
        self, rows: ModelInput, sampled: torch.Tensor, cache: GpuCache, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.hidden_states(rows, sampled, cache)
        if out is None:
            out = torch.empty(len(x), len(self.head), dtype=torch.float32, device=x.device)
        logits = self.ops.compute_logits(x, self.head, out)
        if cap := self.config.logit_softcap:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    @torch.inference_mode()
    def hidden_states(self, rows: ModelInput, sampled: torch.Tensor, cache: GpuCache) -> torch.Tensor:
        """Return the normalized output of the last layer for `logit_rows`, in the model's precision."""
        self.ops.begin_step(len(rows.tokens), rows.prefill is None)
        x = self.ops.embed(self.embedding, rows.tokens, rows.token_sources, sampled)
        if self.config.embedding_scale != 1.0:
            x.mul_(self.config.embedding_scale)
        decode_only = rows.prefill is None and rows.logit_rows is None
        if self.fuses and decode_only and len(x) <= self.ops.max_fused_rows:
            return self._forward_fused(x, rows, cache)
        return self._forward_unfused(x, rows, cache)

    def _forward_fused(self, x: torch.Tensor, rows: ModelInput, cache: GpuCache) -> torch.Tensor:
        ops, eps = self.ops, self.config.eps
        for layer, caches in zip(self.layers, self._caches(cache), strict=True):
            qkv = ops.linear(x, layer.qkv.weight, layer.qkv.bias, norm_weight=layer.input_norm, eps=eps)
            gates = None
            if layer.gates is not None:
                gates = ops.linear(x, layer.gates.weight, layer.gates.bias, norm_weight=layer.input_norm, eps=eps)
            mixed = self._mix(layer, qkv, gates, rows, *caches)
            ops.linear(mixed, layer.out.weight, layer.out.bias, residual=x, out=x)
            mlp = layer.mlp
            if isinstance(mlp, GpuExperts):
                normed = ops.rms_norm(x, layer.post_norm, eps)
                x = self._experts(normed, mlp, residual=x)
                if (shared := mlp.shared_mlp) is not None:
                    hidden = ops.linear(normed, shared.gate_up.weight, shared.gate_up.bias, gated=True)
                    if mlp.shared_gate is None:
                        ops.linear(hidden, shared.down.weight, None, residual=x, out=x)
                    else:
                        ops.add_weighted(x, ops.linear(hidden, shared.down.weight, None), normed, mlp.shared_gate)
                continue
            hidden = ops.linear(
                x, mlp.gate_up.weight, mlp.gate_up.bias, norm_weight=layer.post_norm, eps=eps, gated=True
            )
            ops.linear(hidden, mlp.down.weight, mlp.down.bias, residual=x, out=x)
        return ops.rms_norm(x, self.norm, eps)

    def _forward_unfused(self, x: torch.Tensor, rows: ModelInput, cache: GpuCache) -> torch.Tensor:
        ops, eps = self.ops, self.config.eps
        next_norms = [*((layer.input_norm, layer.sole_projection) for layer in self.layers[1:]), (self.norm, None)]
        normed: torch.Tensor | Fp8Rows = ops.rms_norm(x, self.layers[0].input_norm, eps)
        for layer, caches, (next_norm, projection) in zip(self.layers, self._caches(cache), next_norms, strict=True):
            gates = None if layer.gates is None else self._matmul(normed, layer.gates)
            mixed = self._mix(layer, self._matmul(normed, layer.qkv), gates, rows, *caches)
            if layer is self.layers[-1] and rows.logit_rows is not None:  # only keys, values and states need all rows
                mixed, x = mixed.index_select(0, rows.logit_rows), x.index_select(0, rows.logit_rows)
            mlp = layer.mlp
            gate_up = None if isinstance(mlp, GpuExperts) else mlp.gate_up.weight
            attended = self._matmul(mixed, layer.out)
            if layer.out_norm is not None:
                attended = ops.rms_norm(attended, layer.out_norm, eps)
            normed = ops.add_rms_norm(attended, x, layer.post_norm, eps, gate_up)
            if isinstance(mlp, GpuExperts):
                assert isinstance(normed, torch.Tensor)
                output = self._experts(normed, mlp)
                if mlp.shared_mlp is not None and mlp.shared_gate is not None:
                    ops.add_weighted(output, self._mlp(normed, mlp.shared_mlp), normed, mlp.shared_gate)
                elif mlp.shared_mlp is not None:
                    output += self._mlp(normed, mlp.shared_mlp)
            else:
                output = self._mlp(normed, mlp)
            if layer.mlp_norm is not None:
                output = ops.rms_norm(output, layer.mlp_norm, eps)
            normed = ops.add_rms_norm(output, x, next_norm, eps, projection)
        assert isinstance(normed, torch.Tensor)
        return normed

    def _mlp(self, x: torch.Tensor | Fp8Rows, mlp: GpuMlp) -> torch.Tensor:
        gate_up = self._matmul(x, mlp.gate_up)
        if self.config.activation == "gelu_tanh":
            return self._matmul(self.ops.gelu_mul(gate_up), mlp.down)
        return self._matmul(self.ops.silu_mul(gate_up, mlp.down.weight), mlp.down)

    def _caches(self, cache: GpuCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of each layer; of a delta net, its convolution and recurrent states."""
        if cache.states is None:
            return cache.layers
        attention, states = iter(cache.layers), zip(cache.states.conv, cache.states.recurrent, strict=True)
        return [next(attention) if layer.delta_net is None else next(states) for layer in self.layers]

    def _mix(
        self,
        layer: GpuLayer,
        projected: torch.Tensor,
        gates: torch.Tensor | None,
        rows: ModelInput,
        first: torch.Tensor,
        second: torch.Tensor,
    ) -> torch.Tensor:
        """Return the output of attention or of a delta net before its last projection. Caches as in `_caches`.

        `gates`: the outputs of `layer.gates`.
        """
        if layer.delta_net is None:
            attended = self._attend(layer, projected, rows, first, second)
            if self.config.output_gate:
                self.ops.sigmoid_mul(attended, projected[:, -attended.shape[1] :])
            return attended
        assert rows.states is not None
        prefill = rows.prefill
        sequences = DeltaNetRows(
            rows.states,
            rows.lengths,
            None if prefill is None else prefill.row_starts,
            None if prefill is None else prefill.first_positions,
        )
        return self.ops.delta_net(projected, layer.delta_net, sequences, first, second, gates)

    def _experts(self, x: torch.Tensor, experts: GpuExperts, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.ops.moe_mlp(
            x,
            self._router_logits(x, experts),
            experts.gate_up,
            experts.down,
            experts.per_token,
            normalize=experts.normalize,
            sigmoid=experts.sigmoid,
            shared=experts.shared,
            biases=experts.biases,
            swiglu=experts.swiglu,
            residual=residual,
        )

    def _router_logits(self, x: torch.Tensor, experts: GpuExperts) -> torch.Tensor:
        weight, bias = experts.router.weight, experts.router.bias
        if experts.sigmoid is not None:  # scores near 1 would be equal in bf16
            assert isinstance(weight, torch.Tensor)
            return self.ops.compute_logits(x, weight, x.new_empty(len(x), len(weight), dtype=torch.float32))
        multiply = self.ops.linear if len(x) <= self.ops.max_fused_rows else self.ops.matmul
        return multiply(x, weight, bias)

    def _matmul(self, x: torch.Tensor | Fp8Rows, layer: GpuLinear) -> torch.Tensor:
        if not self.fuses and isinstance(x, torch.Tensor) and len(x) <= self.ops.max_fused_rows:
            return self.ops.linear(x, layer.weight, layer.bias)
        return self.ops.matmul(x, layer.weight, layer.bias)

    def _attend(
        self, layer: GpuLayer, qkv: torch.Tensor, rows: ModelInput, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        ops, heads = self.ops, self.config.heads
        scale, softcap = self.config.attention_scale or None, self.config.softcap
        prefill, num_decodes = rows.prefill, len(rows.lengths)
        if prefill is None:
            store = rows.slot_mapping, layer.qk_norm_rope
            return ops.decode_attention(
                qkv,
                keys,
                values,
                rows.block_tables,
                rows.lengths,
                heads,
                layer.window,
                store,
                scale=scale,
                sinks=layer.sinks,
                softcap=softcap,
            )
        ops.rotate_and_store(qkv, prefill.positions, rows.slot_mapping, layer.qk_norm_rope, keys, values, heads)
        out = qkv.new_empty(len(qkv), heads * self.config.head_size)
        if num_decodes:
            ops.decode_attention(
                qkv[:num_decodes],
                keys,
                values,
                rows.block_tables,
                rows.lengths,
                heads,
                layer.window,
                None,
                out[:num_decodes],
                scale=scale,
                sinks=layer.sinks,
                softcap=softcap,
            )
        ops.prefill_attention(
            qkv[num_decodes:],
            keys,
            values,
            prefill.block_tables,
            prefill.tiles,
            prefill.row_starts,
            prefill.first_positions,
            heads,
            layer.window,
            out[num_decodes:],
            scale=scale,
            sinks=layer.sinks,
            softcap=softcap,
            new_keys=True,
        )
        return out
