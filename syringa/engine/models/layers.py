"""The layers of the native decoder on a CPU: attention and gated delta nets, MLPs and experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.delta_net import DeltaNetOp, NativeDeltaNet, TorchDeltaNet
from syringa.engine.cpu.layers.experts import (
    Experts,
    ExpertWeights,
    NativeExperts,
    Routing,
    TorchExperts,
    runs_natively,
)
from syringa.engine.cpu.layers.linear import Gate, LinearLayer
from syringa.engine.cpu.layers.ops import AttentionTensors, CpuOps, GatedLinear
from syringa.engine.cpu.layers.rotary import rotary_tables
from syringa.engine.cpu.native import Kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.delta_rule import DeltaNetParameters, read_delta_net_parameters, tiled_order

ReadWeight = Callable[[str], torch.Tensor]  # a tensor by its Hugging Face name


class LinearFactory(Protocol):
    """Creates a linear layer of the chosen dtype from the tensors with these names, side by side.

    With a `gate`, they are a gate projection and an up projection. `apart`: tensors of a GGUF file may be layers of
    their own, so that those in blocks stay so beside others.
    """

    def __call__(
        self, names: Sequence[str], bias: torch.Tensor | None, *, gate: Gate | None = None, apart: bool = False
    ) -> LinearLayer: ...


class Mixer(Protocol):
    """Attention or a delta net: what lets tokens see those before them."""

    def __call__(
        self,
        normed: torch.Tensor,
        x: torch.Tensor,
        step: StepTensors,
        cache: CacheTensors,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add the output for the rows `normed` to the residuals `x`, and return them: those in `kept`, or all."""
        ...


@dataclass
class OutputLinear:
    """The last layer of attention or an MLP, whose output is added to the residuals, with or without a norm."""

    linear: LinearLayer
    norm: torch.Tensor | None
    ops: CpuOps
    eps: float

    def __call__(self, inputs: torch.Tensor, x: torch.Tensor) -> None:
        if self.norm is None:
            self.linear(inputs, add_to=x)
        else:
            x += self.ops.rms_norm(self.linear(inputs), self.norm, self.eps)


@dataclass
class Attention:
    ops: CpuOps
    layer: int
    cached: int  # index of its keys and values in the cache
    project: LinearLayer  # rows [q | k | v], or [q | k | v | gates]
    out: OutputLinear
    gates: int = 0  # number of sigmoid gates that the output is multiplied by, or 0

    def __call__(
        self,
        normed: torch.Tensor,
        x: torch.Tensor,
        step: StepTensors,
        cache: CacheTensors,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        projected = self.project(normed)
        attended = self.ops.attention(self.layer, projected, step, cache.layers[self.cached])
        if self.gates:
            attended = self.ops.sigmoid_mul(attended, projected[:, -self.gates :])
        if kept is not None:
            attended, x = attended[kept], x[kept]
        self.out(attended, x)
        return x


@dataclass
class GatedDeltaNet:
    op: DeltaNetOp
    state: int  # index of its states in the cache
    project: LinearLayer  # rows [q | k | v | z | b | a]
    parameters: DeltaNetParameters
    out: OutputLinear
    order: torch.Tensor | None  # of the values, for `out`; None: that of the heads

    def __call__(
        self,
        normed: torch.Tensor,
        x: torch.Tensor,
        step: StepTensors,
        cache: CacheTensors,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        assert cache.states is not None
        states = cache.states.conv[self.state], cache.states.recurrent[self.state]
        mixed = self.op(self.project(normed), self.parameters, step, *states)
        if kept is not None:
            mixed, x = mixed[kept], x[kept]
        self.out(mixed if self.order is None else mixed[:, self.order], x)
        return x


@dataclass
class Mlp:
    gate_up: GatedLinear
    down: OutputLinear

    def __call__(self, normed: torch.Tensor, x: torch.Tensor) -> None:
        """Add the output for the rows `normed` to `x`."""
        self.down(self.gate_up(normed), x)


@dataclass
class DecoderLayer:
    input_norm: torch.Tensor
    mixer: Mixer
    post_norm: torch.Tensor
    mlp: Mlp | Experts


def load_layers(
    config: DecoderConfig,
    weight: ReadWeight,
    make_linear: LinearFactory,
    make_exact: Callable[[str, str | None], LinearLayer],
    ops: CpuOps,
    kernels: Kernels | None,
    progress: Callable[[], None] | None = None,
) -> list[DecoderLayer]:
    """Read the layers one by one, fusing q, k, v and gate, up.

    `make_exact` creates a linear layer in fp32 from the names of its weight and its bias.
    """
    eps, norms = config.eps, config.norm_names
    swiglu = config.swiglu
    mlp_gate, expert_gate = Gate(config.activation), Gate("clamped_swiglu", *swiglu) if swiglu else Gate()

    def fused(prefix: str, names: Sequence[str], bias: bool = False, gate: Gate | None = None) -> LinearLayer:
        biases = torch.cat([weight(f"{prefix}{name}_proj.bias") for name in names]) if bias else None
        return make_linear([f"{prefix}{name}_proj.weight" for name in names], biases, gate=gate)

    def load_norm(prefix: str, name: str) -> torch.Tensor | None:
        return weight(f"{prefix}{name}.weight").float() if name else None

    def load_output(linear: LinearLayer, prefix: str, norm: str) -> OutputLinear:
        return OutputLinear(linear, load_norm(prefix, norm), ops, eps)

    def load_mlp(prefix: str) -> Mlp:
        mlp, bias = f"{prefix}mlp.", config.mlp_bias
        gate_up = GatedLinear(fused(mlp, ("gate", "up"), bias, mlp_gate), mlp_gate, ops)
        return Mlp(gate_up, load_output(fused(mlp, ("down",), bias), prefix, norms.mlp_output))

    def load_expert(
        module: str, biases: tuple[torch.Tensor, torch.Tensor] | tuple[None, None]
    ) -> tuple[GatedLinear, LinearLayer]:
        gate, up, down = (f"{module}.{name}.weight" for name in config.expert_names.projections)
        gate_up = make_linear([gate, up], biases[0], gate=expert_gate)
        return GatedLinear(gate_up, expert_gate, ops), make_linear([down], biases[1])

    def load_experts(prefix: str) -> Experts:
        assert not norms.mlp_output  # no family has both
        names = config.expert_names
        experts, shared = prefix + names.experts, prefix + names.shared
        biases: list[tuple[torch.Tensor, torch.Tensor] | tuple[None, None]] = [(None, None)] * config.experts
        if config.packed_experts:  # gates and ups are interleaved
            gate_up_biases, down_biases = (weight(f"{experts}.{name}_proj_bias") for name in ("gate_up", "down"))
            biases = [
                (torch.cat([bias[::2], bias[1::2]]), down)
                for bias, down in zip(gate_up_biases, down_biases, strict=True)
            ]
        has_shared = config.shared_experts or config.shared_intermediate
        weights = ExpertWeights(
            router=make_exact(
                f"{prefix}{names.router}.weight", f"{prefix}{names.router}.bias" if config.packed_experts else None
            ),
            experts=[load_expert(f"{experts}.{e}", biases[e]) for e in range(config.experts)],
            correction=weight(prefix + names.correction).float() if config.sigmoid_scale is not None else None,
            shared=load_expert(shared, (None, None)) if has_shared else None,
            shared_gate=make_exact(f"{shared}_gate.weight", None) if config.shared_intermediate else None,
        )
        scale = config.sigmoid_scale
        routing = Routing(
            config.experts_per_token, config.normalize_experts, scale is not None, 1.0 if scale is None else scale
        )
        if kernels is not None and runs_natively(weights):
            return NativeExperts(kernels, weights, routing, config.hidden)
        return TorchExperts(ops, weights, routing)

    def load_attention(layer: int, cached: int) -> Attention:
        prefix = f"model.layers.{layer}."
        attention, gated = f"{prefix}self_attn.", config.output_gate
        project = fused(attention, ("q", "k", "v", "g") if gated else ("q", "k", "v"), config.qkv_bias)
        out = load_output(fused(attention, ("o",), config.out_bias), prefix, norms.attention_output)
        return Attention(ops, layer, cached, project, out, config.heads * config.head_size if gated else 0)

    def load_delta_net(layer: int, state: int) -> GatedDeltaNet:
        assert config.delta_net is not None
        op: DeltaNetOp = TorchDeltaNet(config.delta_net, eps)
        if kernels is not None:
            op = NativeDeltaNet(kernels, config.delta_net, eps)
        prefix = f"model.layers.{layer}.linear_attn."
        project = make_linear([f"{prefix}{name}_proj.weight" for name in ("qkv", "z", "b", "a")], None, apart=True)
        parameters = read_delta_net_parameters(prefix, weight)
        out = OutputLinear(fused(prefix, ("out",)), None, ops, eps)
        return GatedDeltaNet(
            op, state, project, parameters, out, tiled_order(config.delta_net) if config.tiled_values else None
        )

    layers: list[DecoderLayer] = []
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        linear = sum(config.linear[:i])
        layers.append(
            DecoderLayer(
                input_norm=weight(f"{prefix}{norms.attention}.weight").float(),
                mixer=load_delta_net(i, linear) if config.is_linear(i) else load_attention(i, i - linear),
                post_norm=weight(f"{prefix}{norms.mlp}.weight").float(),
                mlp=load_experts(prefix) if config.sparse[i] else load_mlp(prefix),
            )
        )
        if progress:
            progress()
    return layers


def load_attention_tensors(config: DecoderConfig, weight: ReadWeight, length: int) -> AttentionTensors:
    """Read what the operations of attention need beside the projections, for a context of `length` tokens."""
    prefix = "model.layers.{}.self_attn."
    local = config.local_rope
    tables = rotary_tables(config.rope, config.rotary, length, config.max_positions)
    local_tables = rotary_tables(local, config.rotary, length, config.max_positions) if local is not None else tables

    def norms(layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not config.qk_norm or config.is_linear(layer):
            return None
        q, k = (weight(f"{prefix.format(layer)}{name}_norm.weight").float() for name in ("q", "k"))
        return q, k

    layers = range(config.layers)
    return AttentionTensors(
        [tables if config.rope_of(i) is config.rope else local_tables for i in layers],
        [norms(i) for i in layers],
        [weight(f"{prefix.format(i)}sinks").float() if config.sinks else None for i in layers],
    )
