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


def test_fair_thread_pool_begins_background_work_last() -> None:
    pool, begin, order = FairThreadPool(1, "test"), Event(), []
    first = pool.submit("", lambda: begin.wait(60))
    futures = [
        pool.submit(name[0].lower(), lambda name=name: order.append(name), background=name.isupper())  # type: ignore[misc]
        for name in ("A1", "A2", "B1", "a1", "a2", "b1")
    ]
    begin.set()
    assert first.result(60)
    for future in futures:
        future.result(60)
    assert order == ["a1", "b1", "a2", "A1", "B1", "A2"]
    pool.close()


def test_fair_thread_pool_leaves_half_of_its_threads_to_other_than_background_work() -> None:
    pool, end = FairThreadPool(4, "test"), Event()
    begun = [Event() for _ in range(6)]

    def wait(mine: Event) -> bool:
        mine.set()
        return end.wait(60)

    long = [pool.submit(str(n), lambda mine=mine: wait(mine), background=True) for n, mine in enumerate(begun)]  # type: ignore[misc]
    assert begun[0].wait(60)
    assert begun[1].wait(60)
    assert pool.submit("0", lambda: 1).result(60) == 1  # on one of the threads that are left
    assert not any(each.is_set() for each in begun[2:])
    end.set()
    assert all(future.result(60) for future in long)
    pool.close()


def test_fair_thread_pool_cancels_what_has_not_begun_when_it_is_closed() -> None:
    pool, end = FairThreadPool(1, "test"), Event()
    running = pool.submit("", lambda: end.wait(60))
    waiting = [pool.submit("", lambda: 1), pool.submit("", lambda: 2, background=True)]
    pool.close()
    assert all(future.cancelled() for future in waiting)
    end.set()
    assert running.result(60)
