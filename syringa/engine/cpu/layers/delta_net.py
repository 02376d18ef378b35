"""A gated delta net between its two projections, on a CPU: convolution, delta rule, and norm with output gate."""

from __future__ import annotations

from ctypes import addressof
from typing import Protocol

import torch

from syringa.engine.cpu.native import DeltaNetLayer, DeltaNetStates, Kernels
from syringa.engine.execution.batch import StepStates, StepTensors
from syringa.engine.models.delta_rule import DeltaNetParameters, delta_net_sequence
from syringa.engine.models.hybrid_config import DeltaNetShape


class DeltaNetOp(Protocol):
    def __call__(
        self,
        projected: torch.Tensor,
        parameters: DeltaNetParameters,
        step: StepTensors,
        conv_states: torch.Tensor,
        recurrent_states: torch.Tensor,
    ) -> torch.Tensor:
        """Return `[tokens, value width]` for rows `[q | k | v | z | b | a]`, and update a layer's states."""
        ...


class TorchDeltaNet:
    """`DeltaNetOp` in PyTorch: single tokens by the recurrence, others in chunks."""

    def __init__(self, shape: DeltaNetShape, eps: float) -> None:
        self.shape, self.eps = shape, eps

    def __call__(
        self,
        projected: torch.Tensor,
        parameters: DeltaNetParameters,
        step: StepTensors,
        conv_states: torch.Tensor,
        recurrent_states: torch.Tensor,
    ) -> torch.Tensor:
        states, outputs = _states(step), []
        for s, slot in enumerate(states.slots.tolist()):
            saved, target = int(states.snapshot_rows[s]), int(states.snapshot_slots[s])
            outputs.append(
                delta_net_sequence(
                    projected[int(step.row_starts[s]) : int(step.row_starts[s + 1])],
                    parameters,
                    self.shape,
                    self.eps,
                    int(step.first_positions[s]),
                    conv_states[slot],
                    recurrent_states[slot],
                    (saved, conv_states[target], recurrent_states[target]) if saved else None,
                )
            )
        return torch.cat(outputs)


class NativeDeltaNet:
    """`DeltaNetOp` on the compiled kernels: token by token, so the bits do not depend on chunks or the batch."""

    def __init__(self, kernels: Kernels, shape: DeltaNetShape, eps: float) -> None:
        self.kernels, self.shape, self.eps = kernels, shape, eps

    def __call__(
        self,
        projected: torch.Tensor,
        parameters: DeltaNetParameters,
        step: StepTensors,
        conv_states: torch.Tensor,
        recurrent_states: torch.Tensor,
    ) -> torch.Tensor:
        states = _states(step)
        out = torch.empty(len(projected), self.shape.value_width)
        layer = DeltaNetLayer(*self.shape, self.eps, *(each.data_ptr() for each in parameters))
        numbers = step.row_starts, step.first_positions, states.slots, states.snapshot_rows, states.snapshot_slots
        batch = DeltaNetStates(
            len(states.slots),
            *(each.data_ptr() for each in numbers),
            conv_states.data_ptr(),
            recurrent_states.data_ptr(),
        )
        self.kernels.delta_net(
            addressof(layer), addressof(batch), projected.data_ptr(), projected.shape[1], out.data_ptr()
        )
        return out


def _states(step: StepTensors) -> StepStates:
    assert step.states is not None  # a hybrid model is run with them
    return step.states
