"""What engines say of themselves, as metrics. They count for all API processes together, so nothing is added up here.

A counter begins at 0 again when its model is loaded again, which Prometheus takes for what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

from syringa.types import EngineStats

MODEL = "model_name"

Figure = Callable[[EngineStats], float]


def _cache_usage(stats: EngineStats) -> float:
    """What holds a prefix that nobody uses can be had at once, and counts as free."""
    used = stats.blocks_total - stats.blocks_free - stats.blocks_cached
    return used / stats.blocks_total if stats.blocks_total else 0.0


_GAUGES: dict[str, tuple[str, Figure]] = {
    "num_requests_running": ("Sequences that are being computed.", lambda stats: stats.running),
    "num_requests_waiting": ("Requests that wait for their first step.", lambda stats: stats.waiting),
    "queue_tenants": ("Organisations that those who wait belong to.", lambda stats: stats.queue_tenants),
    "kv_cache_usage_perc": ("The share of the cache that is in use; 1 is all of it.", _cache_usage),
}
_COUNTERS: dict[str, tuple[str, Figure]] = {
    "prompt_tokens": ("Prompt tokens that were read, from the cache or not.", lambda stats: stats.prompt_tokens),
    "generation_tokens": ("Tokens that were generated.", lambda stats: stats.output_tokens),
    "prefix_cache_queries": ("Prompt tokens that were looked for in the cache.", lambda stats: stats.prompt_tokens),
    "prefix_cache_hits": ("Prompt tokens that were found in the cache.", lambda stats: stats.cached_tokens),
    "num_preemptions": ("Sequences that gave up their place in the cache.", lambda stats: stats.preemptions),
    "queue_refused": ("Requests turned away: too many waited, or it did too long.", lambda stats: stats.refused),
}


def engine_families(prefix: str, stats: Mapping[str, EngineStats | None]) -> list[Metric]:
    """`stats` by model; None: the model is not loaded."""
    loaded = GaugeMetricFamily(f"{prefix}model_loaded", "Whether a model is loaded: 1 or 0.", labels=(MODEL,))
    for model, each in stats.items():
        loaded.add_metric((model,), each is not None)
    known = {model: each for model, each in stats.items() if each is not None}
    steps = SummaryMetricFamily(f"{prefix}step_duration_seconds", "The engine's steps.", labels=(MODEL,))
    for model, each in known.items():
        steps.add_metric((model,), count_value=each.steps, sum_value=each.step_seconds)
    families: list[Metric] = [loaded, steps]
    for kind, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, (about, figure) in figures.items():
            family = kind(prefix + name, about, labels=(MODEL,))
            for model, each in known.items():
                family.add_metric((model,), figure(each))
            families.append(family)
    return families
