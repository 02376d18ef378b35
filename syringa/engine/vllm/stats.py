"""Statistics of an engine on vLLM: what vLLM reports with each step, and what the worker counts itself."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from syringa.engine.worker.stats import STEP_TOKENS, TOKEN_GAPS, Histogram
from syringa.types import EngineDelta, EngineRequest, EngineStats


class VllmCounters:
    """`record_step` is called in vLLM's thread, everything else in that of the server; numbers are replaced, not
    changed in place, where both see them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # the counters of `EngineStats` that the worker counts, by field name
        self.queue_seconds = 0.0
        self.last_active = time.perf_counter()
        self.waiting = 0  # requests that vLLM has not scheduled, after its last step
        self.steps = 0
        self._step_tokens, self._token_gaps = Histogram(STEP_TOKENS), Histogram(TOKEN_GAPS)
        self._preemptions, self._step_seconds, self._usage = 0, 0.0, 0.0

    def record_step(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Record a step by vLLM's `SchedulerStats` and `IterationStats`; either may be None."""
        now = time.perf_counter()
        if scheduler_stats is not None:
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self._usage = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.steps += 1
            self._step_seconds += max(0.0, now - self.last_active)
            self._preemptions += iteration_stats.num_preempted_reqs
            computed = iteration_stats.num_generation_tokens + iteration_stats.prompt_token_stats.computed
            if computed:
                self._step_tokens.observe(computed)
            for gap in iteration_stats.inter_token_latencies_iter:
                self._token_gaps.observe(gap)
        self.last_active = now

    def record_delta(self, request: EngineRequest, delta: EngineDelta, *, first: bool) -> None:
        self.counts["output_tokens"] += len(delta.tokens)
        if first and delta.finish != "error" and delta.choice == 0 and not request.resumed:  # once for a request
            self.counts["started"] += 1
            self.counts["prompt_tokens"] += len(request.prompt)
            self.counts["cached_tokens"] += delta.cached_tokens
            self.queue_seconds += delta.queued_ms / 1000

    def stats(
        self,
        *,
        active: int,
        waiting: int,
        behind: int,
        tenants: int,
        blocks: int,
        block_size: int,
        prefix_caching: bool,
        length: int,
    ) -> EngineStats:
        """`active`: choices that have not ended, of which so many wait, and so many background ones behind them.

        `tenants`: of those that wait.
        """
        used = min(blocks, round(self._usage * blocks)) if active else 0
        return EngineStats(
            running=active - waiting - behind,
            waiting=waiting,
            queue_tenants=tenants,
            idle_seconds=0.0 if active else time.perf_counter() - self.last_active,
            blocks_total=blocks,
            blocks_free=blocks - used,
            block_size=block_size,
            prefix_caching=prefix_caching,
            max_length=length,
            preemptions=self._preemptions,
            steps=self.steps,
            step_seconds=self._step_seconds,
            step_tokens=self._step_tokens.counts,
            token_gaps=self._token_gaps.counts,
            queue_seconds=self.queue_seconds,
            **self.counts,
        )
