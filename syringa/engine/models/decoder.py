"""The native decoder: one definition for the Llama-like families, driven by `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.linear import LinearLayer
from syringa.engine.cpu.layers.ops import Ops
from syringa.engine.execution.batch import StepTensors
from syringa.engine.models.config import DecoderConfig

Weight = Callable[[str], torch.Tensor]  # a tensor by its Hugging Face name


class MakeLinear(Protocol):
    """Makes a layer of the chosen precision. `gated`: a gate and an up projection, one after the other."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool = False) -> LinearLayer: ...


class Model(Protocol):
    """What the runner needs of a model, native or not."""

    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        """Logits of `step.wanted`, fp32."""
        ...


@dataclass
class DecoderLayer:
    input_norm: torch.Tensor
    qkv: LinearLayer
    out: LinearLayer
    post_norm: torch.Tensor
    gate_up: LinearLayer
    down: LinearLayer


class Decoder:
    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
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
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(ops.rms_norm(x, layer.input_norm, eps))
            layer.out(ops.attention(i, qkv, step, cache.layers[i]), add_to=x)
            gate_up = layer.gate_up(ops.rms_norm(x, layer.post_norm, eps))
            layer.down(ops.silu_mul(gate_up), add_to=x)
        return self.head(ops.rms_norm(x[step.wanted], self.norm, eps))


def load_layers(
    config: DecoderConfig, weight: Weight, make: MakeLinear, progress: Callable[[], None] | None = None
) -> list[DecoderLayer]:
    """Reads the layers one by one, fusing q, k, v and gate, up."""
    layers = []
    for i in range(config.layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."

        def fused(prefix: str, names: tuple[str, ...], bias: bool, gated: bool = False) -> LinearLayer:
            weights = torch.cat([weight(f"{prefix}{name}_proj.weight") for name in names])
            biases = torch.cat([weight(f"{prefix}{name}_proj.bias") for name in names]) if bias else None
            return make(weights, biases, gated=gated)

        layers.append(
            DecoderLayer(
                input_norm=weight(f"model.layers.{i}.input_layernorm.weight").float(),
                qkv=fused(attention, ("q", "k", "v"), config.qkv_bias),
                out=fused(attention, ("o",), config.out_bias),
                post_norm=weight(f"model.layers.{i}.post_attention_layernorm.weight").float(),
                gate_up=fused(mlp, ("gate", "up"), config.mlp_bias, gated=True),
                down=fused(mlp, ("down",), config.mlp_bias),
            )
        )
        if progress:
            progress()
    return layers


def load_norms(config: DecoderConfig, weight: Weight) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
    """The query and key norms of each layer, for models that have them."""
    if not config.qk_norm:
        return [None] * config.layers
    prefix = "model.layers.{}.self_attn.{}_norm.weight"
    return [
        (weight(prefix.format(i, "q")).float(), weight(prefix.format(i, "k")).float()) for i in range(config.layers)
    ]
