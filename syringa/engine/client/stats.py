"""The statistics of a model: those of its replicas, added up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from syringa.types import EngineStats, HistogramCounts

_SHORTEST = ("idle_seconds", "max_length")
_EQUAL = ("block_size", "prefix_caching")  # the same in all replicas
_HISTOGRAMS = ("step_tokens", "token_gaps")


def merge_stats(replicas: Sequence[EngineStats]) -> EngineStats:
    """Return the statistics of all replicas together, of which there is at least one."""
    first, *others = replicas
    if not others:
        return first
    merged = {}
    for name in first.__struct_fields__:
        values = [getattr(each, name) for each in replicas]
        if name in _HISTOGRAMS:
            merged[name] = _add(values)
        elif name not in _EQUAL:
            merged[name] = min(values) if name in _SHORTEST else sum(values)
    return msgspec.structs.replace(first, **merged)


def _add(histograms: Sequence[HistogramCounts]) -> HistogramCounts:
    counted = [each for each in histograms if each.bounds]
    if not counted:
        return HistogramCounts()
    counts = tuple(map(sum, zip(*(each.counts for each in counted), strict=True)))
    return HistogramCounts(counted[0].bounds, counts, sum(each.sum for each in counted))
