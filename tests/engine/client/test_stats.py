from __future__ import annotations

from syringa.engine.client.stats import MAX_ENDED, ReplicaStats, merge_stats
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


def test_counters_do_not_fall_when_a_replica_ends_or_does_not_answer() -> None:
    steps = HistogramCounts(BOUNDS, (1, 2, 3), 9.0)
    stats = ReplicaStats()
    old = EngineStats(running=4, steps=100, output_tokens=70, step_tokens=steps)
    assert stats.update({"m-1": old}) == old
    both = stats.update({"m-1": old, "m-2": EngineStats(running=1, steps=5)})
    assert (both.running, both.steps, both.output_tokens, both.step_tokens) == (5, 105, 70, steps)
    silent = stats.update({"m-2": EngineStats(running=1, steps=6)})
    assert (silent.running, silent.steps) == (1, 106)
    assert stats.update({"m-1": EngineStats(steps=101), "m-2": EngineStats(steps=6)}).steps == 107
    stats.end("m-1")
    stats.end("m-1")
    stats.end("never-asked")
    after = stats.update({"m-2": EngineStats(steps=7), "m-3": EngineStats(steps=1, step_tokens=steps)})
    assert (after.running, after.steps, after.step_tokens) == (0, 109, steps)
    stats.end("m-2")
    stats.end("m-3")
    assert stats.update({"m-4": EngineStats()}).steps == 109


def test_counters_of_a_replica_that_returns_are_not_added_twice() -> None:
    """A node that could not be reached for a while brings its replicas back, with their ids and counters."""
    stats = ReplicaStats()
    stats.update({"m-1": EngineStats(steps=100), "m-2": EngineStats(steps=10)})
    stats.end("m-1")
    assert stats.update({"m-2": EngineStats(steps=10)}).steps == 110
    assert stats.update({"m-1": EngineStats(steps=103), "m-2": EngineStats(steps=10)}).steps == 113
    stats.end("m-1")
    assert stats.update({"m-2": EngineStats(steps=10)}).steps == 113


def test_counters_of_many_ended_replicas_stay_in_the_sum() -> None:
    stats = ReplicaStats()
    for number in range(2 * MAX_ENDED):
        stats.update({str(number): EngineStats(steps=1)})
        stats.end(str(number))
    assert stats.update({"last": EngineStats()}).steps == 2 * MAX_ENDED
    assert len(stats._ended) == MAX_ENDED
