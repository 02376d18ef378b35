"""The engine with which the console is measured, and the table of what was measured."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.console import PacedEngine, table
from syringa.types import EngineRequest, SamplingParams, StopConditions


async def test_paced_engine_delivers_its_rate_to_a_client_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.001  # a timer is always late

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sampling, stopping = SamplingParams(seed=1), StopConditions(max_tokens=100)
    request = EngineRequest(id="a", prompt=[1], sampling=sampling, stopping=stopping)
    delivered = []
    async for delta in PacedEngine("x" * 100, delay=0.01).deltas(request):
        delivered.append(round(now, 3))
        now += 0.5 if len(delivered) == 10 else 0.002
        assert delta.tokens
    assert delivered[:3] == [0.011, 0.021, 0.031]
    assert delivered[-1] == 1.001


def test_table_has_openings_with_and_without_a_cache() -> None:
    figures = {
        "interactive_cold_ms": 412.4,
        "interactive_ms": 249.2,
        "stream_tokens_per_second": 297,
        "stream_long_tasks_ms": [],
        "stream_longest_task_cpu_ms": 17.8,
        "scroll_gap_p99_ms": 16.8,
        "heap_megabytes_after_each_chat": [6.3, 7.3],
    }
    head, _, cold, warm, *_, last = table(figures).splitlines()
    assert head == "| | measured | target |"
    assert cold == "| first page, from navigation to interactive, nothing cached | 412 ms | ≤ 1 s |"
    assert warm == "| the same with its files in the browser's cache | 249 ms | |"
    assert last == "| memory of the page after the first and the tenth long chat | 6.3 and 7.3 MB | flat |"
