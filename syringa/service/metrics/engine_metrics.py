"""Metrics of the engines. An engine serves all API processes, so nothing is added up here.

Counters restart at 0 when a model is loaded again, which Prometheus handles as a counter reset.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.utils import floatToGoString

from syringa.types import EngineStats, HistogramCounts

MODEL = "model_name"

Value = Callable[[EngineStats], float]


class EngineReport(NamedTuple):
    """What is known of a model's engine. The other figures are known also while it does not report its statistics."""

    stats: EngineStats | None = None  # None: it is not loaded or does not respond
    loaded: bool = True  # whether the model is in memory
    ready: bool = True  # False while it is loading, hangs or has failed
    hangs: int = 0  # since the server was started
    crashes: int = 0
    replicas: Mapping[str, int] = {}  # number of replicas by status


def _cache_usage(stats: EngineStats) -> float:
    """The share of blocks in use. A cached block without a user can be evicted at once, and counts as free."""
    used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    return used / stats.blocks_total if stats.blocks_total else 0.0


_GAUGES: dict[str, tuple[str, Value]] = {
    "num_requests_running": ("Running sequences.", lambda stats: stats.running),
    "num_requests_waiting": ("Requests waiting for their first step.", lambda stats: stats.waiting),
    "queue_tenants": ("Organizations with waiting requests.", lambda stats: stats.queue_tenants),
    "kv_cache_usage_perc": ("Share of the KV cache in use, from 0 to 1.", _cache_usage),
}
_WORKER_GAUGES: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "model_loaded": ("Whether a model is loaded: 1 or 0.", lambda report: report.loaded),
    "model_ready": ("0 while a model is loading, does not respond or has failed, else 1.", lambda report: report.ready),
}
_WORKER_COUNTERS: dict[str, tuple[str, Callable[[EngineReport], float]]] = {
    "worker_hangs": ("Times that a worker of the model did not respond.", lambda report: report.hangs),
    "worker_crashes": ("Times that a worker of the model died, or was killed because it hung.", lambda r: r.crashes),
}
_COUNTERS: dict[str, tuple[str, Value]] = {
    "prompt_tokens": ("Prompt tokens processed, cached ones included.", lambda stats: stats.prompt_tokens),
    "generation_tokens": ("Generated tokens.", lambda stats: stats.output_tokens),
    "prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", lambda stats: stats.cached_tokens),
    "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda stats: stats.prompt_tokens),
    "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", lambda stats: stats.cached_tokens),
    "num_preemptions": ("Preempted sequences.", lambda stats: stats.preemptions),
    "queue_refused": ("Requests refused because the queue was full or the wait too long.", lambda stats: stats.refused),
}


_BETWEEN_TOKENS = "Time between two tokens of a sequence."
_HISTOGRAMS: dict[str, tuple[str, Callable[[EngineStats], HistogramCounts]]] = {
    "iteration_tokens_total": ("Tokens that an engine step computes.", lambda stats: stats.step_tokens),
    "inter_token_latency_seconds": (_BETWEEN_TOKENS, lambda stats: stats.token_gaps),
    "time_per_output_token_seconds": (_BETWEEN_TOKENS, lambda stats: stats.token_gaps),  # the name of older vLLM
}
# vLLM's reasons: `capacity`, and `deferred` by something else.
_WAITING_REASONS: dict[str, Value] = {
    "capacity": lambda stats: stats.waiting - stats.preparing,
    "deferred": lambda stats: stats.preparing,
}


def engine_families(prefix: str, reports: Mapping[str, EngineReport]) -> list[Metric]:
    """Return the metrics of all engines, by model."""
    families: list[Metric] = []
    for kind, figures in ((GaugeMetricFamily, _WORKER_GAUGES), (CounterMetricFamily, _WORKER_COUNTERS)):
        for name, (about, figure) in figures.items():
            family = kind(prefix + name, about, labels=(MODEL,))
            for model, report in reports.items():
                family.add_metric((model,), figure(report))
            families.append(family)
    families.append(_replicas(prefix, reports))
    known = {model: report.stats for model, report in reports.items() if report.stats is not None}
    steps = SummaryMetricFamily(f"{prefix}step_duration_seconds", "Duration of engine steps.", labels=(MODEL,))
    for model, each in known.items():
        steps.add_metric((model,), count_value=each.steps, sum_value=each.step_seconds)
    families.append(steps)
    for kind, values in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (about, value) in values.items():
            family = kind(prefix + name, about, labels=(MODEL,))
            for model, each in known.items():
                family.add_metric((model,), value(each))
            families.append(family)
    return [
        *families,
        *_histograms(prefix, known),
        _waiting_by_reason(prefix, known),
        _cache_config(prefix, known),
    ]


def _replicas(prefix: str, reports: Mapping[str, EngineReport]) -> Metric:
    family = GaugeMetricFamily(f"{prefix}replicas", "Replicas of a model by status.", labels=(MODEL, "status"))
    for model, report in reports.items():
        for status, count in report.replicas.items():
            family.add_metric((model, status), count)
    return family


def _histograms(prefix: str, known: Mapping[str, EngineStats]) -> Iterator[Metric]:
    for name, (about, read) in _HISTOGRAMS.items():
        family = HistogramMetricFamily(prefix + name, about, labels=(MODEL,))
        for model, stats in known.items():
            found = read(stats)
            bounds = [*map(floatToGoString, found.bounds), "+Inf"]
            family.add_metric(
                (model,), list(zip(bounds, itertools.accumulate(found.counts), strict=True)), sum_value=found.sum
            )
        yield family


def _waiting_by_reason(prefix: str, known: Mapping[str, EngineStats]) -> Metric:
    family = GaugeMetricFamily(
        f"{prefix}num_requests_waiting_by_reason",
        "Requests waiting for capacity, or until their grammar or images are prepared (deferred).",
        labels=(MODEL, "reason"),
    )
    for model, stats in known.items():
        for reason, value in _WAITING_REASONS.items():
            family.add_metric((model, reason), value(stats))
    return family


def _cache_config(prefix: str, known: Mapping[str, EngineStats]) -> Metric:
    """Return the size of the KV cache as labels, with the names of vLLM's configuration."""
    names = (
        *("block_size", "num_gpu_blocks", "enable_prefix_caching", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
        MODEL,
    )
    family = GaugeMetricFamily(
        f"{prefix}cache_config_info", "The configuration of the KV cache; always 1.", labels=names
    )
    for model, stats in known.items():
        tokens = stats.blocks_total * stats.block_size
        concurrency = tokens / stats.max_length if stats.max_length else 0.0
        values = (stats.block_size, stats.blocks_total, stats.prefix_caching, tokens, round(concurrency, 2))
        family.add_metric((*map(str, values), model), 1)
    return family
