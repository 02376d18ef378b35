"""CUDA graphs of decode steps, one per batch size: one launch instead of hundreds.

A captured step reads its inputs from fixed device addresses; batches between two sizes are padded with rows that have
no effect. Without a GPU the step function runs directly, so that tests cover the same buffers and padding.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

CaptureProgress = Callable[[int, int], None]  # (graphs captured, graphs in all)


def graph_batch_sizes(max_size: int) -> list[int]:
    """Return 1, 2, 4, 8, then every 8 up to 256, then every 32, ending with `max_size`."""
    sizes = [1, 2, 4, 8, *range(16, min(max_size, 256) + 1, 8), *range(288, max_size + 1, 32)]
    return sorted({size for size in sizes if size < max_size} | {max_size})


class CudaGraphRunner:
    """Capture and replay a step function per batch size.

    `run_step(size)` must not allocate a data-dependent size or wait for the device.
    """

    def __init__(self, sizes: list[int], run_step: Callable[[int], None], device: torch.device) -> None:
        self.sizes = sizes
        self.capture_seconds = 0.0
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._run_step = run_step
        self._device = device
        self._pool: Any = None

    def size_for(self, rows: int) -> int | None:
        """Return the smallest captured size that holds `rows`, or None if none does."""
        at = bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def capture_all(self, progress: CaptureProgress | None = None) -> None:
        """Capture all sizes, the largest first: it determines the memory pool that they share."""
        if self._device.type != "cuda":
            return
        started = time.perf_counter()
        for done, size in enumerate(reversed(self.sizes)):
            self.capture(size)
            if progress:
                progress(done + 1, len(self.sizes))
        torch.cuda.synchronize(self._device)
        self.capture_seconds = time.perf_counter() - started

    def capture(self, size: int) -> None:
        """Capture one size. Runs the step twice, so its input buffers must hold padding rows."""
        self._run_step(size)  # compiles kernels and initializes libraries, which is not allowed during a capture
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._run_step(size)
        self._pool = graph.pool()
        self.graphs[size] = graph

    def run(self, size: int) -> None:
        """Replay the graph of this size; without a graph, run the step function."""
        if graph := self.graphs.get(size):
            graph.replay()
        else:
            self._run_step(size)
