"""A layer of experts on a CPU: a router chooses some of them for each token, and only these are read."""

from __future__ import annotations

from ctypes import addressof, byref, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from syringa.engine.cpu.layers.linear import DenseLinear, LinearLayer, NativeLinear
from syringa.engine.cpu.layers.ops import CpuOps, GatedLinear
from syringa.engine.cpu.native import Kernels, SparseLayerPointers


class Routing(NamedTuple):
    """How a router chooses the experts of a token."""

    per_token: int
    normalize: bool  # their weights add up to `scale`
    sigmoid: bool = False  # of each logit, instead of a softmax of all
    scale: float = 1.0


@dataclass
class ExpertWeights:
    router: LinearLayer  # in fp32, because the choice is sensitive to small differences
    experts: list[tuple[GatedLinear, LinearLayer]]  # gate and up, down
    correction: torch.Tensor | None = None  # added to the scores by which experts are chosen, fp32
    shared: tuple[GatedLinear, LinearLayer] | None = None  # an expert that all tokens use
    shared_gate: LinearLayer | None = None  # a sigmoid of its output weights it; None: 1 does. In fp32


class Experts(Protocol):
    def __call__(self, normed: torch.Tensor, x: torch.Tensor) -> None:
        """Add the output for the rows `normed` to `x`."""
        ...


class TorchExperts:
    """`Experts` with layers of any kind. A token's experts are added in the order of its choice, in every batch."""

    def __init__(self, ops: CpuOps, weights: ExpertWeights, routing: Routing) -> None:
        self.ops, self.weights, self.routing = ops, weights, routing

    def __call__(self, normed: torch.Tensor, x: torch.Tensor) -> None:
        weights, chosen = self._choose(self.weights.router(normed))
        outputs = normed.new_empty(*chosen.shape, x.shape[1])
        for expert in chosen.unique().tolist():
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            gate_up, down = self.weights.experts[expert]
            outputs[rows, ranks] = down(gate_up(normed[rows]))
        for rank in range(self.routing.per_token):
            x += outputs[:, rank] * weights[:, rank, None]
        if self.weights.shared is None:
            return
        gate_up, down = self.weights.shared
        if self.weights.shared_gate is None:
            down(gate_up(normed), add_to=x)
        else:
            x += self.ops.sigmoid_mul(down(gate_up(normed)), self.weights.shared_gate(normed))

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights and the numbers of each token's experts, best first."""
        routing, correction = self.routing, self.weights.correction
        scores = _sigmoid(logits) if routing.sigmoid else logits.softmax(-1)
        ranked = scores if correction is None else scores + correction
        chosen = ranked.topk(routing.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if routing.normalize:
            # In a fixed order; all scores of sigmoids may be 0.
            weights = weights / (sum(weights.split(1, dim=-1)) + (1e-20 if routing.sigmoid else 0.0))
        return weights * routing.scale, chosen


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return sigmoid(x). The bits of `torch.sigmoid` depend on where a number is in its tensor, and these do not."""
    return torch.stack([x, torch.zeros_like(x)], dim=-1).softmax(-1)[..., 0]


class NativeExperts:
    """`Experts` with quantized layers, in one call into the compiled kernels. See native/experts.h."""

    def __init__(self, kernels: Kernels, weights: ExpertWeights, routing: Routing, hidden: int) -> None:
        self.kernels = kernels
        self.weights = weights  # keeps the memory of the pointers below alive
        self.routing = routing
        gate_ups = [_native(gate_up.linear) for gate_up, _ in weights.experts]
        downs = [_native(down) for _, down in weights.experts]
        router, shared, shared_gate = weights.router, weights.shared, weights.shared_gate
        assert isinstance(router, DenseLinear)
        self.pointers = SparseLayerPointers(
            hidden=hidden,
            count=len(weights.experts),
            per_token=routing.per_token,
            sigmoid=routing.sigmoid,
            normalize=routing.normalize,
            scale=routing.scale,
            router=addressof(router.weights),
            router_bias=router.bias_address,
            correction=weights.correction.data_ptr() if weights.correction is not None else None,
            gate_up=_pointers([layer.address for layer in gate_ups]),
            down=_pointers([layer.address for layer in downs]),
            gate_up_bias=_pointers([layer.bias_address for layer in gate_ups]),
            down_bias=_pointers([layer.bias_address for layer in downs]),
        )
        if shared is not None:
            self.pointers.shared_gate_up = _native(shared[0].linear).address
            self.pointers.shared_down = _native(shared[1]).address
        if shared_gate is not None:
            assert isinstance(shared_gate, DenseLinear)
            self.pointers.shared_gate = addressof(shared_gate.weights)

    def __call__(self, normed: torch.Tensor, x: torch.Tensor) -> None:
        self.kernels.experts(byref(self.pointers), normed.data_ptr(), len(normed), x.data_ptr())


def runs_natively(weights: ExpertWeights) -> bool:
    """Return whether all layers are quantized, and gates are computed with the products."""
    pairs = [*weights.experts, *([weights.shared] if weights.shared else [])]
    return isinstance(weights.router, DenseLinear) and all(
        isinstance(gate_up.linear, NativeLinear) and gate_up.linear.gated and isinstance(down, NativeLinear)
        for gate_up, down in pairs
    )


def _native(layer: LinearLayer) -> NativeLinear:
    assert isinstance(layer, NativeLinear)
    return layer


def _pointers(addresses: list[int | None]) -> Any:
    """Return an array of pointers; a null pointer if all are."""
    return (c_void_p * len(addresses))(*addresses) if any(addresses) else None
