"""The router: which replica of a model runs a request. Pure bookkeeping, without asyncio and without a clock.

Prefix affinity with bounded load. A request goes to the replica that served the longest known prefix of its prompt,
unless that one has more than its share of the load; then to a replica with a shorter prefix, and else to the least
loaded one. A prefix that many requests begin with, such as a system prompt, counts as known to all replicas: each
computes it once. Among replicas that are equally good, the organization's own load decides first, so that each
organization has about the same share of every replica, inside of which the scheduler is fair between organizations.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from syringa.types import EngineRequest

LOAD_FACTOR, LOAD_MARGIN = 1.25, 1.0  # a replica is overloaded above this factor of the mean, plus the margin
MAX_PREFIXES = 1 << 16
MAX_HOLDERS = 4  # replicas that are remembered for a prefix
COMMON_USES = 16  # a prefix that was used so often is one that many requests share
FIRST_POINT, FINE_POINTS, GROWTH = 32, 32, 1.125
# A prompt token that is not cached costs as much as so many steps of a running stream: a step computes hundreds.
PROMPT_TOKEN_LOAD = 1 / 256
_NOTHING = 1e-6  # loads are sums of floats


@dataclass(frozen=True, slots=True)
class RoutingKey:
    """What the router has to know of a request."""

    tenant: str
    length: int  # tokens of prompt and resumed output
    choices: int
    prefixes: tuple[tuple[int, bytes], ...]  # lengths of prefixes and their hashes, the longest first


@dataclass(slots=True)
class Assignment:
    """A request and the replica that runs it, until `ReplicaRouter.release` is called."""

    replica: str
    tenant: str
    load: float


@dataclass(slots=True)
class _ReplicaLoad:
    total: float = 0.0
    tenants: dict[str, float] = field(default_factory=dict)


class ReplicaRouter:
    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        # Replicas that served a prefix, and how often it was used, by prefix; the last used prefix last.
        self._holders: OrderedDict[bytes, tuple[tuple[str, ...], int]] = OrderedDict()
        self._loads: dict[str, _ReplicaLoad] = {}

    def choose(self, key: RoutingKey, candidates: Sequence[str]) -> Assignment:
        """Assign a request to one of the replicas, of which there is at least one."""
        loads = {each: self._load(each).total for each in candidates}
        limit = LOAD_FACTOR * sum(loads.values()) / len(loads) + LOAD_MARGIN
        available = {each: load for each, load in loads.items() if load <= limit}
        cached, chosen = self._longest_prefix(key, available)
        if chosen is None:
            chosen = self._least_loaded(key, available)
        self._remember(key, chosen)
        load = key.choices + (key.length - cached) * PROMPT_TOKEN_LOAD
        replica = self._load(chosen)
        replica.total += load
        replica.tenants[key.tenant] = replica.tenants.get(key.tenant, 0.0) + load
        return Assignment(chosen, key.tenant, load)

    def release(self, assignment: Assignment) -> None:
        """Forget the load of a request that has ended or moved."""
        replica = self._loads.get(assignment.replica)
        if replica is None:
            return
        replica.total -= assignment.load
        rest = replica.tenants.pop(assignment.tenant, 0.0) - assignment.load
        if rest > _NOTHING:
            replica.tenants[assignment.tenant] = rest

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these. Prefixes that only others held are dropped when they are the oldest."""
        for gone in self._loads.keys() - set(replicas):
            del self._loads[gone]

    def _load(self, replica: str) -> _ReplicaLoad:
        return self._loads.setdefault(replica, _ReplicaLoad())

    def _longest_prefix(self, key: RoutingKey, available: dict[str, float]) -> tuple[int, str | None]:
        for length, prefix in key.prefixes:
            known, uses = self._holders.get(prefix, ((), 0))
            holders = [each for each in known if each in available]
            if holders:
                return length, self._least_loaded(key, available if uses >= COMMON_USES else holders)
        return 0, None

    def _least_loaded(self, key: RoutingKey, replicas: Iterable[str]) -> str:
        longest = key.prefixes[0][1] if key.prefixes else b""

        def rank(replica: str) -> tuple[float, float, bytes]:
            load = self._load(replica)
            # Equal replicas are ordered by a hash of the prompt, in the same way in every API process.
            tie = hashlib.blake2b(longest + replica.encode(), digest_size=8).digest()
            return round(load.tenants.get(key.tenant, 0.0), 3), round(load.total, 3), tie

        return min(replicas, key=rank)

    def _remember(self, key: RoutingKey, replica: str) -> None:
        for _, prefix in key.prefixes:
            known, uses = self._holders.pop(prefix, ((), 0))
            others = [each for each in known if each != replica and each in self._loads]
            self._holders[prefix] = (replica, *others[: MAX_HOLDERS - 1]), uses + 1
        while len(self._holders) > self._max_prefixes:
            self._holders.popitem(last=False)


def routing_key(request: EngineRequest) -> RoutingKey:
    """Return what the router has to know of a request. Prefixes are hashed at a few lengths, not at every block."""
    known = len(request.prompt) + max((len(each.tokens) for each in request.resumed), default=0)
    hashed = hashlib.blake2b(request.cache_key, digest_size=16)
    for image in request.images:
        hashed.update(image.digest)
    prefixes: list[tuple[int, bytes]] = []
    if request.use_cache:
        data = memoryview(array("q", request.prompt)).cast("B")
        start = 0
        for point in _points(len(request.prompt)):
            hashed.update(data[8 * start : 8 * point])
            start = point
            prefixes.append((point, hashed.copy().digest()))
    prefixes.reverse()
    return RoutingKey(request.tenant, known, request.choices, tuple(prefixes))


def _points(length: int) -> Iterable[int]:
    """Yield the lengths at which a prompt's prefixes are hashed: close together at first, then growing by a factor."""
    point = FIRST_POINT
    while point <= length:
        yield point
        point = point + FIRST_POINT if point < FIRST_POINT * FINE_POINTS else int(point * GROWTH)
