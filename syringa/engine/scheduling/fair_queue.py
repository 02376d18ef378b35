"""Who waits, and whose prompt is next: first come first served inside a tenant, fair between tenants. Torch-free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping

from syringa.engine.scheduling.sequence import Sequence


def most_in_line(counts: Mapping[str, int], newcomer: str, most: int) -> str | None:
    """Which tenant has to make room for a newcomer in a line that is full with `most`. None: the newcomer is refused.

    A line that one tenant has filled would refuse all the others until it is shorter, so that the overload of one
    became everybody's. Each tenant has a right to its share, `most` over the tenants that wait. Who has less than that
    takes a place of the tenant with the most, of its newest request: that one has waited the least for nothing.
    """
    tenants = len(counts.keys() | {newcomer})
    if counts.get(newcomer, 0) * tenants >= most:
        return None
    return max(counts, key=lambda tenant: counts[tenant], default=None)


class FairQueue:
    """A line of sequences for each tenant that has any."""

    def __init__(self) -> None:
        self._lines: dict[str, deque[Sequence]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tenants(self) -> KeysView[str]:
        return self._lines.keys()

    def head(self, tenant: str) -> Sequence:
        return self._lines[tenant][0]

    def count(self, tenant: str) -> int:
        return len(self._lines.get(tenant, ()))

    def add(self, sequence: Sequence, *, first: bool = False) -> None:
        line = self._lines.setdefault(sequence.request.tenant, deque())
        line.appendleft(sequence) if first else line.append(sequence)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        tenant = sequence.request.tenant
        line = self._lines[tenant]
        line.remove(sequence)
        self._length -= 1
        if not line:
            del self._lines[tenant]

    def displaced_by(self, newcomer: str, most: int) -> Sequence | None:
        """Who gives up a place in a full queue for a tenant; see `most_in_line`. Never one that has begun."""
        counts = {tenant: len(line) for tenant, line in self._lines.items()}
        tenant = most_in_line(counts, newcomer, most)
        if tenant is None or (newest := self._lines[tenant][-1]).begun:
            return None
        return newest

    def overdue(self, before: float) -> list[Sequence]:
        """Those that came before that time and have not begun."""
        found = []
        for line in self._lines.values():
            for sequence in line:  # those that had begun are at its head, the rest in the order in which they came
                if sequence.begun:
                    continue
                if sequence.submitted > before:
                    break
                found.append(sequence)
        return found


class Turns:
    """Which tenant's prompt gets the next part of a step's budget: that of the one that was given the least.

    What was given is counted in tokens, a counter for each tenant. The counters say something only among tenants that
    are asking, which is to have a prompt that is not computed yet, so:

    - one that begins to ask starts level with the least of those who ask already: idle time is not saved up;
    - while nobody asks, nobody is wronged, and all counters are forgotten;
    - who does not ask and is not ahead of those who do is forgotten too, so there are never more counters than tenants
      that had something lately.

    Of those that are level, whoever has the fewest requests comes first: a tenant that asks for little need not wait
    for the chunk of one that asks for much. What a prompt takes is charged when it is done, so that it is not left in
    the middle for a prompt that came later; but at the latest when it has taken a whole `turn`.
    """

    def __init__(self, turn: int) -> None:
        self._turn = turn
        self._given: dict[str, int] = {}
        self._owed: dict[str, int] = {}  # taken by a prompt that is not done, and not charged yet
        self._asking: frozenset[str] = frozenset()
        self._floor = 0  # what the least of those who asked last had been given

    def __len__(self) -> int:
        return len(self._given)

    def begin(self, asking: Collection[str]) -> None:
        """A step in which these tenants ask."""
        if not asking:
            self._given, self._owed, self._asking, self._floor = {}, {}, frozenset(), 0
            return
        for tenant in [tenant for tenant in self._owed if tenant not in asking]:  # its prompt was given up
            self.charge(tenant, self._owed.pop(tenant))
        given = self._given
        floor = min((given[tenant] for tenant in asking if tenant in self._asking), default=self._floor)
        for tenant in asking:
            if tenant not in self._asking:
                given[tenant] = max(given.get(tenant, 0), floor)
        self._asking = frozenset(asking)
        self._floor = min(given[tenant] for tenant in asking)
        if len(given) > len(asking):
            kept = [tenant for tenant in given if tenant in asking or given[tenant] > self._floor]
            self._given = {tenant: given[tenant] for tenant in kept}

    def charge(self, tenant: str, tokens: int) -> None:
        self._given[tenant] = self._given.get(tenant, self._floor) + tokens

    def charge_prompt(self, tenant: str, tokens: int, *, done: bool) -> None:
        owed = self._owed.pop(tenant, 0) + tokens
        if done or owed >= self._turn:
            self.charge(tenant, owed)
        else:
            self._owed[tenant] = owed

    def order(self, tenants: Iterable[str], size: Callable[[str], int]) -> list[str]:
        """Whoever was given the least first, of those that are level the smallest."""
        return sorted(tenants, key=lambda tenant: (self._given.get(tenant, self._floor), size(tenant)))
