"""int8 inside `transformers`' models: its linear layers and experts, swapped for ours. Everything else becomes fp32."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from syringa.engine.cpu.layers.linear import Int8Linear
from syringa.engine.cpu.native import Kernels

NAME = "syringa"
# Choosing an expert turns on small differences, and costs next to nothing.
ROUTERS = ("gate", "router", "wg", "classifier", "shared_expert_gate")


class Int8Module(nn.Module):
    def __init__(self, kernels: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.linear = Int8Linear(kernels, weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.linear.inputs).float().contiguous()
        return self.linear(rows).view(*x.shape[:-1], self.linear.outputs)


class Int8Experts:
    """The two projections of every expert."""

    def __init__(self, kernels: Kernels, module: Any) -> None:
        up = "gate_up_proj" if module.has_gate else "up_proj"
        self.up = self._pack(kernels, module, up)
        self.down = self._pack(kernels, module, "down_proj")

    @staticmethod
    def _pack(kernels: Kernels, module: Any, name: str) -> list[Int8Linear]:
        weights = getattr(module, name)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        packed = [
            Int8Linear(kernels, weight.t() if module.is_transposed else weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        setattr(module, name, None)  # frees the original
        return packed


def register() -> None:
    """Makes `experts_implementation="syringa"` known to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, _experts)


def _experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each token's experts are summed in the order it chose them, whatever else is in the batch."""
    experts: Int8Experts = module.int8_experts
    out = torch.zeros(*chosen.shape, hidden.shape[-1])
    for expert in chosen.unique().tolist():
        rows, places = torch.where(chosen == expert)
        up = experts.up[expert](hidden[rows].float().contiguous())
        inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        y = experts.down[expert](inner.contiguous())
        if module.has_post_expert_norm:
            y = module.post_expert_norm(y)
        out[rows, places] = y * weights[rows, places, None].float()
    return out.sum(1)


def swap_linears(model: Any, kernels: Kernels, keep: Collection[nn.Module] = ()) -> None:
    """Packs layer by layer, so that the model is never held twice. Embeddings stay as they are and give fp32.

    What is in `keep` stays as it is, with all that is in it.
    """
    from transformers.pytorch_utils import Conv1D

    kept = {module for each in keep for module in each.modules()}
    # The leaves are left out, or this list would keep every original alive.
    for parent in [module for module in model.modules() if next(module.children(), None) is not None]:
        if parent in kept:
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name not in ROUTERS:
                setattr(parent, name, Int8Module(kernels, child.weight, child.bias))
            elif type(child) is Conv1D:
                setattr(parent, name, Int8Module(kernels, child.weight.t(), child.bias))
            elif takes_experts(child):
                child.int8_experts = Int8Experts(kernels, child)
            elif isinstance(child, nn.Embedding):
                child.register_forward_hook(lambda module, inputs, output: output.float())
    if has_experts(model):
        model.set_experts_implementation(NAME)
    for module in model.modules():
        if not isinstance(module, nn.Embedding) and module not in kept:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()


def has_experts(model: nn.Module) -> bool:
    """Whether it has experts whose implementation can be chosen."""
    return any(map(takes_experts, model.modules()))


def takes_experts(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "_apply_gate")
