"""Persistent per-sequence arrays on the host, from which a step's inputs are gathered.

A sequence gets an index when it is first scheduled. Its sampling parameters are written once, its block table
incrementally: a decode step touches at most one entry per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.scheduler_output import ScheduledSequence
from syringa.engine.scheduling.sequence import Sequence

_UINT64_MASK = (1 << 64) - 1


# Block tables are padded to a multiple of this width: Triton compiles another variant for other strides.
TABLE_WIDTH_MULTIPLE = 16


def table_width(positions: int) -> int:
    """Return the padded block table width for a number of tokens."""
    return -(-positions // (BLOCK_SIZE * TABLE_WIDTH_MULTIPLE)) * TABLE_WIDTH_MULTIPLE


class InputBatch:
    """Block tables and sampling parameters of the running sequences, one row per sequence."""

    def __init__(self, max_length: int, count: int = 64) -> None:
        self.tables = np.zeros((count, table_width(max_length)), dtype=np.int32)
        self.seeds = np.zeros(count, dtype=np.int64)
        self.choices = np.zeros(count, dtype=np.int32)
        self.position_deltas = np.zeros(count, dtype=np.int32)  # rotary position minus token index
        self.temperatures = np.zeros(count, dtype=np.float32)
        self.top_k = np.zeros(count, dtype=np.int32)
        self.top_p = np.ones(count, dtype=np.float64)
        self.min_p = np.zeros(count, dtype=np.float32)
        self._indices: dict[Sequence, int] = {}
        self._blocks: list[list[int] | None] = [None] * count  # the list each table row mirrors
        self._free = list(range(count - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._indices)

    def indices_of(self, sequences: Seq[Sequence]) -> np.ndarray:
        indices = self._indices
        return np.array([indices[s] if s in indices else self._add(s) for s in sequences], dtype=np.int64)

    def update(self, items: Seq[ScheduledSequence]) -> np.ndarray:
        """Bring the block tables of the scheduled sequences up to date and return their indices."""
        found = self.indices_of([item.sequence for item in items])
        for index, item in zip(found.tolist(), items, strict=True):
            blocks = item.sequence.block_table
            # A preempted sequence restarts with another list; otherwise only the blocks about to be written changed.
            first = item.start // BLOCK_SIZE
            if self._blocks[index] is not blocks:
                self._blocks[index] = blocks
                first = 0
            if first == len(blocks) - 1:
                self.tables[index, first] = blocks[first]
            else:
                self.tables[index, first : len(blocks)] = blocks[first:]
        return found

    def remove(self, sequence: Sequence) -> None:
        index = self._indices.pop(sequence, None)
        if index is not None:
            self._blocks[index] = None
            self._free.append(index)

    def _add(self, sequence: Sequence) -> int:
        if not self._free:
            self._grow()
        index = self._indices[sequence] = self._free.pop()
        sampling = sequence.request.sampling
        word = sampling.seed & _UINT64_MASK
        self.seeds[index] = word - (1 << 64) if word >> 63 else word
        self.choices[index] = sequence.choice
        self.position_deltas[index] = sequence.prompt_images.mrope_delta if sequence.prompt_images is not None else 0
        self.temperatures[index] = sampling.temperature
        # Greedy rows need no filters, and a disabled filter costs no search in the sampling kernel.
        filtered = sequence.state.filtered
        self.top_k[index] = min(sampling.top_k, np.iinfo(np.int32).max) if filtered else 0
        self.top_p[index] = sampling.top_p if filtered else 1.0
        self.min_p[index] = sampling.min_p if filtered else 0.0
        return index

    def _grow(self) -> None:
        count = len(self.seeds)
        for name in ("tables", "seeds", "choices", "position_deltas", "temperatures", "top_k", "top_p", "min_p"):
            setattr(self, name, np.concatenate([getattr(self, name)] * 2))
        self._blocks += [None] * count
        self._free += range(2 * count - 1, count - 1, -1)
