"""The batch of one step as tensors, laid out on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.execution.interruption import IsInterrupted
    from syringa.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
    from syringa.engine.vision.step_images import StepImages


@dataclass
class StepStates:
    """The slots in the state cache of a hybrid model's sequences. All tensors are `[S]`, int32."""

    slots: torch.Tensor
    snapshot_rows: torch.Tensor  # a sequence's state after so many of its rows is saved, too; 0: it is not
    snapshot_slots: torch.Tensor  # where


@dataclass
class StepTensors:
    """The input of a forward pass: T tokens of S sequences, one row per token."""

    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int32
    slot_mapping: torch.Tensor  # [T] int64: block * BLOCK_SIZE + offset, where a token's key and value are stored
    row_starts: torch.Tensor  # [S + 1] int32: sequence s has the rows row_starts[s] up to row_starts[s + 1]
    first_positions: torch.Tensor  # [S] int32: position of a sequence's first row
    block_tables: torch.Tensor  # [S, width] int32
    logit_rows: torch.Tensor  # int64: rows whose logits are needed
    native: Any = None  # the same layout for the compiled kernels
    images: StepImages | None = None
    states: StepStates | None = None  # of a hybrid model
    is_interrupted: IsInterrupted | None = None  # None: the step may not be given up


def build_step_tensors(scheduled: Sequence[ScheduledSequence], logit_rows: Sequence[int]) -> StepTensors:
    """Lay out the scheduled sequences one after the other."""
    sequences = len(scheduled)
    starts = np.zeros(sequences + 1, dtype=np.int32)
    first = np.empty(sequences, dtype=np.int32)
    width = max(len(item.sequence.block_table) for item in scheduled)
    tables = np.zeros((sequences, width), dtype=np.int32)
    tokens: list[int] = []
    for s, item in enumerate(scheduled):
        sequence = item.sequence
        tokens += sequence.tokens[item.start : item.start + item.count]
        starts[s + 1] = len(tokens)
        first[s] = item.start
        tables[s, : len(sequence.block_table)] = sequence.block_table
    counts = np.diff(starts)
    owner = np.repeat(np.arange(sequences), counts)
    positions = np.arange(len(tokens), dtype=np.int32) - starts[owner] + first[owner]
    slots = tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepTensors(
        tokens=torch.tensor(tokens),
        positions=torch.from_numpy(positions.astype(np.int32)),
        slot_mapping=torch.from_numpy(slots),
        row_starts=torch.from_numpy(starts),
        first_positions=torch.from_numpy(first),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
    )


def locate_states(scheduled: Sequence[ScheduledSequence]) -> StepStates:
    """Return where the states of the scheduled sequences are."""
    snapshots = [item.snapshot or (item.start, 0) for item in scheduled]
    columns = (
        [item.sequence.state_slot for item in scheduled],
        [position - item.start for (position, _), item in zip(snapshots, scheduled, strict=True)],
        [slot for _, slot in snapshots],
    )
    return StepStates(*(torch.tensor(column, dtype=torch.int32) for column in columns))


def select_logit_rows(
    output: SchedulerOutput,
) -> tuple[list[int], dict[int, int], list[tuple[ScheduledSequence, int, int]]]:
    """Return the rows of the batch whose logits are needed, and how they are used.

    The second result maps the `id` of a scheduled sequence that samples to the index of its logits among these rows.
    The third has the scheduled sequences whose prompts are scored, with the range of their logits.
    """
    logit_rows: list[int] = []
    last_rows: dict[int, int] = {}
    scored = []
    row = 0
    for item in output.scheduled:
        if item.sequence.scoring:
            begin = len(logit_rows)
            count = min(item.count, item.sequence.prompt_length - 1 - item.start)
            logit_rows += range(row, row + count)
            scored.append((item, begin, len(logit_rows)))
        if item.sampled:
            last_rows[id(item)] = len(logit_rows)
            logit_rows.append(row + item.count - 1)
        row += item.count
    return logit_rows, last_rows, scored
