"""A model on the GPU with what has to be found out before it can run: memory that a step takes, and its graphs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from syringa.engine.execution.batch import StepTensors
from syringa.engine.gpu import device as machine
from syringa.engine.gpu.cache import GpuCacheShape
from syringa.engine.gpu.decoder import DeviceModel, Later, Rows
from syringa.engine.gpu.graphs import Progress
from syringa.engine.gpu.images import send_pictures
from syringa.engine.gpu.input_batch import table_width
from syringa.engine.gpu.model_runner import GpuRunner
from syringa.engine.gpu.transfer import upload
from syringa.engine.sampling.sampler import Sampler
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.limits import SCORING_ROWS, Limits

logger = logging.getLogger("syringa.worker")

GRAPH_ROOM = 1 << 30  # for recorded steps and what libraries take when they first run
CPU_BLOCKS = 256  # without a GPU, for tests


@dataclass(frozen=True)
class GpuModel:
    decoder: DeviceModel
    shape: GpuCacheShape
    max_model_len: int

    def blocks(self, tokens: int, gigabytes: float, limits: Limits) -> int:
        """How many blocks the cache gets, once the weights are there. Raises `ConfigError` or `ModelError`."""
        size, device, running = self.shape.bytes_per_block, self.shape.device, limits.max_running
        wanted = -(-tokens // BLOCK_SIZE) if tokens else int(gigabytes * 2**30) // size
        if device.type != "cuda":
            return wanted or CPU_BLOCKS
        peak = self.rehearse(max(limits.step_tokens, running))
        # Logits as they are, edited, and on their way to be drawn from; or those of prompts that are scored.
        logits = 4 * self.decoder.vocabulary * max(3 * running, SCORING_ROWS + running)
        taken = peak + logits + GRAPH_ROOM + self.decoder.beside
        free = machine.free_memory(device) - taken
        if not wanted and 0 < limits.gpu_memory_fraction < 1:
            # At least one sequence as long as can be: shares are made before anybody knows how large models become.
            longest = -(-self.max_model_len // BLOCK_SIZE) * size
            free = min(free, max(longest, machine.left_of_share(device, limits.gpu_memory_fraction) - taken))
        return machine.blocks_that_fit(free, size, BLOCK_SIZE, wanted, halvable=self.decoder.halvable)

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: Any) -> torch.Tensor:
        """`models.decoder.Model`'s contract, one step after the other: for tests, and for looking into a model."""
        counts = step.starts.diff()
        leading = int((counts == 1).long().cumprod(0).sum())
        starts, first = step.starts[leading:] - step.starts[leading], step.first[leading:]
        tiles = torch.from_numpy(self.decoder.ops.tiles(starts.tolist(), first.tolist()))
        ints = [step.tokens, torch.full_like(step.tokens, -1), step.slots, step.tables, step.first[:leading] + 1]
        ints += [step.positions, tiles, starts, first]
        token, source, slot, table, length, position, tile, begin, place = (
            each.to(torch.int32).to(self.shape.device) for each in ints
        )
        later = Later(position, table[leading:], tile, begin, place) if len(first) else None
        everything = step.wanted.tolist() == list(range(len(step.tokens)))
        wanted = None if everything else step.wanted.to(self.shape.device)
        pictures = send_pictures(step.pictures, self.shape.device)
        rows = Rows(token, source, slot, table[:leading], length, later, wanted, pictures)
        return self.decoder.forward(rows, torch.zeros(1, dtype=torch.int64, device=self.shape.device), cache)

    def rehearse(self, tokens: int) -> int:
        """Runs the largest step there can be on nothing, and says how many bytes it took beside the weights.

        Its rows are of both kinds, so that all kernels of such a step are compiled before the first request.
        """
        device, leading = self.shape.device, 8
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        cache = self.shape.allocate(-(-tokens // BLOCK_SIZE) + 1)
        longest = min(self.max_model_len, tokens)
        counts = [min(longest, tokens - i) for i in range(0, tokens, longest)]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        first = np.zeros(len(counts), dtype=np.int32)
        rows = np.arange(leading + tokens, dtype=np.int32)
        slots = np.maximum(rows - leading, 0)
        tables = np.zeros((leading + len(counts), table_width(longest)), dtype=np.int32)
        for i, begin in enumerate(starts[:-1]):
            own = np.arange(begin // BLOCK_SIZE, (begin + counts[i] - 1) // BLOCK_SIZE + 1)
            tables[leading + i, : len(own)] = own[: tables.shape[1]]
        tiles = self.decoder.ops.tiles(starts.tolist(), first.tolist())
        ones = np.ones(leading, dtype=np.int32)
        arrays = [rows * 0, rows * 0 - 1, slots, slots % longest, tables, tiles, starts, first, ones]
        token, source, slot, position, table, tile, start, begin, length = upload(arrays, device)
        later = Later(position, table[leading:], tile, start, begin)
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        self.decoder.forward(Rows(token, source, slot, table[:leading], length, later, zero), zero, cache)
        torch.cuda.synchronize(device)
        cached = cache.keys.nbytes + cache.values.nbytes
        return max(0, torch.cuda.max_memory_allocated(device) - before - cached)

    def runner(
        self, cache: Any, sampler: Sampler, max_length: int, max_running: int, progress: Progress | None = None
    ) -> GpuRunner:
        """With its graphs recorded."""
        runner = GpuRunner(self.decoder, cache, sampler, max_length, max_running)
        runner.capture(progress)
        if runner.graphs.seconds:
            logger.info("recorded %d CUDA graphs in %.1f s", len(runner.graphs.sizes), runner.graphs.seconds)
        return runner
