"""A model on the GPU: how much memory a step takes, how many cache blocks fit, and its model runner."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from syringa.engine.execution.batch import StepTensors
from syringa.engine.gpu import device as gpu_device
from syringa.engine.gpu.cache import GpuCacheShape
from syringa.engine.gpu.cuda_graphs import CaptureProgress
from syringa.engine.gpu.decoder import GpuDecoderInterface, ModelInput, PrefillInput
from syringa.engine.gpu.input_batch import table_width
from syringa.engine.gpu.model_runner import GpuModelRunner
from syringa.engine.gpu.state_rows import make_state_rows
from syringa.engine.gpu.transfer import copy_images_to_device, upload
from syringa.engine.sampling.sampler import Sampler
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.limits import SCORING_ROWS, SchedulerLimits
from syringa.engine.scheduling.state_cache import SNAPSHOT_SLOTS, count_slots

logger = logging.getLogger("syringa.worker")

CUDA_GRAPH_RESERVE = 1 << 30  # bytes for CUDA graphs and library workspaces
STATE_SHARE = 4  # a hybrid model's states take a fourth of the memory beside the weights at most
CPU_BLOCKS = 256  # cache size without a GPU, in tests
DUMMY_DECODES = 8  # decode rows of the steps that are run before the first request
# Prefill tokens, their sequences, and rows of logits of steps that together use all kernels of mixed steps. Up to 256
# rows, products with quantized weights are split by the number of their tiles of 64 rows.
COMPILED_STEPS = (
    (4, 1, 1),
    (16, 1, 3),
    (48, 1, 24),
    (112, 1, 48),
    (150, 1, 1),
    (200, 1, 1),
    (250, 1, 80),
    (700, 16, 1),
    (2000, 1, 1),
    (5000, 1, 1),
)


@dataclass(frozen=True)
class GpuModel:
    """A decoder on a GPU with the shape of its KV cache."""

    decoder: GpuDecoderInterface
    shape: GpuCacheShape
    max_model_len: int

    def num_blocks(self, tokens: int, gigabytes: float, limits: SchedulerLimits) -> int:
        """Return the number of cache blocks, given the loaded weights. Raises `ConfigError` or `ModelError`."""
        size, device, running = self.shape.bytes_per_block, self.shape.device, limits.max_running
        requested = -(-tokens // BLOCK_SIZE) if tokens else int(gigabytes * 2**30) // size
        if device.type != "cuda":
            return requested or CPU_BLOCKS
        peak = self.profile_peak_memory(max(limits.step_tokens, running))
        # Logits, a processed copy and sampling temporaries; or the logits of prompts that are scored.
        logits = 4 * self.decoder.vocabulary * max(3 * running, SCORING_ROWS + running)
        taken = peak + logits + CUDA_GRAPH_RESERVE + self.decoder.concurrent_bytes
        free = gpu_device.free_memory(device) - taken
        if not requested and 0 < limits.gpu_memory_fraction < 1:
            # At least one sequence of the maximum length: shares are assigned before a model's size is known.
            longest = -(-self.max_model_len // BLOCK_SIZE) * size
            free = min(
                free, max(longest, gpu_device.remaining_memory_share(device, limits.gpu_memory_fraction) - taken)
            )
        return gpu_device.num_cache_blocks(free, size, BLOCK_SIZE, requested, supports_fp8=self.decoder.supports_fp8)

    def num_state_slots(self, limits: SchedulerLimits) -> int:
        """Return the number of slots in the state cache of a hybrid model, given the loaded weights."""
        device = self.shape.device
        assert self.shape.states is not None
        if device.type != "cuda":
            return limits.max_running + SNAPSHOT_SLOTS
        free = gpu_device.free_memory(device)
        if 0 < limits.gpu_memory_fraction < 1:
            free = min(free, gpu_device.remaining_memory_share(device, limits.gpu_memory_fraction))
        return count_slots(limits.max_running, self.shape.states.bytes_per_slot, free // STATE_SHARE)

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: Any) -> torch.Tensor:
        """Run one step synchronously, with the contract of `models.decoder.Model`: for tests and load-time checks."""
        counts = step.row_starts.diff()
        num_decodes = int((counts == 1).long().cumprod(0).sum())
        starts, first = step.row_starts[num_decodes:] - step.row_starts[num_decodes], step.first_positions[num_decodes:]
        tiles = torch.from_numpy(self.decoder.ops.plan_prefill(starts.tolist(), first.tolist()))
        ints = [
            step.tokens,
            torch.full_like(step.tokens, -1),
            step.slot_mapping,
            step.block_tables,
            step.first_positions[:num_decodes] + 1,
        ]
        ints += [step.positions, tiles, starts, first]
        token, source, slot, table, length, position, tile, row_start, first_position = (
            each.to(torch.int32).to(self.shape.device) for each in ints
        )
        prefill = PrefillInput(position, table[num_decodes:], tile, row_start, first_position) if len(first) else None
        all_rows = step.logit_rows.tolist() == list(range(len(step.tokens)))
        logit_rows = None if all_rows else step.logit_rows.to(self.shape.device)
        images = copy_images_to_device(step.images, self.shape.device)
        rows = ModelInput(token, source, slot, table[:num_decodes], length, prefill, logit_rows, images)
        if (states := step.states) is not None:
            snapshots = torch.stack([states.snapshot_rows, states.snapshot_slots], dim=1)[num_decodes:].tolist()
            rows.states = make_state_rows(
                states.slots.tolist(), first.tolist(), starts.diff().tolist(), snapshots, self.shape.device
            )
        return self.decoder.forward(rows, torch.zeros(1, dtype=torch.int64, device=self.shape.device), cache)

    def profile_peak_memory(self, tokens: int) -> int:
        """Run the largest possible step on dummy inputs and return its peak memory, weights excluded.

        Then run smaller ones, so that all kernels are compiled before the first request.
        """
        device = self.shape.device
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        states = self.shape.states.allocate(1) if self.shape.states is not None else None
        cache = self.shape.allocate(-(-tokens // BLOCK_SIZE) + 1, states)
        self._run_dummy_step(cache, tokens, 1, 1)
        torch.cuda.synchronize(device)
        cached = cache.keys.nbytes + cache.values.nbytes
        cached += states.conv.nbytes + states.recurrent.nbytes if states is not None else 0
        peak = max(0, torch.cuda.max_memory_allocated(device) - before - cached)
        for smaller, sequences, num_logits in COMPILED_STEPS:
            if smaller < tokens:
                self._run_dummy_step(cache, smaller, sequences, num_logits)
        few = BLOCK_SIZE // 2
        if tokens > few:  # attention over keys of earlier steps has a kernel of its own
            self._run_dummy_step(cache, few, 1, 1, cached=few)
        torch.cuda.synchronize(device)
        return peak

    def _run_dummy_step(self, cache: Any, tokens: int, sequences: int, num_logits: int, cached: int = 0) -> None:
        """Run a step with decode and prefill rows that computes this many rows of logits, after `cached` tokens.

        `sequences`: at least so many share the prefill rows.
        """
        device, num_decodes = self.shape.device, DUMMY_DECODES
        longest = min(self.max_model_len, -(-tokens // sequences))
        counts = [min(longest, tokens - i) for i in range(0, tokens, longest)]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        first = np.full(len(counts), cached, dtype=np.int32)
        rows = np.arange(num_decodes + tokens, dtype=np.int32)
        slots = np.maximum(rows - num_decodes, 0)
        tables = np.zeros((num_decodes + len(counts), table_width(longest)), dtype=np.int32)
        for i, begin in enumerate(starts[:-1]):
            own = np.arange(begin // BLOCK_SIZE, (begin + counts[i] - 1) // BLOCK_SIZE + 1)
            tables[num_decodes + i, : len(own)] = own[: tables.shape[1]]
        tiles = self.decoder.ops.plan_prefill(starts.tolist(), first.tolist())
        ones = np.ones(num_decodes, dtype=np.int32)
        arrays = [rows * 0, rows * 0 - 1, slots, slots % longest, tables, tiles, starts, first, ones]
        token, source, slot, position, table, tile, start, begin, length = upload(arrays, device)
        prefill = PrefillInput(position, table[num_decodes:], tile, start, begin)
        logit_rows = torch.zeros(num_logits, dtype=torch.int64, device=device)
        rows_input = ModelInput(token, source, slot, table[:num_decodes], length, prefill, logit_rows)
        if self.shape.states is not None:
            slot_of_each = [0] * (num_decodes + len(counts))
            rows_input.states = make_state_rows(slot_of_each, first.tolist(), counts, [(0, 0)] * len(counts), device)
        self.decoder.forward(rows_input, logit_rows[:1], cache)

    def make_runner(
        self, cache: Any, sampler: Sampler, max_length: int, max_running: int, progress: CaptureProgress | None = None
    ) -> GpuModelRunner:
        """Return a model runner whose CUDA graphs are captured."""
        runner = GpuModelRunner(self.decoder, cache, sampler, max_length, max_running)
        runner.capture_cuda_graphs(progress)
        graphs = runner.cuda_graphs
        if graphs.capture_seconds:
            logger.info("captured CUDA graphs count=%d seconds=%.1f", len(graphs.sizes), graphs.capture_seconds)
        return runner
