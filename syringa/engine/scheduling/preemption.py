"""Who gives way when places or blocks are short. Torch-free, and without effects: the scheduler does what is said here.

Between tenants two rules hold. Nobody's only running sequence is taken as long as somebody else has two, so whoever
gives way has something running still and is not the next to claim a place: no two tenants throw one another out in
turns. And of those with two or more, the one with the most gives its youngest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from syringa.engine.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Shortage:
    """What is missing for a sequence to run, and what each tenant may have of it without being asked to give."""

    places: int
    blocks: int
    place_share: float
    block_share: float


def age(sequence: Sequence) -> tuple[int, int]:
    """The larger, the younger."""
    return sequence.arrival, sequence.choice


def by_tenant(sequences: Iterable[Sequence]) -> dict[str, list[Sequence]]:
    groups: dict[str, list[Sequence]] = {}
    for sequence in sequences:
        groups.setdefault(sequence.request.tenant, []).append(sequence)
    return groups


def victim(
    running: Collection[Sequence], idle: Collection[Sequence], movable: Collection[Sequence], needy: Sequence
) -> Sequence:
    """Whose blocks `needy` gets; maybe `needy` itself has to go.

    `idle` are those that are not in the plan, and `needy` is one of them. `movable` can be taken out of the plan again:
    that is done for another tenant's sake only.
    """
    groups = by_tenant(running)
    crowded = [tenant for tenant, group in groups.items() if len(group) > 1]
    if len(groups) > 1 and crowded:
        giver = max(crowded, key=lambda tenant: _blocks(groups[tenant]))
        given = [s for s in groups[giver] if s in idle or (s in movable and giver != needy.request.tenant)]
        idle = given or [s for s in idle if s.request.tenant == needy.request.tenant]
    return max(idle, key=lambda s: (*age(s), s is needy))


def givers(running: Iterable[Sequence], users: Counter[int], shortage: Shortage) -> list[Sequence]:
    """Whom to send back so that a tenant with nothing running gets its place. Empty: that is not to be had.

    Taken are sequences of tenants that hold more than their share of what is short. `users` says how many sequences
    refer to a block; it is used up.
    """
    groups = {tenant: sorted(group, key=age) for tenant, group in by_tenant(running).items()}
    places = {tenant: sum(1 + s.siblings for s in group) for tenant, group in groups.items()}
    blocks = {tenant: _blocks(group) for tenant, group in groups.items()}
    missing_places, missing_blocks = shortage.places, shortage.blocks
    found: list[Sequence] = []
    while missing_places > 0 or missing_blocks > 0:
        held, share = (places, shortage.place_share) if missing_places > 0 else (blocks, shortage.block_share)
        over = [tenant for tenant, group in groups.items() if len(group) > 1 and held[tenant] > share]
        if not over:
            return []
        giver = max(over, key=lambda tenant: held[tenant])
        gone = groups[giver].pop()
        users.subtract(gone.blocks)
        freed = sum(users[block] == 0 for block in gone.blocks)
        places[giver] -= 1 + gone.siblings
        blocks[giver] -= freed
        missing_places -= 1 + gone.siblings
        missing_blocks -= freed
        found.append(gone)
    return found


def _blocks(group: Iterable[Sequence]) -> int:
    return len({block for sequence in group for block in sequence.blocks})
