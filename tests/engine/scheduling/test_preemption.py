from __future__ import annotations

import itertools
from collections import Counter

from syringa.engine.scheduling.preemption import ReclaimTarget, select_victim, select_victims
from syringa.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.model_free_engine import sequence

_numbers = itertools.count()


def running(tenant: str, blocks: int, choices: int = 1) -> Sequence:
    one = sequence([1], tenant=tenant, choices=choices)
    one.block_table = [next(_numbers) for _ in range(blocks)]
    return one


def ref_counts(*sequences: Sequence) -> Counter[int]:
    return Counter(block for one in sequences for block in one.block_table)


def test_select_victim_of_one_tenant_is_youngest_unscheduled() -> None:
    one, two, three = (running("a", 5) for _ in range(3))
    assert select_victim([one, two, three], [two, three], [one], two) is three
    assert select_victim([one, two, three], [two], [one, three], two) is two


def test_select_victim_is_youngest_of_tenant_with_most_blocks() -> None:
    old, young = running("a", 5), running("a", 5)
    last = [running("b", 1), running("b", 2)]
    everyone = [old, young, *last]
    assert select_victim(everyone, everyone, [], last[0]) is young
    assert select_victim(everyone, everyone, [], old) is young
    # Already scheduled: removed for another tenant, never for its own.
    assert select_victim(everyone, last, [old, young], last[0]) is young
    assert select_victim(everyone, [old, *last], [young], old) is old
    assert select_victim(everyone, last, [], last[0]) is last[1]


def test_select_victim_spares_only_sequence_of_a_tenant() -> None:
    large, small, smaller = running("a", 90), running("b", 5), running("b", 5)
    assert select_victim([large, small, smaller], [large, small, smaller], [], small) is smaller
    assert select_victim([large, small], [large, small], [], small) is small


SHARES = {"slot_share": 2.0, "block_share": 10.0}


def test_select_victims_takes_slots_from_tenants_above_their_share() -> None:
    many, few = [running("a", 1) for _ in range(4)], [running("b", 9), running("b", 9)]
    everyone = [*many, *few]
    assert select_victims(everyone, ref_counts(*everyone), ReclaimTarget(1, 0, **SHARES)) == [many[3]]
    assert select_victims(everyone, ref_counts(*everyone), ReclaimTarget(2, -5, **SHARES)) == [many[3], many[2]]
    assert (
        select_victims(everyone, ref_counts(*everyone), ReclaimTarget(3, 0, **SHARES)) == []
    )  # then both are at their share
    forking = running("a", 1, choices=3)
    everyone = [many[0], forking]
    assert select_victims(everyone, ref_counts(*everyone), ReclaimTarget(3, 0, **SHARES)) == [forking]


def test_select_victims_takes_blocks_from_tenants_above_their_share() -> None:
    many, few = [running("a", 1) for _ in range(4)], [running("b", 9), running("b", 9)]
    everyone = [*many, *few]
    assert select_victims(everyone, ref_counts(*everyone), ReclaimTarget(0, 3, **SHARES)) == [few[1]]
    assert select_victims(everyone, ref_counts(*everyone), ReclaimTarget(0, 10, **SHARES)) == []
    assert select_victims(everyone, ref_counts(*everyone), ReclaimTarget(1, 3, **SHARES)) == [many[3], few[1]]


def test_select_victims_counts_shared_blocks_when_last_reference_goes() -> None:
    first, second, third = running("a", 1), running("a", 12), running("a", 0)
    third.block_table = list(second.block_table)
    everyone = [first, second, third]
    assert select_victims(everyone, ref_counts(*everyone), ReclaimTarget(0, 12, **SHARES)) == [third, second]


def test_select_victims_spares_last_sequence_of_a_tenant() -> None:
    alone = running("a", 100)
    assert select_victims([alone], ref_counts(alone), ReclaimTarget(1, 5, **SHARES)) == []
