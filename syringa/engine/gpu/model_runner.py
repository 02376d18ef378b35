"""Run scheduled steps on the device: prepare inputs, launch the forward pass and sampling, copy tokens to the host.

Sampled tokens stay in a device buffer, one row per sampling sequence, from which the next step reads them: it can be
launched before the host has seen them. Sequences that need host state (penalties, grammars, log-probabilities) are
sampled again by the sampler, from the logits of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from syringa.engine.execution.overlap import StepInput
from syringa.engine.gpu.cache import GpuCache
from syringa.engine.gpu.cuda_graphs import CaptureProgress, CudaGraphRunner, graph_batch_sizes
from syringa.engine.gpu.decoder import GpuDecoderInterface, ModelInput, PrefillInput
from syringa.engine.gpu.input_batch import InputBatch, table_width
from syringa.engine.gpu.state_rows import StateRows, upload_states
from syringa.engine.gpu.transfer import HostCopy, copy_images_to_device, packed_views, upload
from syringa.engine.sampling.sampler import PendingTokens, SampledTokens, Sampler
from syringa.engine.sampling.sampler_input import SamplingRow
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.vision.step_images import RowPositions, locate_images

MIN_SAMPLED_TOKENS = 1024  # rows of the token buffer at least: one request may have more choices than `max_running`

# Columns of the packed inputs of a decode step, one array each, in this order.
SAMPLING_DTYPES: list[type[np.generic]] = [
    np.float32,
    np.int64,
    np.int32,
    np.int32,
]  # temperature, seed, choice, position
FILTER_DTYPES: list[type[np.generic]] = [np.int32, np.float64, np.float32]  # top-k, top-p, min-p
# Token, source, slot, length, position delta, slot of the state.
ROW_DTYPES: list[type[np.generic]] = [np.int32] * 6


@dataclass
class AsyncStepOutput:
    """A step running on the device.

    `logits` has the rows to sample from, and those of prompts whose log-probabilities are requested.
    """

    num_sampled: int
    logits: torch.Tensor
    host_copy: HostCopy
    sample_rows: torch.Tensor | None = None  # logits row of each sampled token; None: in order
    tokens: torch.Tensor | None = None  # on the host, valid after `host_copy.synchronize()`
    deferred: list[tuple[list[int], PendingTokens]] = field(default_factory=list)


class GpuModelRunner:
    """The model runner of a GPU: replays CUDA graphs for decode-only steps, runs all other steps eagerly."""

    def __init__(
        self, model: GpuDecoderInterface, cache: GpuCache, sampler: Sampler, max_length: int, max_running: int
    ) -> None:
        self.model, self.cache, self.sampler = model, cache, sampler
        self.device = model.device
        self.input_batch = InputBatch(max_length)
        rows = max(max_running, MIN_SAMPLED_TOKENS)
        self.sampled_tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)
        graph_sizes = graph_batch_sizes(max_running) if model.supports_cuda_graphs else []
        max_size = max(graph_sizes, default=1)
        self._graph_logits = torch.zeros(max_size, model.vocabulary, dtype=torch.float32, device=self.device)
        self._graph_tables = torch.zeros(
            max_running, self.input_batch.tables.shape[1], dtype=torch.int32, device=self.device
        )
        self._graph_inputs = torch.zeros(64 * (max_running + 4), dtype=torch.uint8, device=self.device)
        self.cuda_graphs = CudaGraphRunner(graph_sizes, self._graph_body, self.device)

    def capture_cuda_graphs(self, progress: CaptureProgress | None = None) -> None:
        """Capture a CUDA graph per batch size, and compile the sampling kernels that run outside of them."""
        self.cuda_graphs.capture_all(progress)
        if self.device.type == "cuda":
            sampling, filters, _ = self._graph_views(1, 1)
            self.model.ops.begin_step(1, False)
            self.model.ops.sample(self._graph_logits[:1], sampling, (), self.sampled_tokens[:1])
            self.model.ops.sample(self._graph_logits[:1], sampling, filters, self.sampled_tokens[:1])

    def recapture_cuda_graph(self, size: int) -> None:
        """Capture the graph of one batch size again, after a setting that it was captured with has changed."""
        sampled = self.sampled_tokens.clone()
        self._graph_inputs.zero_()  # leftovers of a step of another size are no valid inputs
        self.cuda_graphs.capture(size)
        self.sampled_tokens.copy_(sampled)

    def start(self, step: StepInput) -> AsyncStepOutput:
        """Launch a step and sample every row on the device, ignoring rules that need host state."""
        with torch.inference_mode():
            size = self.cuda_graphs.size_for(len(step.scheduled)) if step.decode_only else None
            return self._replay_cuda_graph(step, size) if size is not None else self._run_eager(step)

    def resample(
        self, handle: AsyncStepOutput, at: list[int], rows: Seq[SamplingRow], masks: torch.Tensor | None
    ) -> None:
        """Sample the rows `at` again, with every sampling rule and token masks."""
        with torch.inference_mode():
            index = torch.tensor(at).to(self.device, non_blocking=True)
            sample_rows = index if handle.sample_rows is None else handle.sample_rows[index]
            pending = self.sampler.launch(handle.logits[sample_rows], rows, masks)
            self.sampled_tokens[index] = pending.tokens
            handle.deferred.append((at, pending.copy_to_host(handle.host_copy.copy)))

    def copy_tokens_to_host(self, handle: AsyncStepOutput) -> None:
        """Copy the sampled tokens to the host asynchronously. Call it after the last `resample` of the step."""
        handle.tokens = handle.host_copy.copy(self.sampled_tokens[: handle.num_sampled])
        handle.host_copy.record()

    def read_tokens(self, handle: AsyncStepOutput) -> SampledTokens:
        """Wait for the tokens of this step, not for steps launched after it."""
        handle.host_copy.synchronize()
        assert handle.tokens is not None
        tokens: list[int] = handle.tokens.tolist()
        sampled = SampledTokens(tokens, [None] * len(tokens))
        for at, pending in handle.deferred:
            for row, score in zip(at, pending.read().logprobs, strict=True):
                sampled.logprobs[row] = score
        return sampled

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a finished or preempted sequence."""
        self.input_batch.remove(sequence)

    # Decode-only steps: CUDA graphs

    def _replay_cuda_graph(self, step: StepInput, size: int) -> AsyncStepOutput:
        items, count = step.scheduled, len(step.scheduled)
        indices = self.input_batch.update(items)
        starts = np.array([item.start for item in items], dtype=np.int32)
        tables = self.input_batch.tables[indices, : int(starts.max()) // BLOCK_SIZE + 1]
        slots = tables[np.arange(count), starts // BLOCK_SIZE] * BLOCK_SIZE + starts % BLOCK_SIZE
        columns = [*self._sampling_columns(step.sampled, indices), step.tokens(), step.token_sources, slots, starts + 1]
        columns.append(self.input_batch.position_deltas[indices])
        columns.append([item.sequence.state_slot for item in items] if self.cache.states is not None else [-1] * count)
        fills = [0, 0, 0, 0, 0, 1, 0, 0, -1, -1, 0, 0, -1]  # a padding row: no cache slot, length 0
        packed = []
        for column, dtype, fill in zip(columns, SAMPLING_DTYPES + FILTER_DTYPES + ROW_DTYPES, fills, strict=True):
            padded = np.full(size, fill, dtype=dtype)
            padded[:count] = column
            packed.append(padded)
        upload(packed, self.device, self._graph_inputs)
        (step_tables,) = upload([np.ascontiguousarray(tables)], self.device)
        self._graph_tables[:count, : tables.shape[1]] = step_tables
        self.cuda_graphs.run(size)
        logits = self._graph_logits[:count]
        if any(sequence.state.filtered for sequence in step.sampled):
            sampling, filters, _ = self._graph_views(count, size)
            self.model.ops.begin_step(count, False)
            self.model.ops.sample(logits, sampling, filters, self.sampled_tokens[:count])
        return AsyncStepOutput(count, logits, HostCopy(self.device))

    def _graph_views(self, count: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Return the sampling parameters, filters and rows of the packed inputs, as views of the graph's buffer."""
        dtypes = [((size,), np.dtype(dtype)) for dtype in SAMPLING_DTYPES + FILTER_DTYPES + ROW_DTYPES]
        views = [view[:count] for view in packed_views(self._graph_inputs, dtypes)]
        return views[:4], views[4:7], views[7:]

    def _graph_body(self, size: int) -> None:
        """The decode step that a CUDA graph records: forward pass and unfiltered sampling, at fixed addresses."""
        sampling, _, (tokens, sources, slots, lengths, deltas, state_slots) = self._graph_views(size, size)
        tables, states = self._graph_tables[:size], StateRows(state_slots)
        rows = ModelInput(tokens, sources, slots, tables, lengths, position_deltas=deltas, states=states)
        logits = self.model.forward(rows, self.sampled_tokens, self.cache, self._graph_logits[:size])
        self.model.ops.sample(logits, sampling, (), self.sampled_tokens[:size])

    # All other steps: eager

    def _run_eager(self, step: StepInput) -> AsyncStepOutput:
        rows, sample_rows, (sampling, filters) = self._prepare_inputs(step)
        logits = self.model.forward(rows, self.sampled_tokens, self.cache)
        handle = AsyncStepOutput(len(step.sampled), logits, HostCopy(self.device), sample_rows)
        if step.sampled:
            sample_logits = logits if sample_rows is None else logits.index_select(0, sample_rows)
            filtered = any(sequence.state.filtered for sequence in step.sampled)
            self.model.ops.sample(
                sample_logits, sampling, filters if filtered else (), self.sampled_tokens[: len(sample_logits)]
            )
        return handle

    def _prepare_inputs(
        self, step: StepInput
    ) -> tuple[ModelInput, torch.Tensor | None, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        """Return the model input, the logits row of each sampled token (None: in order), and the sampling inputs."""
        items = step.scheduled
        num_decodes = next((i for i, item in enumerate(items) if item.count > 1), len(items))
        indices = self.input_batch.update(items)
        starts = np.array([item.start for item in items], dtype=np.int32)
        counts = np.array([item.count for item in items], dtype=np.int32)
        tables = self.input_batch.tables[indices, : table_width(int((starts + counts).max()))]
        row_starts = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        owner = np.repeat(np.arange(len(items)), counts)
        positions = np.arange(len(owner), dtype=np.int32) - row_starts[owner] + starts[owner]
        slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        sources = np.full(len(owner), -1, dtype=np.int32)
        sources[row_starts[:-1]] = step.token_sources
        prefill_starts = (row_starts[num_decodes:] - row_starts[num_decodes]).astype(np.int32)
        tiles = self.model.ops.plan_prefill(prefill_starts.tolist(), starts[num_decodes:].tolist())
        sampled_indices = self.input_batch.indices_of(step.sampled)
        arrays = [
            np.array(step.tokens(), dtype=np.int32),
            sources,
            slots.astype(np.int32),
            np.ascontiguousarray(tables),
            starts[:num_decodes] + 1,
            positions,
            tiles,
            prefill_starts,
            starts[num_decodes:],
            np.array(step.logit_rows or [0], dtype=np.int64),  # kernels need at least one row
            np.array(step.sample_rows, dtype=np.int64),
        ]
        dtypes = SAMPLING_DTYPES + FILTER_DTYPES
        arrays += [
            np.asarray(column).astype(dtype)
            for column, dtype in zip(self._sampling_columns(step.sampled, sampled_indices), dtypes, strict=True)
        ]
        tensors = upload(arrays, self.device)
        token, source, slot, table, length, position, tile, row_start, first_position, logit_rows, sample_rows = (
            tensors[:11]
        )
        prefill = (
            PrefillInput(position, table[num_decodes:], tile, row_start, first_position)
            if num_decodes < len(items)
            else None
        )
        images = copy_images_to_device(
            locate_images(items, RowPositions(torch.from_numpy(positions), table)), self.device
        )
        rows = ModelInput(token, source, slot, table[:num_decodes], length, prefill, logit_rows, images)
        if self.cache.states is not None:
            rows.states = upload_states(items, num_decodes, self.device)
        in_order = step.sample_rows == list(range(len(step.logit_rows)))
        return rows, None if in_order else sample_rows, (tensors[11:15], tensors[15:18])

    def _sampling_columns(self, sampled: Seq[Sequence], indices: np.ndarray) -> list[np.ndarray]:
        batch = self.input_batch
        positions = np.array([sequence.generated for sequence in sampled], dtype=np.int32)
        return [
            batch.temperatures[indices],
            batch.seeds[indices],
            batch.choices[indices],
            positions,
            batch.top_k[indices],
            batch.top_p[indices],
            batch.min_p[indices],
        ]
