"""The state of linear-attention layers: per slot, the last inputs of the convolution and a matrix per head.

A running sequence has one slot, and each snapshot that prefix reuse starts from has one. Which is decided by
`scheduling.state_cache`. Uninitialized: a sequence at its first position reads no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from syringa.engine.cpu.layers.cache import lazy_zeros
from syringa.engine.models.hybrid_config import DeltaNetShape

MAX_COPY_BYTES = 128 << 20  # of states that are copied at once
StateCopies = list[tuple[int, int]]  # (source, target) slots


@dataclass(frozen=True)
class StateShape:
    """Sizes and device of a state cache, without its number of slots."""

    layers: int  # with linear attention
    delta_net: DeltaNetShape
    device: torch.device

    @property
    def bytes_per_slot(self) -> int:
        return self.layers * self.delta_net.state_bytes

    def allocate(self, slots: int) -> StateTensors:
        return StateTensors(self, slots)


class StateTensors:
    """The states of all layers with linear attention, in fp32. On a CPU, memory is used once it is written."""

    def __init__(self, shape: StateShape, slots: int) -> None:
        net = shape.delta_net
        sizes = (
            (shape.layers, slots, net.kernel - 1, net.channels),
            (shape.layers, slots, net.value_heads, net.key_size, net.value_size),
        )
        if shape.device.type == "cpu":
            self.conv, self.recurrent = (lazy_zeros(size, torch.float32) for size in sizes)
        else:
            self.conv, self.recurrent = (torch.zeros(size, device=shape.device) for size in sizes)

    def copy(self, pairs: StateCopies) -> None:
        """Copy slots in every layer, as if all sources were read before any target is written."""
        if not pairs:
            return
        indices = torch.tensor(pairs).T.contiguous()
        # A non-blocking copy: `torch.tensor(…, device=…)` would wait for all queued work.
        sources, targets = indices.to(self.conv.device, non_blocking=True)
        for states in (self.conv, self.recurrent):
            # The copy needs as much memory again: one layer after the other, unless it is little.
            if len(pairs) * states[:, 0].nbytes <= MAX_COPY_BYTES:
                states.index_copy_(1, targets, states.index_select(1, sources))
                continue
            for layer in states:
                layer.index_copy_(0, targets, layer.index_select(0, sources))
