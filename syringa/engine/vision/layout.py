"""A step's pictures as tensors: which rows of the batch they fill, and what attention and positions must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from syringa.engine.execution.batch import StepTensors
    from syringa.engine.scheduling.scheduler_output import Scheduled


class Laid(NamedTuple):
    """What has to be known of a step. The tables may be on a device."""

    positions: torch.Tensor  # of all rows
    tables: torch.Tensor  # of all sequences


@dataclass
class JointRows:
    """Rows of a step that see one another, and everything before them."""

    begin: int
    end: int
    first: int  # the position of the first
    table: torch.Tensor  # the sequence's blocks


@dataclass
class StepPictures:
    fills: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # from this row on, these instead of tokens'
    joint: list[JointRows] = field(default_factory=list)
    positions: torch.Tensor | None = None  # [3, T], where some differ from the tokens' places


def place(scheduled: Sequence[Scheduled], step: StepTensors | Laid) -> StepPictures | None:
    """None where the step has nothing to do with pictures."""
    if all(item.sequence.pictures is None for item in scheduled):
        return None
    placed = StepPictures()
    row = 0
    for s, item in enumerate(scheduled):
        if item.sequence.pictures is not None:
            _place(placed, item, row, step, s)
        row += item.count
    return placed


def _place(placed: StepPictures, item: Scheduled, row: int, step: StepTensors | Laid, s: int) -> None:
    pictures = item.sequence.pictures
    assert pictures is not None
    start, end = item.start, item.start + item.count
    for run in pictures.overlapping(start, end):
        begin, until = max(run.begin, start), min(run.end, end)
        placed.fills.append((row + begin - start, run.rows[begin - run.begin : until - run.begin]))
        if pictures.joint:
            placed.joint.append(JointRows(row + begin - start, row + until - start, begin, step.tables[s]))
    if pictures.positions is not None:
        if placed.positions is None:
            placed.positions = step.positions.long().expand(3, -1).clone()
        known = pictures.positions[:, start:end]
        inside = known.shape[1]
        placed.positions[:, row : row + inside] = torch.from_numpy(known)
        placed.positions[:, row + inside : row + item.count] += pictures.shift
