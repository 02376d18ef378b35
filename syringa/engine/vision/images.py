"""Images as the scheduler knows them: where they stand in a prompt, and by what name their content goes. Torch-free."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from syringa.types import Image


def picture_key(image: Image) -> bytes:
    """Two images with one key look the same to the model. Only `low` is prepared in a way of its own."""
    return image.digest + (b"low" if image.detail == "low" else b"full")


@dataclass(eq=False)
class Picture:
    """One image as the model takes it, whatever prompt it stands in."""

    key: bytes
    tokens: list[int]  # what its placeholder becomes
    runs: list[tuple[int, int]]  # which of those are places for rows of the vision tower, from and up to
    rows: Any  # a tensor, [places, hidden]
    lead: str = ""  # text around `tokens`, which melts into the text beside it
    tail: str = ""
    grid: tuple[int, int] | None = None  # rows and columns of its places, for models with positions in the plane

    @property
    def size(self) -> int:
        """In bytes."""
        return int(self.rows.nbytes)


class Run(NamedTuple):
    """Neighbouring places of a prompt that hold rows of one picture."""

    begin: int
    end: int
    key: bytes
    rows: Any  # of this run alone


@dataclass(eq=False)
class Pictures:
    """The pictures of one prompt. Holding this is what keeps their rows in memory."""

    pictures: Sequence[Picture]
    runs: list[Run]  # by position
    joint: bool = False  # whether the tokens of a run see one another, also those that come after
    positions: np.ndarray | None = None  # [3, prompt]: in time, down and across, where the model turns by those
    shift: int = 0  # from a later token's place to its position
    _begins: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._begins = [run.begin for run in self.runs]

    def overlapping(self, begin: int, end: int) -> Iterator[Run]:
        for run in self.runs[max(0, bisect_right(self._begins, begin) - 1) :]:
            if run.begin >= end:
                break
            if run.end > begin:
                yield run

    def mark(self, begin: int, end: int) -> bytes:
        """What the places from `begin` up to `end` show, which their tokens do not tell."""
        found = self.overlapping(begin, end)
        return b"".join(run.key + (begin - run.begin).to_bytes(8, "little", signed=True) for run in found)

    def chunk_end(self, begin: int, end: int) -> int:
        """Where a chunk that should end at `end` may end: not within tokens that see one another.

        It ends before them, or, where it begins with them, behind them: more than was asked for, but a budget that
        others use up could put them off for ever.
        """
        if self.joint:
            for run in self.overlapping(end - 1, end):
                if run.end > end:
                    return run.begin if run.begin > begin else run.end
        return end

    def chunk_begin(self, begin: int) -> int:
        """Where computing may begin so that everything before `begin` is left alone: not within a joint run either.

        It would be right there too, but with fewer rows at once sums come out in another order.
        """
        if self.joint and begin:
            for run in self.overlapping(begin - 1, begin):
                if run.end > begin:
                    return run.begin
        return begin


def plane_positions(length: int, runs: Sequence[tuple[int, tuple[int, int]]]) -> tuple[np.ndarray, int]:
    """Positions `[3, length]` of a prompt with grids of `(rows, columns)` at some places, and the shift behind it.

    Text goes on by one in all three; a grid lies at one moment, and takes as many steps as its longer side.
    """
    positions = np.empty((3, length), dtype=np.int64)
    place = at = 0
    for begin, (height, width) in runs:
        positions[:, place:begin] = np.arange(at, at + begin - place)
        at += begin - place
        place = begin + height * width
        cells = np.indices((1, height, width)).reshape(3, -1)
        positions[:, begin:place] = cells + at
        at += max(height, width)
    positions[:, place:] = np.arange(at, at + length - place)
    return positions, at - place
