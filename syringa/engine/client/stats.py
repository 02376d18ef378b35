"""The statistics of a model: those of its replicas, added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from syringa.types import EngineStats, HistogramCounts

MAX_ENDED = 256  # replicas whose return would be noticed: those of a node that could not be reached for a while

_SHORTEST = ("idle_seconds", "max_length")
_EQUAL = ("block_size", "prefix_caching")  # the same in all replicas
_HISTOGRAMS = ("step_tokens", "token_gaps")
_COUNTERS = (
    "preemptions", "steps", "step_seconds", "prompt_tokens", "cached_tokens", "output_tokens", "started",
    "queue_seconds", "refused", *_HISTOGRAMS,
)  # fmt: skip


class ReplicaStats:
    """The statistics of a model over time. No counter falls when a replica ends or does not respond."""

    def __init__(self) -> None:
        self._last: dict[str, EngineStats] = {}  # of the replicas that have not ended
        self._ended: dict[str, EngineStats] = {}  # of those that have, the oldest first
        self._forgotten = EngineStats()  # counters of those that ended before these

    def update(self, found: Mapping[str, EngineStats]) -> EngineStats:
        """Return the statistics of these replicas together, of which there is at least one, with the counters of all.

        Of a replica that is not among them, the counters are those that were seen last.
        """
        for returned in found.keys() & self._ended.keys():
            del self._ended[returned]
        self._last.update(found)
        merged = merge_stats(list(found.values()))
        return msgspec.structs.replace(
            merged, **_sum_counters([self._forgotten, *self._ended.values(), *self._last.values()])
        )

    def end(self, replica: str) -> None:
        """Keep only the counters of a replica, which go on if it returns."""
        if (last := self._last.pop(replica, None)) is not None:
            self._ended[replica] = last
            if len(self._ended) > MAX_ENDED:
                oldest = self._ended.pop(next(iter(self._ended)))
                self._forgotten = EngineStats(**_sum_counters([self._forgotten, oldest]))


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


def _sum_counters(replicas: Sequence[EngineStats]) -> dict[str, Any]:
    values = {name: [getattr(each, name) for each in replicas] for name in _COUNTERS}
    return {name: _add(each) if name in _HISTOGRAMS else sum(each) for name, each in values.items()}


def _add(histograms: Sequence[HistogramCounts]) -> HistogramCounts:
    counted = [each for each in histograms if each.bounds]
    if not counted:
        return HistogramCounts()
    counts = tuple(map(sum, zip(*(each.counts for each in counted), strict=True)))
    return HistogramCounts(counted[0].bounds, counts, sum(each.sum for each in counted))
