"""Which sequences to preempt when running slots or blocks are short. Torch-free and without side effects.

Two rules hold between tenants. A tenant's only running sequence is not preempted while another tenant has two or more,
so a preempted tenant still has something running and does not claim a slot in turn: two tenants cannot preempt each
other alternately. Among tenants with two or more, the one that holds the most gives up its youngest sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from syringa.engine.scheduling.sequence import Sequence


@dataclass(frozen=True)
class ReclaimTarget:
    """Running slots and blocks to reclaim for a sequence, and the fair share of each that a tenant may keep."""

    slots: int
    blocks: int
    slot_share: float
    block_share: float


def age(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of a sequence's age: the larger, the younger."""
    return sequence.arrival, sequence.choice


def by_tenant(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    groups: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.request.tenant, []).append(sequence)
    return groups


def missing_slots(running: Iterable[Sequence], sequence: Sequence, most: int) -> int:
    """Return how many running slots a sequence lacks. Choices that are still to fork have theirs reserved."""
    return sum([1 + each.siblings for each in running]) + 1 + sequence.siblings - most


def promised_blocks(running: Iterable[Sequence], requester: Sequence) -> int:
    """Return the number of blocks that admitted prompts still need, and that `requester` may not take.

    Counted are prompts of other tenants, and those that wait for their turn to be scored. Background prompts count for
    background sequences only.
    """
    tenant, background = requester.request.tenant, requester.request.background
    return sum(
        s.missing_blocks(len(s.tokens))
        for s in running
        if (s.scoring or s.request.tenant != tenant) and (background or not s.request.background)
    )


def select_victim(
    running: Collection[Sequence],
    unscheduled: Collection[Sequence],
    removable: Collection[Sequence],
    requester: Sequence,
) -> Sequence:
    """Return the sequence to preempt so that `requester` gets its blocks; it may be `requester` itself.

    `unscheduled` are the running sequences that are not in the scheduler output, `requester` among them. `removable`
    can be taken out of the output again, which is done for another tenant only.
    """
    groups = by_tenant(running)
    crowded = [tenant for tenant, group in groups.items() if len(group) > 1]
    if len(groups) > 1 and crowded:
        giver = max(crowded, key=lambda tenant: _block_count(groups[tenant]))
        candidates = [
            s for s in groups[giver] if s in unscheduled or (s in removable and giver != requester.request.tenant)
        ]
        unscheduled = candidates or [s for s in unscheduled if s.request.tenant == requester.request.tenant]
    return max(unscheduled, key=lambda s: (*age(s), s is requester))


def select_victims(running: Iterable[Sequence], ref_counts: Counter[int], target: ReclaimTarget) -> list[Sequence]:
    """Return the sequences to preempt so that a tenant with nothing running can run; empty if that is impossible.

    Only tenants above their fair share of what is short lose sequences. `ref_counts` has the reference counts of the
    blocks and is modified.
    """
    groups = {tenant: sorted(group, key=age) for tenant, group in by_tenant(running).items()}
    slots = {tenant: sum(1 + s.siblings for s in group) for tenant, group in groups.items()}
    blocks = {tenant: _block_count(group) for tenant, group in groups.items()}
    missing_slots, missing_blocks = target.slots, target.blocks
    victims: list[Sequence] = []
    while missing_slots > 0 or missing_blocks > 0:
        held, share = (slots, target.slot_share) if missing_slots > 0 else (blocks, target.block_share)
        over = [tenant for tenant, group in groups.items() if len(group) > 1 and held[tenant] > share]
        if not over:
            return []
        giver = max(over, key=lambda tenant: held[tenant])
        victim = groups[giver].pop()
        ref_counts.subtract(victim.block_table)
        freed = sum(ref_counts[block] == 0 for block in victim.block_table)
        slots[giver] -= 1 + victim.siblings
        blocks[giver] -= freed
        missing_slots -= 1 + victim.siblings
        missing_blocks -= freed
        victims.append(victim)
    return victims


def _block_count(group: Iterable[Sequence]) -> int:
    return len({block for sequence in group for block in sequence.block_table})
