from __future__ import annotations

import pytest

from syringa.engine.scheduling.fair_queue import FairQueue, Turns, most_in_line
from tests.engine.scheduling.builders import sequence


@pytest.mark.parametrize(
    ("counts", "newcomer", "giver"),
    [
        ({"a": 8}, "a", None),  # its own line: nobody else can help
        ({"a": 8}, "b", "a"),
        ({"a": 5, "b": 3}, "b", "a"),
        ({"a": 4, "b": 4}, "b", None),  # it has its share
        ({"a": 5, "b": 3}, "a", None),
        ({"a": 3, "b": 4, "c": 1}, "c", "b"),
        ({"a": 3, "b": 4, "c": 1}, "d", "b"),
        ({"a": 9, "b": 0}, "b", "a"),  # those that were preempted make it longer than it may be
        ({}, "a", None),
    ],
)
def test_who_makes_room_in_a_full_line(counts: dict[str, int], newcomer: str, giver: str | None) -> None:
    assert most_in_line(counts, newcomer, 8) == giver


def test_the_newest_of_the_longest_line_goes_but_none_that_has_begun() -> None:
    queue = FairQueue()
    noisy = [sequence([1], tenant="noisy") for _ in range(4)]
    for each in noisy:
        queue.add(each)
    assert queue.displaced_by("noisy", 4) is None
    assert queue.displaced_by("quiet", 4) is noisy[-1]
    noisy[-1].begun = True
    assert queue.displaced_by("quiet", 4) is None


def test_who_has_waited_too_long() -> None:
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


def first(turns: Turns, *tenants: str, **running: int) -> str:
    return order(turns, *tenants, **running)[0]


def order(turns: Turns, *tenants: str, **running: int) -> list[str]:
    return turns.order(tenants, lambda tenant: running.get(tenant, 0))


def test_who_was_given_the_least_is_next() -> None:
    turns = Turns(100)
    turns.begin(["a", "b"])
    turns.charge("a", 5)
    assert first(turns, "a", "b") == "b"
    turns.charge("b", 6)
    assert first(turns, "a", "b") == "a"
    turns.charge("a", 1)
    assert first(turns, "a", "b", a=3, b=2) == "b"
    assert first(turns, "a", "b", a=2, b=3) == "a"


def test_one_that_comes_back_is_level_with_the_least() -> None:
    turns = Turns(100)
    turns.begin(["a", "b"])
    turns.charge("a", 1000)
    turns.charge("b", 1300)
    turns.begin(["a", "b", "late"])
    turns.charge("late", 1)
    assert order(turns, "a", "b", "late") == ["a", "late", "b"]
    # Who is away does not fall behind either, and what it had too much is not forgotten at once.
    turns.begin(["a", "late"])
    turns.begin(["a", "b", "late"])
    assert first(turns, "b", "late") == "late"
    turns.charge("a", 5000)
    turns.charge("late", 5000)
    turns.begin(["a", "late"])
    turns.begin(["a", "b", "late"])
    turns.charge("b", 2)
    assert order(turns, "a", "b", "late") == ["a", "late", "b"]


def test_what_was_given_while_nobody_asked_counts_for_nothing() -> None:
    turns = Turns(100)
    turns.begin(["a"])
    turns.charge("a", 10**6)
    turns.begin([])
    turns.begin(["b"])
    turns.charge("b", 1)
    turns.begin(["a", "b"])
    turns.charge("a", 2)
    assert first(turns, "a", "b") == "b"


def test_a_prompt_is_charged_when_it_is_done_or_its_turn_is_over() -> None:
    turns = Turns(100)
    turns.begin(["a", "b"])
    turns.charge_prompt("a", 60, done=False)
    assert first(turns, "a", "b") == "a"
    turns.charge_prompt("a", 10, done=True)
    assert first(turns, "a", "b") == "b"
    turns.charge_prompt("b", 99, done=False)
    assert first(turns, "a", "b") == "b"
    turns.charge_prompt("b", 1, done=False)
    assert first(turns, "a", "b") == "a"


def test_a_prompt_that_is_given_up_is_charged_too() -> None:
    turns = Turns(100)
    turns.begin(["a", "b"])
    turns.charge_prompt("a", 60, done=False)
    turns.begin(["b"])
    turns.charge("b", 30)
    turns.begin(["a", "b"])
    assert first(turns, "a", "b") == "b"


def test_counters_of_tenants_that_come_and_go_do_not_pile_up() -> None:
    turns = Turns(100)
    for number in range(5000):
        turns.begin(["always", f"guest {number}"])
        turns.charge("always", 60)
        turns.charge(f"guest {number}", 100)
        assert len(turns) < 10
