"""Counters of an engine since its start."""

from __future__ import annotations

import time
from collections import Counter

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.pending import PendingRequests
from syringa.engine.scheduling.scheduler import Scheduler
from syringa.engine.scheduling.scheduler_output import SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence
from syringa.types import EngineStats


class EngineCounters:
    def __init__(self) -> None:
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

    def record_step(self, started: float) -> None:
        self.last_active = time.perf_counter()
        self.steps += 1
        self.step_seconds += self.last_active - started

    def record_delta(self, sequence: Sequence) -> None:
        """Record the prompt tokens of a sequence with its first delta."""
        if not sequence.delta_sent:
            sequence.delta_sent = True
            if sequence.choice == 0:
                self.counts["prompt_tokens"] += sequence.prompt_length
                self.counts["cached_tokens"] += sequence.cached

    def stats(self, scheduler: Scheduler, pending: PendingRequests, *, busy: bool) -> EngineStats:
        pool, waiting, isolation = scheduler.pool, scheduler.waiting, scheduler.isolation
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(waiting) + len(isolation) + len(pending),
            queue_tenants=len(waiting.tenants | isolation.tenants | pending.tenants),
            idle_seconds=0.0 if busy or len(pending) else time.perf_counter() - self.last_active,
            blocks_total=pool.total,
            blocks_free=pool.free,
            blocks_cached=pool.cached,
            block_size=BLOCK_SIZE,
            preemptions=scheduler.preemptions,
            steps=self.steps,
            step_seconds=self.step_seconds,
            queue_seconds=self.queue_seconds,
            **self.counts,
        )
