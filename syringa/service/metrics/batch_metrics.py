"""Metrics of batches that are not finished. All processes share the database, so nothing is added up here."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily

from syringa.store.records import ACTIVE_BATCH, BatchCounts


def batch_families(prefix: str, counts: Sequence[BatchCounts]) -> list[Metric]:
    """Return the metrics of all unfinished batches. A status that none has is there with 0, too."""
    by_status = {each.status: each for each in counts}
    batches = GaugeMetricFamily(f"{prefix}batches", "Batches that are not finished, by status.", labels=("status",))
    for status in ACTIVE_BATCH:
        found = by_status.get(status)
        batches.add_metric((status,), found.batches if found is not None else 0)
    waiting = sum(each.waiting_lines for each in counts)
    about = "Requests of unfinished batches that have no result yet."
    return [batches, GaugeMetricFamily(f"{prefix}batch_lines_waiting", about, waiting)]
