"""What the delta nets of a step on the GPU get, and their reference in PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from syringa.engine.gpu.state_rows import StateRows
from syringa.engine.models.delta_rule import DeltaNetParameters, delta_net_sequence
from syringa.engine.models.hybrid_config import DeltaNetShape


class DeltaNet(NamedTuple):
    """A gated delta net without its projections."""

    parameters: DeltaNetParameters
    shape: DeltaNetShape
    eps: float


class DeltaNetRows(NamedTuple):
    """The sequences of a step as a delta net sees them: decode rows, one per sequence, then prefill rows.

    Integer tensors are int32.
    """

    states: StateRows
    lengths: torch.Tensor  # of the decode rows: tokens of the sequence including the new one; 0: padding
    starts: torch.Tensor | None  # of prefill sequences, from the first prefill row, and the end of the last
    first: torch.Tensor | None  # position of each prefill sequence's first row


def reference_delta_net(
    projected: torch.Tensor,
    net: DeltaNet,
    rows: DeltaNetRows,
    conv_states: torch.Tensor,
    recurrent_states: torch.Tensor,
) -> torch.Tensor:
    """Return the output of a delta net for rows `[q | k | v | z | b | a]`, and update its states."""
    out = projected.new_zeros(len(projected), net.shape.value_width)
    slots, decodes = rows.states.slots.tolist(), len(rows.lengths)
    sequences = [(i, i + 1, length - 1) for i, length in enumerate(rows.lengths.tolist())]
    if rows.starts is not None and rows.first is not None:
        bounds = (rows.starts + decodes).tolist()
        sequences += zip(bounds[:-1], bounds[1:], rows.first.tolist(), strict=True)
    for s, (begin, end, first) in enumerate(sequences):
        if first < 0:
            continue
        snapshot = None
        if s >= decodes and (prefill := rows.states.prefill) is not None:
            saved, target = int(prefill.snapshot_rows[s - decodes]), int(prefill.snapshot_slots[s - decodes])
            snapshot = (saved, conv_states[target], recurrent_states[target]) if saved else None
        states = conv_states[slots[s]], recurrent_states[slots[s]]
        out[begin:end] = delta_net_sequence(projected[begin:end], *net, first, *states, snapshot)
    return out
