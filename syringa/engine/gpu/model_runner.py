"""Runs plans on the device: lays them out, starts them, and lets the tokens come home.

The draws of a step lie in a buffer on the device, a row for each. The next step reads them there, so it can be started
before the host has seen them. Whatever needs the host's memory of a choice (penalties, grammars, log-probabilities) is
drawn by the sampler, from the logits that the step leaves.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from syringa.engine.execution.overlap import Layout
from syringa.engine.gpu.cache import GpuCache
from syringa.engine.gpu.decoder import DeviceModel, Later, Rows
from syringa.engine.gpu.graphs import Progress, StepGraphs, bucket_sizes
from syringa.engine.gpu.images import send_pictures
from syringa.engine.gpu.input_batch import Lanes, table_width
from syringa.engine.gpu.transfer import Homeward, upload, views
from syringa.engine.sampling.sampler import PendingTokens, SampledTokens, Sampler, SamplingRow
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.vision.layout import Laid, place

MOST_DRAWS = 1024  # at the least: a request's choices may be more than the sequences that run together

# A row's draw, and a row of a step that adds one token: in this order, each an array.
DRAW_KINDS: list[type[np.generic]] = [np.float32, np.int64, np.int32, np.int32]  # temperature, seed, choice, position
RULE_KINDS: list[type[np.generic]] = [np.int32, np.float64, np.float32]  # top-k, top-p, min-p
ROW_KINDS: list[type[np.generic]] = [np.int32] * 5  # token, source, slot, length, shift


@dataclass
class Running:
    """A step under way. `logits`: of its draws, or of all that was wanted where prompts are scored."""

    draws: int
    logits: torch.Tensor
    homeward: Homeward
    places: torch.Tensor | None = None  # the draws' rows among the logits; None: one after the other
    tokens: torch.Tensor | None = None  # on the host, once they are home
    later: list[tuple[list[int], PendingTokens]] = field(default_factory=list)


class GpuRunner:
    def __init__(
        self, model: DeviceModel, cache: GpuCache, sampler: Sampler, max_length: int, max_running: int
    ) -> None:
        self.model, self.cache, self.sampler = model, cache, sampler
        self.device = model.device
        self.lanes = Lanes(max_length)
        rows = max(max_running, MOST_DRAWS)
        self.drawn = torch.zeros(rows, dtype=torch.int64, device=self.device)
        recorded = bucket_sizes(max_running) if model.recordable else []
        widest = max(recorded, default=1)
        self._logits = torch.zeros(widest, model.vocabulary, dtype=torch.float32, device=self.device)
        self._tables = torch.zeros(max_running, self.lanes.tables.shape[1], dtype=torch.int32, device=self.device)
        self._inputs = torch.zeros(64 * (max_running + 4), dtype=torch.uint8, device=self.device)
        self.graphs = StepGraphs(recorded, self._step, self.device)

    def capture(self, progress: Progress | None = None) -> None:
        """Records the steps that will be replayed, and compiles what runs beside them."""
        self.graphs.capture(progress)
        if self.device.type == "cuda":
            fields, rules, _ = self._views(1, 1)
            self.model.ops.begin(1, False)
            self.model.ops.sample(self._logits[:1], fields, (), self.drawn[:1])
            self.model.ops.sample(self._logits[:1], fields, rules, self.drawn[:1])

    def record(self, size: int) -> None:
        """One of them anew: something that it was made with has changed."""
        drawn = self.drawn.clone()
        self._inputs.zero_()  # rows that do nothing: what a step of another size has left would be read as anything
        self.graphs.record(size)
        self.drawn.copy_(drawn)

    def start(self, layout: Layout) -> Running:
        """Computes the plan's tokens, and draws for every row as if it needed nothing of the host."""
        with torch.inference_mode():
            size = self.graphs.size_for(len(layout.items)) if layout.adds_one_each else None
            return self._run_graph(layout, size) if size is not None else self._run_rows(layout)

    def draw(self, running: Running, at: list[int], rows: Seq[SamplingRow], masks: torch.Tensor | None) -> None:
        """Draws again for the rows `at`, by all the rules."""
        with torch.inference_mode():
            index = torch.tensor(at).to(self.device, non_blocking=True)
            places = index if running.places is None else running.places[index]
            pending = self.sampler.launch(running.logits[places], rows, masks)
            self.drawn[index] = pending.tokens
            running.later.append((at, pending.bring(running.homeward.bring)))

    def send(self, running: Running) -> None:
        """Every draw is made: the tokens may come home."""
        running.tokens = running.homeward.bring(self.drawn[: running.draws])
        running.homeward.depart()

    def read(self, running: Running) -> SampledTokens:
        """Waits for the tokens of this step, not for those of a later one."""
        running.homeward.wait()
        assert running.tokens is not None
        tokens: list[int] = running.tokens.tolist()
        drawn = SampledTokens(tokens, [None] * len(tokens))
        for at, pending in running.later:
            for row, score in zip(at, pending.read().logprobs, strict=True):
                drawn.logprobs[row] = score
        return drawn

    def forget(self, sequence: Sequence) -> None:
        self.lanes.forget(sequence)

    # One token each

    def _run_graph(self, layout: Layout, size: int) -> Running:
        items, count = layout.items, len(layout.items)
        lanes = self.lanes.place(items)
        starts = np.array([item.start for item in items], dtype=np.int32)
        tables = self.lanes.tables[lanes, : int(starts.max()) // BLOCK_SIZE + 1]
        slots = tables[np.arange(count), starts // BLOCK_SIZE] * BLOCK_SIZE + starts % BLOCK_SIZE
        columns = [*self._draw_columns(layout.draws, lanes), layout.tokens(), layout.sources, slots, starts + 1]
        columns.append(self.lanes.shifts[lanes])
        fills = [0, 0, 0, 0, 0, 1, 0, 0, -1, -1, 0, 0]  # a row that does nothing
        packed = []
        for column, kind, fill in zip(columns, DRAW_KINDS + RULE_KINDS + ROW_KINDS, fills, strict=True):
            whole = np.full(size, fill, dtype=kind)
            whole[:count] = column
            packed.append(whole)
        upload(packed, self.device, self._inputs)
        (wide,) = upload([np.ascontiguousarray(tables)], self.device)
        self._tables[:count, : tables.shape[1]] = wide
        self.graphs.run(size)
        logits = self._logits[:count]
        if any(sequence.state.filtered for sequence in layout.draws):
            fields, rules, _ = self._views(count, size)
            self.model.ops.begin(count, False)
            self.model.ops.sample(logits, fields, rules, self.drawn[:count])
        return Running(count, logits, Homeward(self.device))

    def _views(self, count: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """Where a step of this size has its draws' fields, their rules, and its rows."""
        kinds = [((size,), np.dtype(kind)) for kind in DRAW_KINDS + RULE_KINDS + ROW_KINDS]
        found = [view[:count] for view in views(self._inputs, kinds)]
        return found[:4], found[4:7], found[7:]

    def _step(self, size: int) -> None:
        fields, _, (tokens, sources, slots, lengths, shifts) = self._views(size, size)
        rows = Rows(tokens, sources, slots, self._tables[:size], lengths, shifts=shifts)
        logits = self.model.forward(rows, self.drawn, self.cache, self._logits[:size])
        self.model.ops.sample(logits, fields, (), self.drawn[:size])

    # Any rows

    def _run_rows(self, layout: Layout) -> Running:
        rows, places, (fields, rules) = self._lay_out(layout)
        logits = self.model.forward(rows, self.drawn, self.cache)
        running = Running(len(layout.draws), logits, Homeward(self.device), places)
        if layout.draws:
            chosen = logits if places is None else logits.index_select(0, places)
            filtered = any(sequence.state.filtered for sequence in layout.draws)
            self.model.ops.sample(chosen, fields, rules if filtered else (), self.drawn[: len(chosen)])
        return running

    def _lay_out(
        self, layout: Layout
    ) -> tuple[Rows, torch.Tensor | None, tuple[list[torch.Tensor], list[torch.Tensor]]]:
        items = layout.items
        leading = next((i for i, item in enumerate(items) if item.count > 1), len(items))
        lanes = self.lanes.place(items)
        starts = np.array([item.start for item in items], dtype=np.int32)
        counts = np.array([item.count for item in items], dtype=np.int32)
        tables = self.lanes.tables[lanes, : table_width(int((starts + counts).max()))]
        begins = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        owner = np.repeat(np.arange(len(items)), counts)
        positions = np.arange(len(owner), dtype=np.int32) - begins[owner] + starts[owner]
        slots = tables[owner, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        sources = np.full(len(owner), -1, dtype=np.int32)
        sources[begins[:-1]] = layout.sources
        later = (begins[leading:] - begins[leading]).astype(np.int32)
        tiles = self.model.ops.tiles(later.tolist(), starts[leading:].tolist())
        draws = self.lanes.of(layout.draws)
        arrays = [
            np.array(layout.tokens(), dtype=np.int32),
            sources,
            slots.astype(np.int32),
            np.ascontiguousarray(tables),
            starts[:leading] + 1,
            positions,
            tiles,
            later,
            starts[leading:],
            np.array(layout.wanted or [0], dtype=np.int64),  # of no rows at all, kernels would read what is not there
            np.array(layout.places, dtype=np.int64),
        ]
        kinds = DRAW_KINDS + RULE_KINDS
        arrays += [
            np.asarray(c).astype(kind) for c, kind in zip(self._draw_columns(layout.draws, draws), kinds, strict=True)
        ]
        sent = upload(arrays, self.device)
        token, source, slot, table, length, position, tile, later_starts, first, wanted, places = sent[:11]
        rest = Later(position, table[leading:], tile, later_starts, first) if leading < len(items) else None
        pictures = send_pictures(place(items, Laid(torch.from_numpy(positions), table)), self.device)
        rows = Rows(token, source, slot, table[:leading], length, rest, wanted, pictures)
        straight = layout.places == list(range(len(layout.wanted)))
        return rows, None if straight else places, (sent[11:15], sent[15:18])

    def _draw_columns(self, draws: Seq[Sequence], lanes: np.ndarray) -> list[np.ndarray]:
        held = self.lanes
        positions = np.array([sequence.generated for sequence in draws], dtype=np.int32)
        return [
            held.temperatures[lanes],
            held.seeds[lanes],
            held.choices[lanes],
            positions,
            held.top_k[lanes],
            held.top_p[lanes],
            held.min_p[lanes],
        ]
