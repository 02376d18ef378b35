from __future__ import annotations

from threading import Event

import pytest

from syringa.engine.vision.fair_pool import FairPool


def test_tenants_take_turns() -> None:
    pool, begin, order = FairPool(1, "test"), Event(), []
    first = pool.submit("", lambda: begin.wait(5))
    futures = [pool.submit(tenant, lambda t=tenant: order.append(t)) for tenant in "aaaabbc"]  # type: ignore[misc]
    assert futures[3].cancel()
    begin.set()
    assert first.result(5)
    for future in futures[:3] + futures[4:]:
        future.result(5)
    assert order == ["a", "b", "c", "a", "b", "a"]
    pool.close()


def test_a_failure_is_told() -> None:
    pool = FairPool(1, "test")
    with pytest.raises(ZeroDivisionError):
        pool.submit("", lambda: 1 // 0).result(5)
    assert pool.submit("", lambda: 5).result(5) == 5
    pool.close()
