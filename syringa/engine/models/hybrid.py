"""The native decoder of hybrid models on a CPU: attention and gated delta nets, MLPs and experts.

All operations work row by row or sequence by sequence, so that with the compiled kernels the bits of a token do not
depend on the batch it is computed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.delta_net import DeltaNetOp, NativeDeltaNet, TorchDeltaNet
from syringa.engine.cpu.layers.linear import LinearLayer
from syringa.engine.cpu.layers.ops import CpuOps
from syringa.engine.cpu.native import Kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.decoder import Embedding, LinearFactory, ReadWeight
from syringa.engine.models.delta_rule import DeltaNetParameters, read_delta_net_parameters

MakeDense = Callable[[str], LinearLayer]  # a linear layer that is not quantized, by the name of its weight


class Mixer(Protocol):
    """Attention or a delta net: what lets tokens see those before them."""

    def __call__(self, normed: torch.Tensor, x: torch.Tensor, step: StepTensors, cache: CacheTensors) -> None:
        """Add the output for the rows `normed` to `x`."""
        ...


class FeedForward(Protocol):
    def __call__(self, normed: torch.Tensor, x: torch.Tensor) -> None:
        """Add the output for the rows `normed` to `x`."""
        ...


@dataclass
class GatedAttention:
    """Attention whose output is multiplied by the sigmoid of gates."""

    ops: CpuOps
    layer: int
    cached: int  # index of its keys and values in the cache
    project: LinearLayer  # rows [q | k | v | gates]
    out: LinearLayer
    width: int  # of the gates

    def __call__(self, normed: torch.Tensor, x: torch.Tensor, step: StepTensors, cache: CacheTensors) -> None:
        projected = self.project(normed)
        attended = self.ops.attention(self.layer, projected, step, cache.layers[self.cached])
        self.out(self.ops.sigmoid_mul(attended, projected[:, -self.width :]), add_to=x)


@dataclass
class GatedDeltaNet:
    op: DeltaNetOp
    state: int  # index of its states in the cache
    project: LinearLayer  # rows [q | k | v | z | b | a]
    parameters: DeltaNetParameters
    out: LinearLayer

    def __call__(self, normed: torch.Tensor, x: torch.Tensor, step: StepTensors, cache: CacheTensors) -> None:
        assert cache.states is not None
        states = cache.states.conv[self.state], cache.states.recurrent[self.state]
        self.out(self.op(self.project(normed), self.parameters, step, *states), add_to=x)


@dataclass
class GatedMlp:
    ops: CpuOps
    gate_up: LinearLayer
    down: LinearLayer

    def __call__(self, normed: torch.Tensor, x: torch.Tensor) -> None:
        self.down(self.ops.silu_mul(self.gate_up(normed)), add_to=x)


@dataclass
class SparseMlp:
    """Experts that a router chooses for each token, and one that all tokens use. Only chosen ones are computed."""

    ops: CpuOps
    router: LinearLayer
    experts: list[tuple[LinearLayer, LinearLayer]]  # gate and up, down
    per_token: int
    normalize: bool
    shared: GatedMlp | None
    shared_gate: LinearLayer | None

    def __call__(self, normed: torch.Tensor, x: torch.Tensor) -> None:
        weights, chosen = self.router(normed).softmax(-1).topk(self.per_token, dim=-1)
        if self.normalize:
            weights = weights / sum(weights.split(1, dim=-1))  # in a fixed order
        outputs = normed.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = self.experts[expert]
            outputs[rows, ranks] = down(self.ops.silu_mul(gate_up(normed[rows])))
        for rank in range(self.per_token):  # in the order of the choices, whatever else is in the batch
            x += outputs[:, rank] * weights[:, rank, None]
        if self.shared is not None and self.shared_gate is not None:
            common = torch.zeros_like(x)
            self.shared(normed, common)
            x += self.ops.sigmoid_mul(common, self.shared_gate(normed))


@dataclass
class HybridLayer:
    input_norm: torch.Tensor
    mixer: Mixer
    post_norm: torch.Tensor
    mlp: FeedForward


class HybridDecoder:
    """The native decoder of hybrid models on a CPU."""

    def __init__(
        self,
        config: DecoderConfig,
        ops: CpuOps,
        embedding: Embedding,
        layers: list[HybridLayer],
        norm: torch.Tensor,
        head: LinearLayer,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        ops, eps = self.ops, self.config.eps
        x = self.embedding[step.tokens].float()
        for layer in self.layers:
            layer.mixer(ops.rms_norm(x, layer.input_norm, eps), x, step, cache)
            if layer is self.layers[-1]:  # only keys, values and states need all rows
                x = x[step.logit_rows]
            layer.mlp(ops.rms_norm(x, layer.post_norm, eps), x)
        return self.head(ops.rms_norm(x, self.norm, eps))


def load_hybrid_layers(
    config: DecoderConfig,
    weight: ReadWeight,
    make_linear: LinearFactory,
    make_dense: MakeDense,
    ops: CpuOps,
    kernels: Kernels | None,
    progress: Callable[[], None] | None = None,
) -> list[HybridLayer]:
    """Read the layers one by one, under the names of `loading.hybrid_weights`."""
    assert config.delta_net is not None
    delta_net: DeltaNetOp = TorchDeltaNet(config.delta_net, config.eps)
    if kernels is not None:
        delta_net = NativeDeltaNet(kernels, config.delta_net, config.eps)

    def fused(prefix: str, names: Sequence[str], bias: bool = False) -> LinearLayer:
        biases = torch.cat([weight(f"{prefix}{name}_proj.bias") for name in names]) if bias else None
        return make_linear([f"{prefix}{name}_proj.weight" for name in names], biases)

    def load_mlp(prefix: str) -> GatedMlp:
        return GatedMlp(ops, fused(prefix, ("gate", "up")), fused(prefix, ("down",)))

    def load_experts(prefix: str) -> SparseMlp:
        names = config.expert_names
        shared = f"{prefix}{names.shared}"
        experts = [load_mlp(f"{prefix}{names.experts}.{e}.") for e in range(config.experts)]
        return SparseMlp(
            ops,
            make_dense(f"{prefix}{names.router}.weight"),
            [(expert.gate_up, expert.down) for expert in experts],
            config.experts_per_token,
            config.normalize_experts,
            load_mlp(f"{shared}.") if config.shared_intermediate else None,
            make_dense(f"{shared}_gate.weight") if config.shared_intermediate else None,
        )

    def load_attention(layer: int, cached: int) -> GatedAttention:
        prefix = f"model.layers.{layer}.self_attn."
        width = config.heads * config.head_size
        project = fused(prefix, ("q", "k", "v", "g"), config.qkv_bias)
        return GatedAttention(ops, layer, cached, project, fused(prefix, ("o",), config.out_bias), width)

    def load_delta_net(layer: int, state: int) -> GatedDeltaNet:
        prefix = f"model.layers.{layer}.linear_attn."
        project = fused(prefix, ("qkv", "z", "b", "a"))
        return GatedDeltaNet(
            delta_net, state, project, read_delta_net_parameters(prefix, weight), fused(prefix, ("out",))
        )

    layers: list[HybridLayer] = []
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        linear = sum(config.linear[:i])
        layers.append(
            HybridLayer(
                input_norm=weight(f"{prefix}input_layernorm.weight").float(),
                mixer=load_delta_net(i, linear) if config.linear[i] else load_attention(i, i - linear),
                post_norm=weight(f"{prefix}post_attention_layernorm.weight").float(),
                mlp=load_experts(prefix) if config.sparse[i] else load_mlp(f"{prefix}mlp."),
            )
        )
        if progress:
            progress()
    return layers
