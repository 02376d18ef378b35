"""One step's batch as tensors. Host preparation only: nothing here computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.scheduling.scheduler_output import Plan, Scheduled
    from syringa.engine.vision.layout import StepPictures


@dataclass
class StepTensors:
    tokens: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int32
    slots: torch.Tensor  # [T] int64: block · BLOCK_SIZE + offset, where each token's key and value go
    starts: torch.Tensor  # [S + 1] int32: the rows of sequence s are starts[s] up to starts[s + 1]
    first: torch.Tensor  # [S] int32: the position of its first row
    tables: torch.Tensor  # [S, width] int32: its blocks
    wanted: torch.Tensor  # int64: the rows whose logits are needed
    native: Any = None  # the same layout as the compiled kernels want it
    pictures: StepPictures | None = None


def prepare(scheduled: Sequence[Scheduled], wanted: Sequence[int]) -> StepTensors:
    """Lays out the sequences one after the other."""
    sequences = len(scheduled)
    starts = np.zeros(sequences + 1, dtype=np.int32)
    first = np.empty(sequences, dtype=np.int32)
    width = max(len(item.sequence.blocks) for item in scheduled)
    tables = np.zeros((sequences, width), dtype=np.int32)
    tokens: list[int] = []
    for s, item in enumerate(scheduled):
        sequence = item.sequence
        tokens += sequence.tokens[item.start : item.start + item.count]
        starts[s + 1] = len(tokens)
        first[s] = item.start
        tables[s, : len(sequence.blocks)] = sequence.blocks
    counts = np.diff(starts)
    owner = np.repeat(np.arange(sequences), counts)
    positions = np.arange(len(tokens), dtype=np.int32) - starts[owner] + first[owner]
    slots = tables[owner, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    return StepTensors(
        tokens=torch.tensor(tokens),
        positions=torch.from_numpy(positions.astype(np.int32)),
        slots=torch.from_numpy(slots),
        starts=torch.from_numpy(starts),
        first=torch.from_numpy(first),
        tables=torch.from_numpy(tables),
        wanted=torch.tensor(wanted, dtype=torch.int64),
    )


def wanted_rows(plan: Plan) -> tuple[list[int], dict[int, int], list[tuple[Scheduled, int, int]]]:
    """The rows whose logits are needed; where each drawing item's last one is among them; and who scores which."""
    wanted: list[int] = []
    last_rows: dict[int, int] = {}
    scored = []
    row = 0
    for item in plan.items:
        if item.sequence.scoring:
            begin = len(wanted)
            count = min(item.count, item.sequence.prompt_length - 1 - item.start)
            wanted += range(row, row + count)
            scored.append((item, begin, len(wanted)))
        if item.draws:
            last_rows[id(item)] = len(wanted)
            wanted.append(row + item.count - 1)
        row += item.count
    return wanted, last_rows, scored
