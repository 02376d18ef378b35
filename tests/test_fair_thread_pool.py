from __future__ import annotations

from threading import Event

import pytest

from syringa.fair_thread_pool import FairThreadPool


def test_fair_thread_pool_serves_tenants_round_robin() -> None:
    pool, begin, order = FairThreadPool(1, "test"), Event(), []
    first = pool.submit("", lambda: begin.wait(60))
    futures = [pool.submit(tenant, lambda t=tenant: order.append(t)) for tenant in "aaaabbc"]  # type: ignore[misc]
    assert futures[3].cancel()
    begin.set()
    assert first.result(60)
    for future in futures[:3] + futures[4:]:
        future.result(60)
    assert order == ["a", "b", "c", "a", "b", "a"]
    pool.close()


def test_fair_thread_pool_propagates_exceptions() -> None:
    pool = FairThreadPool(1, "test")
    with pytest.raises(ZeroDivisionError):
        pool.submit("", lambda: 1 // 0).result(60)
    assert pool.submit("", lambda: 5).result(60) == 5
    pool.close()


def test_fair_thread_pool_limits_threads_per_tenant() -> None:
    """Work of one tenant that takes long leaves a thread to the others."""
    pool, end = FairThreadPool(2, "test", per_tenant=1), Event()
    long = [pool.submit("a", lambda: end.wait(120)) for _ in range(3)]
    assert [pool.submit("b", lambda: 1).result(60), pool.submit("c", lambda: 2).result(60)] == [1, 2]
    assert not any(future.done() for future in long)
    end.set()
    assert all(future.result(60) for future in long)
    pool.close()
