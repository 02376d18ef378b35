from __future__ import annotations

import msgspec
import pytest

from syringa.engine.scheduling.fair_queue import FairQueue, VirtualTokenCounters, tenant_to_displace
from syringa.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.model_free_engine import sequence


@pytest.mark.parametrize(
    ("counts", "tenant", "displaced"),
    [
        ({"a": 8}, "a", None),  # it has the whole queue
        ({"a": 8}, "b", "a"),
        ({"a": 5, "b": 3}, "b", "a"),
        ({"a": 4, "b": 4}, "b", None),  # it has its share
        ({"a": 5, "b": 3}, "a", None),
        ({"a": 3, "b": 4, "c": 1}, "c", "b"),
        ({"a": 3, "b": 4, "c": 1}, "d", "b"),
        ({"a": 9, "b": 0}, "b", "a"),  # preempted sequences may exceed the capacity
        ({}, "a", None),
    ],
)
def test_tenant_to_displace(counts: dict[str, int], tenant: str, displaced: str | None) -> None:
    assert tenant_to_displace(counts, tenant, 8) == displaced


def test_fair_queue_displaces_newest_of_largest_tenant_unless_begun() -> None:
    queue = FairQueue()
    noisy = [sequence([1], tenant="noisy") for _ in range(4)]
    for each in noisy:
        queue.add(each)
    assert queue.displaced_by("noisy", 4) is None
    assert queue.displaced_by("quiet", 4) is noisy[-1]
    noisy[-1].begun = True
    assert queue.displaced_by("quiet", 4) is None


def test_fair_queue_overdue_skips_begun_sequences() -> None:
    queue = FairQueue()
    times = {"a": [1.0, 2.0, 3.0], "b": [2.5, 2.6]}
    for tenant, each in times.items():
        for submitted in each:
            one = sequence([1], tenant=tenant)
            one.submitted = submitted
            queue.add(one)
    begun = sequence([1], tenant="a")
    begun.begun = True
    queue.add(begun, first=True)
    assert [one.submitted for one in queue.overdue(2.5)] == [1.0, 2.0, 2.5]
    assert queue.overdue(0.5) == []


def first(counters: VirtualTokenCounters, *tenants: str, **running: int) -> str:
    return order(counters, *tenants, **running)[0]


def order(counters: VirtualTokenCounters, *tenants: str, **running: int) -> list[str]:
    return counters.order(tenants, lambda tenant: running.get(tenant, 0))


def test_token_counters_order_least_served_first() -> None:
    counters = VirtualTokenCounters(100)
    counters.begin_step(["a", "b"])
    counters.charge("a", 5)
    assert first(counters, "a", "b") == "b"
    counters.charge("b", 6)
    assert first(counters, "a", "b") == "a"
    counters.charge("a", 1)
    assert first(counters, "a", "b", a=3, b=2) == "b"
    assert first(counters, "a", "b", a=2, b=3) == "a"


def test_token_counters_lift_returning_tenant_to_lowest_counter() -> None:
    counters = VirtualTokenCounters(100)
    counters.begin_step(["a", "b"])
    counters.charge("a", 1000)
    counters.charge("b", 1300)
    counters.begin_step(["a", "b", "late"])
    counters.charge("late", 1)
    assert order(counters, "a", "b", "late") == ["a", "late", "b"]
    # An inactive tenant does not fall behind, and its excess is not forgotten at once.
    counters.begin_step(["a", "late"])
    counters.begin_step(["a", "b", "late"])
    assert first(counters, "b", "late") == "late"
    counters.charge("a", 5000)
    counters.charge("late", 5000)
    counters.begin_step(["a", "late"])
    counters.begin_step(["a", "b", "late"])
    counters.charge("b", 2)
    assert order(counters, "a", "b", "late") == ["a", "late", "b"]


def test_token_counters_reset_while_no_tenant_is_active() -> None:
    counters = VirtualTokenCounters(100)
    counters.begin_step(["a"])
    counters.charge("a", 10**6)
    counters.begin_step([])
    counters.begin_step(["b"])
    counters.charge("b", 1)
    counters.begin_step(["a", "b"])
    counters.charge("a", 2)
    assert first(counters, "a", "b") == "b"


def test_token_counters_charge_prompt_when_done_or_at_quantum() -> None:
    counters = VirtualTokenCounters(100)
    counters.begin_step(["a", "b"])
    counters.charge_prompt("a", 60, done=False)
    assert first(counters, "a", "b") == "a"
    counters.charge_prompt("a", 10, done=True)
    assert first(counters, "a", "b") == "b"
    counters.charge_prompt("b", 99, done=False)
    assert first(counters, "a", "b") == "b"
    counters.charge_prompt("b", 1, done=False)
    assert first(counters, "a", "b") == "a"


def test_token_counters_charge_dropped_prompt() -> None:
    counters = VirtualTokenCounters(100)
    counters.begin_step(["a", "b"])
    counters.charge_prompt("a", 60, done=False)
    counters.begin_step(["b"])
    counters.charge("b", 30)
    counters.begin_step(["a", "b"])
    assert first(counters, "a", "b") == "b"


def test_token_counters_of_past_tenants_are_dropped() -> None:
    counters = VirtualTokenCounters(100)
    for number in range(5000):
        counters.begin_step(["always", f"guest {number}"])
        counters.charge("always", 60)
        counters.charge(f"guest {number}", 100)
        assert len(counters) < 10


def with_priority(priority: int, *, tenant: str = "a", submitted: float = 0.0) -> Sequence:
    one = sequence([1], tenant=tenant)
    one.request = msgspec.structs.replace(one.request, priority=priority)
    one.submitted = submitted
    return one


def test_fair_queue_orders_the_sequences_of_a_tenant_by_priority_and_arrival() -> None:
    queue = FairQueue()
    other = with_priority(-9, tenant="b")
    added = [with_priority(priority) for priority in (0, 5, 0, -1, 5)]
    for each in (*added, other):
        queue.add(each)
    begun = with_priority(7)
    begun.begun = True
    queue.add(begun, first=True)
    queue.add(last := with_priority(-2))
    served = []
    while queue.count("a"):
        served.append(queue.head("a"))
        queue.remove(served[-1])
    assert served == [begun, last, added[3], added[0], added[2], added[1], added[4]]
    assert queue.head("b") is other


def test_fair_queue_gives_sequences_that_have_waited_elsewhere_their_place() -> None:
    queue: FairQueue[Sequence] = FairQueue()
    young, old = with_priority(0, submitted=5.0), with_priority(0, submitted=1.0)
    for each in (young, old):
        queue.add(each)
    assert queue.head("a") is old
    assert queue.overdue(before=3.0) == [old]


def test_fair_queue_displaces_the_lowest_priority() -> None:
    queue = FairQueue()
    added = [with_priority(priority, tenant="noisy") for priority in (3, 0, 3, 1)]
    for each in added:
        queue.add(each)
    assert queue.displaced_by("quiet", 4) is added[2]


def test_fair_queue_finds_overdue_sequences_of_every_priority() -> None:
    queue = FairQueue()
    times = {5: [1.0, 4.0], -5: [3.0, 3.5], 0: [2.0, 3.2, 3.3]}
    for priority, each in times.items():
        for submitted in each:
            queue.add(with_priority(priority, submitted=submitted))
    assert [one.submitted for one in queue.overdue(3.0)] == [3.0, 2.0, 1.0]


def test_fair_queue_places_resumed_sequences_behind_preempted_ones_and_before_new_ones() -> None:
    queue = FairQueue()
    preempted, resumed, more = (with_priority(priority) for priority in (0, 9, 9))
    for each in (preempted, resumed, more):
        each.begun = True
    queue.add(new := with_priority(-9))
    queue.add(resumed)
    queue.add(more)
    queue.add(preempted, first=True)
    served = []
    while queue.count("a"):
        served.append(queue.head("a"))
        queue.remove(served[-1])
    assert served == [preempted, resumed, more, new]
