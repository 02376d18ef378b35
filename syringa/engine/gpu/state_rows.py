"""Where the states of a hybrid model's sequences are in a step on the GPU, and how prompts are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from syringa.engine.gpu.transfer import upload
from syringa.engine.models.delta_rule import CHUNK

if TYPE_CHECKING:
    from syringa.engine.scheduling.scheduler_output import ScheduledSequence


@dataclass
class PrefillStates:
    """Rows and chunks of the sequences that compute several tokens. All tensors are int32."""

    row_sequences: torch.Tensor  # [rows]: the sequence of each row
    chunk_sequences: torch.Tensor  # [chunks]: that of each chunk
    chunk_starts: torch.Tensor  # [sequences + 1]: first chunk of each sequence, and the end of the last
    snapshot_rows: torch.Tensor  # [sequences]: the state after so many rows is saved, too; 0: it is not
    snapshot_slots: torch.Tensor  # [sequences]


@dataclass
class StateRows:
    """The slots of the states of a step's sequences, int32: of decode rows first, then of prefill sequences."""

    slots: torch.Tensor
    prefill: PrefillStates | None = None


class ChunkPlan(NamedTuple):
    """The first fields of `PrefillStates`, on the host."""

    row_sequences: np.ndarray
    chunk_sequences: np.ndarray
    chunk_starts: np.ndarray


def plan_chunks(starts: Sequence[int], first: Sequence[int]) -> ChunkPlan:
    """Cut sequences into chunks that start at multiples of `CHUNK` positions.

    `starts`: first row of each sequence and the end of the last; `first`: position of each sequence's first row.
    """
    bounds, begins = np.array(starts, dtype=np.int32), np.array(first, dtype=np.int32)
    counts = bounds[1:] - bounds[:-1]
    chunks = -(-(begins + counts) // CHUNK) - begins // CHUNK
    sequences = np.arange(len(begins), dtype=np.int32)
    return ChunkPlan(
        np.repeat(sequences, counts),
        np.repeat(sequences, chunks),
        np.concatenate([[0], chunks.cumsum()]).astype(np.int32),
    )


def upload_states(scheduled: Sequence[ScheduledSequence], decodes: int, device: torch.device) -> StateRows:
    """Return the state inputs of a step on the device. The first `decodes` sequences have one row each."""
    return make_state_rows(
        [item.sequence.state_slot for item in scheduled],
        [item.start for item in scheduled[decodes:]],
        [item.count for item in scheduled[decodes:]],
        [
            (item.snapshot[0] - item.start, item.snapshot[1]) if item.snapshot else (0, 0)
            for item in scheduled[decodes:]
        ],
        device,
    )


def make_state_rows(
    slots: Sequence[int],
    first: Sequence[int],
    counts: Sequence[int],
    snapshots: Sequence[tuple[int, int]],
    device: torch.device,
) -> StateRows:
    """Return state inputs on the device. `slots`: of all sequences; the rest is that of the prefill sequences.

    `snapshots`: after how many rows a state is saved, 0 for none, and the slot for it.
    """
    arrays = [np.array(slots, dtype=np.int32)]
    if not first:
        return StateRows(upload(arrays, device)[0])
    starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
    arrays += [*plan_chunks(starts, first), *np.array(snapshots, dtype=np.int32).T]
    uploaded, *prefill = upload(arrays, device)
    return StateRows(uploaded, PrefillStates(*prefill))
