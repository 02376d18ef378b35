"""What the host keeps of each sequence in arrays, so that a step of hundreds is laid out by a few gathers.

A sequence gets a lane when it is first scheduled. Its sampling rules are written there once, and its blocks as they
come: a step in which it adds a token touches one entry.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.scheduler_output import Scheduled
from syringa.engine.scheduling.sequence import Sequence

_WORD = (1 << 64) - 1


# Tables are as wide as a multiple of this: kernels are compiled anew for strides that are not.
WIDTH_STEP = 16


def table_width(positions: int) -> int:
    """Entries for so many tokens."""
    return -(-positions // (BLOCK_SIZE * WIDTH_STEP)) * WIDTH_STEP


class Lanes:
    def __init__(self, max_length: int, count: int = 64) -> None:
        self.tables = np.zeros((count, table_width(max_length)), dtype=np.int32)
        self.seeds = np.zeros(count, dtype=np.int64)
        self.choices = np.zeros(count, dtype=np.int32)
        self.shifts = np.zeros(count, dtype=np.int32)  # from a drawn token's place to its position, behind images
        self.temperatures = np.zeros(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int32)
        self.top_p = np.ones(count, dtype=np.float64)
        self.min_p = np.zeros(count, dtype=np.float32)
        self._lanes: dict[Sequence, int] = {}
        self._blocks: list[list[int] | None] = [None] * count  # whose entries the table has
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._lanes)

    def of(self, sequences: Seq[Sequence]) -> np.ndarray:
        lanes = self._lanes
        return np.array([lanes[s] if s in lanes else self._enter(s) for s in sequences], dtype=np.int64)

    def place(self, items: Seq[Scheduled]) -> np.ndarray:
        """The items' lanes, with their blocks written down."""
        found = self.of([item.sequence for item in items])
        for lane, item in zip(found.tolist(), items, strict=True):
            blocks = item.sequence.blocks
            # A sequence gets another list when it begins anew; else only what is about to be written has changed.
            first = item.start // BLOCK_SIZE
            if self._blocks[lane] is not blocks:
                self._blocks[lane] = blocks
                first = 0
            if first == len(blocks) - 1:
                self.tables[lane, first] = blocks[first]
            else:
                self.tables[lane, first : len(blocks)] = blocks[first:]
        return found

    def forget(self, sequence: Sequence) -> None:
        lane = self._lanes.pop(sequence, None)
        if lane is not None:
            self._blocks[lane] = None
            self._free.append(lane)

    def _enter(self, sequence: Sequence) -> int:
        if not self._free:
            self._grow()
        lane = self._lanes[sequence] = self._free.pop()
        sampling = sequence.request.sampling
        word = sampling.seed & _WORD
        self.seeds[lane] = word - (1 << 64) if word >> 63 else word
        self.choices[lane] = sequence.choice
        self.shifts[lane] = sequence.pictures.shift if sequence.pictures is not None else 0
        self.temperatures[lane] = sampling.temperature
        # What is left out of the draw must not be searched for: the best token needs no rules.
        filtered = sequence.state.filtered
        self.top_k[lane] = min(sampling.top_k, np.iinfo(np.int32).max) if filtered else 0
        self.top_p[lane] = sampling.top_p if filtered else 1.0
        self.min_p[lane] = sampling.min_p if filtered else 0.0
        return lane

    def _grow(self) -> None:
        count = len(self.seeds)
        for name in ("tables", "seeds", "choices", "shifts", "temperatures", "top_k", "top_p", "min_p"):
            setattr(self, name, np.concatenate([getattr(self, name)] * 2))
        self._blocks += [None] * count
        self._free += range(2 * count - 1, count - 1, -1)
