from __future__ import annotations

from syringa.engine.client.stats import merge_stats
from syringa.types import EngineStats, HistogramCounts

BOUNDS = (1.0, 2.0)


def test_merge_stats_adds_up_counts_and_keeps_what_is_equal() -> None:
    first = EngineStats(
        running=1,
        idle_seconds=3.0,
        blocks_total=10,
        block_size=16,
        max_length=50,
        started=2,
        step_tokens=HistogramCounts(BOUNDS, (1, 2, 3), 9.0),
    )
    second = EngineStats(
        running=2,
        blocks_total=10,
        block_size=16,
        max_length=50,
        started=3,
        step_tokens=HistogramCounts(BOUNDS, (1, 0, 1), 4.0),
    )
    merged = merge_stats([first, second])
    assert (merged.running, merged.idle_seconds, merged.blocks_total, merged.started) == (3, 0.0, 20, 5)
    assert (merged.block_size, merged.max_length, merged.prefix_caching) == (16, 50, True)
    assert merged.step_tokens == HistogramCounts(BOUNDS, (2, 2, 4), 13.0)
    assert merged.token_gaps == HistogramCounts()
    assert merge_stats([first]) is first
