"""What waits, and fairness between tenants: by priority inside a tenant, then first come, first served.

Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping
from typing import Generic, Protocol, TypeVar


class QueuedRequest(Protocol):
    @property
    def tenant(self) -> str: ...

    @property
    def priority(self) -> int: ...


class Queued(Protocol):
    """What waits in a queue: a sequence, or a request."""

    @property
    def request(self) -> QueuedRequest: ...

    @property
    def begun(self) -> bool: ...

    @property
    def submitted(self) -> float: ...


Q = TypeVar("Q", bound=Queued)


def tenant_to_displace(usage: Mapping[str, int], tenant: str, capacity: int) -> str | None:
    """Return the tenant that has to give way in a full queue to `tenant`; None if `tenant` is to be refused.

    Each tenant is entitled to an equal share of the capacity, so that one tenant's overload does not refuse all the
    others. A tenant below its share displaces the newest request of the tenant with the highest usage.
    """
    tenants = len(usage.keys() | {tenant})
    if usage.get(tenant, 0) * tenants >= capacity:
        return None
    return max(usage, key=lambda each: usage[each], default=None)


class FairQueue(Generic[Q]):
    """A queue of sequences for each tenant that has any waiting, in order of priority and arrival."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Q]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tenants(self) -> KeysView[str]:
        return self._queues.keys()

    def head(self, tenant: str) -> Q:
        return self._queues[tenant][0]

    def count(self, tenant: str) -> int:
        return len(self._queues.get(tenant, ()))

    def add(self, sequence: Q, *, first: bool = False) -> None:
        """Queue a sequence, at the head if `first`, which is for preempted ones; resumed ones come behind these."""
        queue = self._queues.setdefault(sequence.request.tenant, deque())
        position = 0 if first else len(queue)
        while position and _comes_before(sequence, queue[position - 1]):
            position -= 1
        queue.insert(position, sequence)
        self._length += 1

    def remove(self, sequence: Q) -> None:
        tenant = sequence.request.tenant
        queue = self._queues[tenant]
        queue.remove(sequence)
        self._length -= 1
        if not queue:
            del self._queues[tenant]

    def displaced_by(self, tenant: str, capacity: int) -> Q | None:
        """Return the sequence that `tenant` displaces in a full queue, see `tenant_to_displace`; never a begun one."""
        counts = {each: len(queue) for each, queue in self._queues.items()}
        displaced = tenant_to_displace(counts, tenant, capacity)
        if displaced is None or (newest := self._queues[displaced][-1]).begun:
            return None
        return newest

    def overdue(self, before: float) -> list[Q]:
        """Return the sequences that were submitted before that time and have not begun."""
        found = []
        for queue in self._queues.values():
            last_priority = queue[-1].request.priority
            for sequence in queue:  # those that have begun are at the head, those of a priority in order of submission
                if sequence.begun:
                    continue
                if sequence.submitted <= before:
                    found.append(sequence)
                elif sequence.request.priority == last_priority:
                    break
        return found


def _comes_before(sequence: Queued, other: Queued) -> bool:
    if other.begun or sequence.begun:
        return not other.begun
    return (sequence.request.priority, sequence.submitted) < (other.request.priority, other.submitted)


class VirtualTokenCounters:
    """Decide which tenant's prompt gets the next part of a step's budget: the one that was served the fewest tokens.

    Each tenant has a counter of tokens served. Counters are comparable only among active tenants, those that have a
    prompt that is not computed yet, so:

    - a tenant that becomes active is lifted to the lowest counter of the active ones: idle time is not credit;
    - while no tenant is active, all counters are dropped;
    - an inactive tenant's counter is dropped once the active ones have caught up, which bounds their number.

    Ties go to the tenant with the fewest requests, so that a small tenant does not wait for a large one's chunk. The
    tokens of a prompt are charged when it completes, so that it is not interrupted for a later one, or when they reach
    `quantum`.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._served: dict[str, int] = {}
        self._uncharged: dict[str, int] = {}  # tokens of a prompt that is not complete
        self._active: frozenset[str] = frozenset()
        self._floor = 0  # the lowest counter among the tenants that were active last

    def __len__(self) -> int:
        return len(self._served)

    def begin_step(self, active: Collection[str]) -> None:
        """Update the counters for a step in which these tenants are active."""
        if not active:
            self._served, self._uncharged, self._active, self._floor = {}, {}, frozenset(), 0
            return
        for tenant in [tenant for tenant in self._uncharged if tenant not in active]:  # its prompt was dropped
            self.charge(tenant, self._uncharged.pop(tenant))
        served = self._served
        floor = min((served[tenant] for tenant in active if tenant in self._active), default=self._floor)
        for tenant in active:
            if tenant not in self._active:
                served[tenant] = max(served.get(tenant, 0), floor)
        self._active = frozenset(active)
        self._floor = min(served[tenant] for tenant in active)
        if len(served) > len(active):
            kept = [tenant for tenant in served if tenant in active or served[tenant] > self._floor]
            self._served = {tenant: served[tenant] for tenant in kept}

    def charge(self, tenant: str, tokens: int) -> None:
        self._served[tenant] = self._served.get(tenant, self._floor) + tokens

    def charge_prompt(self, tenant: str, tokens: int, *, done: bool) -> None:
        uncharged = self._uncharged.pop(tenant, 0) + tokens
        if done or uncharged >= self._quantum:
            self.charge(tenant, uncharged)
        else:
            self._uncharged[tenant] = uncharged

    def order(self, tenants: Iterable[str], requests: Callable[[str], int]) -> list[str]:
        """Sort tenants by tokens served, ties by their number of requests."""
        return sorted(tenants, key=lambda tenant: (self._served.get(tenant, self._floor), requests(tenant)))
