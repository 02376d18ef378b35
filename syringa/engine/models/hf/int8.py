"""Quantized layers in `transformers`' models: linear layers and experts are replaced, everything else becomes fp32."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import nn

from syringa.engine.cpu.layers.linear import Int8Linear, NativeLinear
from syringa.engine.cpu.native import Kernels

NAME = "syringa"
# Expert routing is sensitive to small differences and cheap to compute, so routers are not quantized.
ROUTERS = ("gate", "router", "wg", "classifier", "shared_expert_gate")


class HFNativeLinear(nn.Module):
    """`Int8Linear` or `BlockLinear` as a drop-in for `nn.Linear`."""

    def __init__(self, linear: NativeLinear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.linear.inputs).float().contiguous()
        return self.linear(rows).view(*x.shape[:-1], self.linear.outputs)


class HFNativeExperts(NamedTuple):
    """The quantized projections of every expert of a mixture-of-experts layer."""

    up: list[Callable[[torch.Tensor], torch.Tensor]]  # with the gates, if there are any
    down: list[Callable[[torch.Tensor], torch.Tensor]]


def _quantize_experts(kernels: Kernels, module: Any, name: str) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    weights = getattr(module, name)
    biases = expert_biases(module, name, len(weights))
    quantized: list[Callable[[torch.Tensor], torch.Tensor]] = [
        Int8Linear(kernels, weight.t() if module.is_transposed else weight, bias)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    setattr(module, name, None)  # free the original
    return quantized


def expert_biases(module: Any, name: str, count: int) -> list[torch.Tensor | None]:
    """Return the bias of each expert's projection."""
    return list(getattr(module, f"{name}_bias")) if module.has_bias else [None] * count


def register() -> None:
    """Register `experts_implementation="syringa"` with transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, _experts)


def _experts(module: Any, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum each token's experts in the order of its own choice, so that the result does not depend on the batch."""
    experts: HFNativeExperts = module.native_experts
    out = torch.zeros(*chosen.shape, hidden.shape[-1])
    for expert in chosen.unique().tolist():
        rows, ranks = torch.where(chosen == expert)
        up = experts.up[expert](hidden[rows].float().contiguous())
        inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        y = experts.down[expert](inner.contiguous())
        if module.has_post_expert_norm:
            y = module.post_expert_norm(y)
        out[rows, ranks] = y * weights[rows, ranks, None].float()
    return out.sum(1)


def quantize_linears(
    model: Any,
    kernels: Kernels,
    keep: Collection[nn.Module] = (),
    advance: Callable[[], None] = lambda: None,
) -> None:
    """Quantize linear layers and experts to int8 one by one, so that the model is never held twice.

    Layers that are quantized already (`packed_layers.py`) stay as they are.

    Embeddings keep their weights and return fp32. The modules in `keep` stay as they are, including their children.
    `advance` is called with each linear layer.
    """
    from transformers.pytorch_utils import Conv1D

    kept = {module for each in keep for module in each.modules()}
    # Without leaf modules, which this list would keep alive after they are replaced.
    for parent in [module for module in model.modules() if next(module.children(), None) is not None]:
        if parent in kept:
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name not in ROUTERS:
                setattr(parent, name, HFNativeLinear(Int8Linear(kernels, child.weight, child.bias)))
                advance()
            elif type(child) is Conv1D:
                setattr(parent, name, HFNativeLinear(Int8Linear(kernels, child.weight.t(), child.bias)))
            elif is_experts_module(child) and not hasattr(child, "native_experts"):
                up, down = ("gate_up_proj" if child.has_gate else "up_proj"), "down_proj"
                child.native_experts = HFNativeExperts(
                    _quantize_experts(kernels, child, up), _quantize_experts(kernels, child, down)
                )
            elif isinstance(child, nn.Embedding):
                child.register_forward_hook(lambda module, inputs, output: output.float())
    if has_experts(model):
        model.set_experts_implementation(NAME)
    for module in model.modules():
        if not isinstance(module, nn.Embedding) and module not in kept:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has experts whose implementation can be selected."""
    return any(map(is_experts_module, model.modules()))


def is_experts_module(module: nn.Module) -> bool:
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "_apply_gate")
