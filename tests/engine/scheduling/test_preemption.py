from __future__ import annotations

import itertools
from collections import Counter

from syringa.engine.scheduling.preemption import Shortage, givers, victim
from syringa.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.builders import sequence

_numbers = itertools.count()


def running(tenant: str, blocks: int, choices: int = 1) -> Sequence:
    one = sequence([1], tenant=tenant, choices=choices)
    one.blocks = [next(_numbers) for _ in range(blocks)]
    return one


def users(*sequences: Sequence) -> Counter[int]:
    return Counter(block for one in sequences for block in one.blocks)


def test_alone_the_youngest_gives_way_and_nothing_that_is_planned() -> None:
    one, two, three = (running("a", 5) for _ in range(3))
    assert victim([one, two, three], [two, three], [one], two) is three
    assert victim([one, two, three], [two], [one, three], two) is two


def test_the_tenant_with_the_most_gives_its_youngest() -> None:
    old, young = running("a", 5), running("a", 5)
    last = [running("b", 1), running("b", 2)]
    everyone = [old, young, *last]
    assert victim(everyone, everyone, [], last[0]) is young
    assert victim(everyone, everyone, [], old) is young
    # Planned already: taken out again for another tenant, never for its own.
    assert victim(everyone, last, [old, young], last[0]) is young
    assert victim(everyone, [old, *last], [young], old) is old
    assert victim(everyone, last, [], last[0]) is last[1]


def test_nobody_loses_its_only_one_while_others_have_two() -> None:
    large, small, smaller = running("a", 90), running("b", 5), running("b", 5)
    assert victim([large, small, smaller], [large, small, smaller], [], small) is smaller
    assert victim([large, small], [large, small], [], small) is small


SHARES = {"place_share": 2.0, "block_share": 10.0}


def test_places_are_given_by_whoever_has_more_than_its_share() -> None:
    many, few = [running("a", 1) for _ in range(4)], [running("b", 9), running("b", 9)]
    everyone = [*many, *few]
    assert givers(everyone, users(*everyone), Shortage(1, 0, **SHARES)) == [many[3]]
    assert givers(everyone, users(*everyone), Shortage(2, -5, **SHARES)) == [many[3], many[2]]
    assert givers(everyone, users(*everyone), Shortage(3, 0, **SHARES)) == []  # both have their share then
    forking = running("a", 1, choices=3)
    everyone = [many[0], forking]
    assert givers(everyone, users(*everyone), Shortage(3, 0, **SHARES)) == [forking]


def test_blocks_are_given_by_whoever_has_more_than_its_share() -> None:
    many, few = [running("a", 1) for _ in range(4)], [running("b", 9), running("b", 9)]
    everyone = [*many, *few]
    assert givers(everyone, users(*everyone), Shortage(0, 3, **SHARES)) == [few[1]]
    assert givers(everyone, users(*everyone), Shortage(0, 10, **SHARES)) == []
    assert givers(everyone, users(*everyone), Shortage(1, 3, **SHARES)) == [many[3], few[1]]


def test_shared_blocks_are_free_when_the_last_one_goes() -> None:
    first, second, third = running("a", 1), running("a", 12), running("a", 0)
    third.blocks = list(second.blocks)
    everyone = [first, second, third]
    assert givers(everyone, users(*everyone), Shortage(0, 12, **SHARES)) == [third, second]


def test_the_last_one_of_a_tenant_stays() -> None:
    alone = running("a", 100)
    assert givers([alone], users(alone), Shortage(1, 5, **SHARES)) == []
