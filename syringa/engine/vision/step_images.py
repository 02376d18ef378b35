"""Images of one step as tensors: embeddings by batch row, bidirectional rows and M-RoPE positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from syringa.engine.execution.batch import StepTensors
    from syringa.engine.scheduling.scheduler_output import ScheduledSequence


class RowPositions(NamedTuple):
    """The part of a step's tensors that `locate_images` needs. The block tables may be on a device."""

    positions: torch.Tensor  # of all rows
    block_tables: torch.Tensor  # of all sequences


@dataclass
class BidirectionalRows:
    """Rows of a step that attend to each other in both directions, and to everything before them."""

    begin: int
    end: int
    first: int  # the position of row `begin`
    table: torch.Tensor  # the sequence's block table


@dataclass
class StepImages:
    embeddings: list[tuple[int, torch.Tensor]] = field(default_factory=list)  # first row, and what to write from there
    bidirectional: list[BidirectionalRows] = field(default_factory=list)
    mrope_positions: torch.Tensor | None = None  # [3, rows], for models with M-RoPE


def locate_images(scheduled: Sequence[ScheduledSequence], step: StepTensors | RowPositions) -> StepImages | None:
    """Return the images of a step, or None if no sequence of it has images."""
    if all(item.sequence.prompt_images is None for item in scheduled):
        return None
    found = StepImages()
    row = 0
    for s, item in enumerate(scheduled):
        if item.sequence.prompt_images is not None:
            _add_sequence(found, item, row, step, s)
        row += item.count
    return found


def _add_sequence(
    found: StepImages, item: ScheduledSequence, row: int, step: StepTensors | RowPositions, s: int
) -> None:
    images = item.sequence.prompt_images
    assert images is not None
    start, end = item.start, item.start + item.count
    for each in images.overlapping(start, end):
        begin, until = max(each.begin, start), min(each.end, end)
        found.embeddings.append((row + begin - start, each.embeddings[begin - each.begin : until - each.begin]))
        if images.bidirectional:
            rows = BidirectionalRows(row + begin - start, row + until - start, begin, step.block_tables[s])
            found.bidirectional.append(rows)
    if images.mrope_positions is not None:
        if found.mrope_positions is None:
            found.mrope_positions = step.positions.long().expand(3, -1).clone()
        known = images.mrope_positions[:, start:end]
        inside = known.shape[1]
        found.mrope_positions[:, row : row + inside] = torch.from_numpy(known)
        found.mrope_positions[:, row + inside : row + item.count] += images.mrope_delta
