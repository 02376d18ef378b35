"""The engine with which the console is measured."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.console import PacedEngine
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
