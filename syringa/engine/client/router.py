"""The router: which replica of a model runs a request. Pure bookkeeping, without asyncio and without a clock.

Prefix affinity with bounded load. A request goes to the replica that served the longest known prefix of its prompt,
unless that one has more than its share of the load, by more than the prefix saves; then to a replica with a shorter
prefix, and else to the least loaded one. A prefix that many requests begin with, such as a system prompt, counts as
known to all replicas: each computes it once. Among replicas that are equally good, the organization's own load decides
first, so that each organization has about the same share of every replica, inside of which the scheduler is fair
between organizations.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from syringa.types import EmbeddingRequest, EngineRequest

LOAD_FACTOR, LOAD_MARGIN = 1.25, 1.0  # a replica is overloaded above this factor of the mean, plus the margin
MAX_PREFIXES = 1 << 17  # those of about 3,000 prompts, in 25 MB
MAX_HOLDERS = 4  # replicas that are remembered for a prefix
COMMON_USES = 16  # a prefix that so many requests have continued in different ways is one that many share
POINT_TOKENS, FINE_TOKENS = 32, 1024  # between two hashed prefixes, in so many last tokens of a prompt
# A prompt token that is not cached costs as much as so many steps of a running stream: a step computes hundreds.
PROMPT_TOKEN_LOAD = 1 / 256
# Loads are sums of multiples of 1/256, which floats represent exactly: they can be compared, and return to zero.
_MASK, _MIX = (1 << 64) - 1, 0x9E3779B97F4A7C15  # an odd number: the golden ratio's fraction, times 2 to the 64th


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
    cached: int = 0  # tokens of the prompt that the router takes for cached
    counted_in: _ReplicaLoad | None = None  # not by id: a replica that was forgotten may return with the same one


@dataclass(slots=True)
class _ReplicaLoad:
    hash: int  # of its id, in 64 bits
    total: float = 0.0
    tenants: dict[str, float] = field(default_factory=dict)


class ReplicaRouter:
    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        # Replicas that served a prefix, and how often it was continued, by prefix; the last used prefix last.
        self._holders: OrderedDict[bytes, tuple[tuple[str, ...], int]] = OrderedDict()
        self._loads: dict[str, _ReplicaLoad] = {}

    def choose(self, key: RoutingKey, candidates: Sequence[str]) -> Assignment:
        """Assign a request to one of the replicas, of which there is at least one."""
        loads = self._loads
        for each in [each for each in candidates if each not in loads]:
            loads[each] = _ReplicaLoad(_hash(each.encode()))
        limit = LOAD_FACTOR * sum([loads[each].total for each in candidates]) / len(candidates) + LOAD_MARGIN
        cached, chosen = self._longest_prefix(key, candidates, limit)
        self._remember(key, chosen)
        load = key.choices + (key.length - cached) * PROMPT_TOKEN_LOAD
        replica = loads[chosen]
        replica.total += load
        replica.tenants[key.tenant] = replica.tenants.get(key.tenant, 0.0) + load
        return Assignment(chosen, key.tenant, load, cached, replica)

    def release(self, assignment: Assignment) -> None:
        """Forget the load of a request that has ended or moved."""
        replica = assignment.counted_in
        if replica is None:
            return
        replica.total -= assignment.load
        rest = replica.tenants.pop(assignment.tenant, 0.0) - assignment.load
        if rest > 0.0:
            replica.tenants[assignment.tenant] = rest

    def shed(self, waiting: Sequence[Assignment], target: str) -> list[int]:
        """Return which requests should move to a new replica, so that it has at most the load of those they leave.

        `waiting`: requests of other replicas that have not begun, in the order in which they came. They are returned as
        positions in it.
        """
        new = self._loads.get(target)
        total, moving = new.total if new is not None else 0.0, []
        loads: dict[str, float] = {}
        for position, each in enumerate(waiting):
            if each.replica != target and each.counted_in is not None:
                left = loads.get(each.replica, each.counted_in.total) - each.load
                if total + each.load <= left:
                    moving.append(position)
                    total, loads[each.replica] = total + each.load, left
        return moving

    def retain(self, replicas: Collection[str]) -> None:
        """Forget all replicas but these. Prefixes that only others held are dropped when they are the oldest."""
        for gone in self._loads.keys() - set(replicas):
            del self._loads[gone]

    def _longest_prefix(self, key: RoutingKey, candidates: Sequence[str], limit: float) -> tuple[int, str]:
        """Return the replica with the longest prefix among those that are not overloaded, and how long that is."""
        loads, table = self._loads, self._holders
        for length, prefix in key.prefixes:
            if (entry := table.get(prefix)) is None:
                continue
            known, uses = entry
            most = limit + length * PROMPT_TOKEN_LOAD  # it need not compute the prefix
            holders = [each for each in known if each in loads and loads[each].total <= most and each in candidates]
            if holders and uses >= COMMON_USES:
                return length, self._least_loaded(key, candidates, limit)
            if holders:
                return length, self._least_loaded(key, holders, most)
        return 0, self._least_loaded(key, candidates, limit)

    def _least_loaded(self, key: RoutingKey, replicas: Sequence[str], limit: float) -> str:
        """Return the replica with the least load of the organization, and of these the one with the least in all."""
        loads, tenant = self._loads, key.tenant
        best: list[str] = []
        best_own = best_total = math.inf
        for each in replicas:
            load = loads[each]
            total, own = load.total, load.tenants.get(tenant, 0.0)
            if own > best_own or total > limit or (own == best_own and total > best_total):
                continue
            if own < best_own or total < best_total:
                best, best_own, best_total = [], own, total
            best.append(each)
        if len(best) == 1:
            return best[0]
        # Equal replicas are ordered by a hash of the prompt, in the same way in every API process.
        prompt = _hash(key.prefixes[0][1] if key.prefixes else b"")
        return min(best, key=lambda each: (prompt ^ loads[each].hash) * _MIX & _MASK)

    def _remember(self, key: RoutingKey, replica: str) -> None:
        holders = self._holders
        # A request continues the longest prefix that is known. Where that is all of it, it may be the same request
        # again, or a conversation that has hardly grown.
        continues = False
        fresh = (replica,), 1
        for index, (_, prefix) in enumerate(key.prefixes):
            if (entry := holders.get(prefix)) is None:
                holders[prefix] = fresh
                continue
            known, uses = entry
            if not continues:
                continues = True
                uses += index > 0
                holders[prefix] = known, uses
            if known[0] != replica:
                others = [each for each in known if each != replica and each in self._loads]
                holders[prefix] = (replica, *others[: MAX_HOLDERS - 1]), uses
            holders.move_to_end(prefix)
        while len(holders) > self._max_prefixes:
            holders.popitem(last=False)


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
        for point in prefix_points(len(request.prompt)):
            hashed.update(data[8 * start : 8 * point])
            start = point
            prefixes.append((point, hashed.copy().digest()))
    prefixes.reverse()
    return RoutingKey(request.tenant, known, request.choices, tuple(prefixes))


def embedding_key(request: EmbeddingRequest) -> RoutingKey:
    """Return what the router has to know of a request for embeddings, of which no replica caches anything."""
    return RoutingKey(request.tenant, sum(map(len, request.inputs)), 1, ())


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def prefix_points(length: int) -> list[int]:
    """Return the lengths at which a prompt's prefixes are hashed, the shortest first.

    They are close together at the end of the prompt, where the next turn of a conversation continues it. Before the
    last `FINE_TOKENS` they are twice as far apart in each part that is twice as long. All are multiples of their
    distance, so that a longer prompt has some of the same.
    """
    points: list[int] = []
    step, fine = POINT_TOKENS, FINE_TOKENS
    point = length - length % step
    while point > 0:
        points.append(point)
        while length - point >= fine:
            step, fine = 2 * step, 2 * fine
        point = (point - 1) // step * step
    points.reverse()
    return points
