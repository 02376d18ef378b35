"""What an engine counts of itself, from its start on."""

from __future__ import annotations

import time
from collections import Counter

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.pending import Arrivals
from syringa.engine.scheduling.scheduler import Scheduler
from syringa.engine.scheduling.scheduler_output import Plan
from syringa.engine.scheduling.sequence import Sequence
from syringa.types import EngineStats


class Tally:
    def __init__(self) -> None:
        self.steps = 0
        self.step_seconds = 0.0
        self.queue_seconds = 0.0
        self.counts: Counter[str] = Counter()  # the counters of `EngineStats` that have no line of their own
        self.active = time.perf_counter()  # when something last came or was computed

    def begin(self, plan: Plan, now: float) -> None:
        """A step begins: how long did those wait that it is the first for?"""
        for sequence in plan.begun:
            sequence.queued = now - sequence.submitted
            self.queue_seconds += sequence.queued
            self.counts["started"] += 1

    def end(self, started: float) -> None:
        self.active = time.perf_counter()
        self.steps += 1
        self.step_seconds += self.active - started

    def answer(self, sequence: Sequence) -> None:
        """A sequence's first token is told."""
        if not sequence.started:
            sequence.started = True
            if sequence.choice == 0:
                self.counts["prompt_tokens"] += sequence.prompt_length
                self.counts["cached_tokens"] += sequence.cached

    def stats(self, scheduler: Scheduler, arrivals: Arrivals, *, busy: bool) -> EngineStats:
        pool, waiting = scheduler.pool, scheduler.waiting
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(waiting) + len(arrivals),
            queue_tenants=len(waiting.tenants | arrivals.tenants),
            idle_seconds=0.0 if busy or len(arrivals) else time.perf_counter() - self.active,
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
