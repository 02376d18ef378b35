"""Steps that add one token to each sequence, recorded once for each size and replayed: one launch instead of hundreds.

Everything such a step reads from the host lies at fixed places; sizes between two are filled up with rows that do
nothing. Away from a GPU the step itself is run, so that tests see the same places and the same padding.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

Progress = Callable[[int, int], None]


def bucket_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 256, then every 32."""
    sizes = [1, 2, 4, 8, *range(16, min(most, 256) + 1, 8), *range(288, most + 1, 32)]
    return sorted({size for size in sizes if size < most} | {most})


class StepGraphs:
    def __init__(self, sizes: list[int], body: Callable[[int], None], device: torch.device) -> None:
        self.sizes = sizes
        self.seconds = 0.0
        self._body = body
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def size_for(self, rows: int) -> int | None:
        """The smallest that has room; None: no graph has."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def capture(self, progress: Progress | None = None) -> None:
        """Records all sizes, the largest first: it decides how much memory they share."""
        if self._device.type != "cuda":
            return
        started = time.perf_counter()
        for done, size in enumerate(reversed(self.sizes)):
            self.record(size)
            if progress:
                progress(done + 1, len(self.sizes))
        torch.cuda.synchronize(self._device)
        self.seconds = time.perf_counter() - started

    def record(self, size: int) -> None:
        """Runs the step twice: its places must hold rows that do nothing."""
        self._body(size)  # compiles kernels and makes what libraries keep, neither of which a recording may do
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._body(size)
        self._pool = graph.pool()
        self._graphs[size] = graph

    def run(self, size: int) -> None:
        if graph := self._graphs.get(size):
            graph.replay()
        else:
            self._body(size)
