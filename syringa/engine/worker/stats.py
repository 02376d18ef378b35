"""Counters of an engine since its start."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.pending import PendingRequests
from syringa.engine.scheduling.scheduler import Scheduler
from syringa.engine.scheduling.scheduler_output import SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence, StepTime
from syringa.types import EngineStats, HistogramCounts

# The buckets of vLLM, and finer ones for short times.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TOKEN_GAPS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def counts(self) -> HistogramCounts:
        return HistogramCounts(self._bounds, tuple(self._counts), self._sum)


class EngineCounters:
    def __init__(self) -> None:
        self.step_tokens, self.token_gaps = Histogram(STEP_TOKENS), Histogram(TOKEN_GAPS)
        self._step = StepTime()
        # Tokens of the current step, by the step of the token before.
        self._preceding: defaultdict[StepTime, int] = defaultdict(int)
        self.steps = 0
        self.step_seconds = 0.0
        self.queue_seconds = 0.0
        self.counts: Counter[str] = Counter()  # the other counters of `EngineStats`, by field name
        self.last_active = time.perf_counter()  # of the last submitted request or step

    def record_first_steps(self, output: SchedulerOutput, now: float) -> None:
        """Record the queue time of the sequences whose first step this is."""
        for sequence in output.begun:
            sequence.queue_seconds = now - sequence.submitted
            self.queue_seconds += sequence.queue_seconds
            self.counts["started"] += 1

    def record_step(self, started: float, tokens: int) -> None:
        """Record a step that has ended, and that has computed so many tokens."""
        now = self.last_active = self._step.ended_at = time.perf_counter()
        self.steps += 1
        self.step_seconds += now - started
        if tokens:
            self.step_tokens.observe(tokens)
        for step, count in self._preceding.items():  # mostly one: the step before
            self.token_gaps.observe(now - step.ended_at, count)
        self._preceding.clear()
        self._step = StepTime()

    def record_delta(self, sequence: Sequence) -> None:
        """Record the step of a token, and with the first delta of a sequence its prompt tokens.

        The prompt of a resumed request was counted by the worker that began it.
        """
        step, sequence.last_step = sequence.last_step, self._step
        if step is not None:
            self._preceding[step] += 1
        elif sequence.choice == 0 and not sequence.request.resumed:
            self.counts["prompt_tokens"] += sequence.prompt_length
            self.counts["cached_tokens"] += sequence.cached

    def stats(self, scheduler: Scheduler, pending: PendingRequests, *, busy: bool, max_length: int) -> EngineStats:
        pool, waiting, isolation = scheduler.pool, scheduler.waiting, scheduler.isolation
        states = scheduler.states.pool if scheduler.states is not None else None
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(waiting) + len(isolation) + len(pending),
            preparing=len(pending),
            queue_tenants=len(waiting.tenants | isolation.tenants | pending.tenants),
            idle_seconds=0.0 if busy or len(pending) else time.perf_counter() - self.last_active,
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_cached=pool.cached,
            state_slots=states.total if states else 0,
            state_slots_free=states.free if states else 0,
            state_snapshots=states.snapshots if states else 0,
            block_size=BLOCK_SIZE,
            prefix_caching=pool.caching,
            max_length=max_length,
            preemptions=scheduler.preemptions,
            steps=self.steps,
            step_seconds=self.step_seconds,
            step_tokens=self.step_tokens.counts,
            token_gaps=self.token_gaps.counts,
            queue_seconds=self.queue_seconds,
            **self.counts,
        )
