"""The router in a simulated fleet: multi-turn chats find their cached prefixes, and no replica gets too much.

Time is simulated, and all draws are seeded. A replica computes steps one after the other: up to `STEP_TOKENS` of
prompts, and one token of each running answer. It caches whole chats, the least recently used of which is evicted.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from syringa.engine.client.router import Assignment, ReplicaRouter, RoutingKey, routing_key
from tests.engine.processes.supervisor_harness import request

CHATS, TURNS = 200, 6
SYSTEM, QUESTION, ANSWER = 300, 40, 60  # tokens
CACHE = 60_000  # tokens of one replica
STEP_TOKENS = 512
THINKING_SECONDS = 12.0
NAMES = ("a", "b", "c", "d")

Choose = Callable[[RoutingKey, list["SimulatedReplica"]], str]


@dataclass
class ChatTurn:
    chat: int
    key: RoutingKey
    length: int
    arrived: float
    left: int = 0  # prompt tokens to compute
    answer_left: int = ANSWER
    first_token_at: float = 0.0
    assignment: Assignment | None = None


@dataclass
class SimulatedReplica:
    name: str
    capacity: int
    speed: float = 1.0
    waiting: deque[ChatTurn] = field(default_factory=deque)
    running: list[ChatTurn] = field(default_factory=list)
    cached: OrderedDict[int, int] = field(default_factory=OrderedDict)  # tokens by chat
    hits: int = 0
    total: int = 0
    busy: bool = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def submit(self, turn: ChatTurn) -> None:
        shared = SYSTEM if self.cached else 0
        found = min(max(self.cached.get(turn.chat, 0), shared), turn.length - 1)
        self.hits += found
        self.total += turn.length
        turn.left = turn.length - found
        self.waiting.append(turn)

    def step(self, now: float) -> tuple[float, list[ChatTurn]]:
        """Compute a step. Return when it ends, and the turns that have ended with it."""
        budget = STEP_TOKENS
        begun = []
        while self.waiting and budget:
            turn = self.waiting[0]
            part = min(budget, turn.left)
            turn.left -= part
            budget -= part
            if not turn.left:
                begun.append(self.waiting.popleft())
        end = now + (0.01 + 0.0002 * (STEP_TOKENS - budget) + 0.0005 * len(self.running)) / self.speed
        for turn in self.running:
            turn.answer_left -= 1
        for turn in begun:
            turn.first_token_at, turn.answer_left = end, turn.answer_left - 1
        self.running += begun
        ended = [turn for turn in self.running if not turn.answer_left]
        self.running = [turn for turn in self.running if turn.answer_left]
        for turn in ended:
            self.cached[turn.chat] = turn.length + ANSWER
            self.cached.move_to_end(turn.chat)
            while sum(self.cached.values()) > self.capacity:
                self.cached.popitem(last=False)
        return end, ended


def simulate(replicas: list[SimulatedReplica], choose: Choose, release: Callable[[ChatTurn], None]) -> list[float]:
    """Run all chats, and return the times to the first token."""
    draw = random.Random(17)
    prompts = [[*range(SYSTEM), *(draw.randrange(10**6) for _ in range(QUESTION))] for _ in range(CHATS)]
    turns = [0] * CHATS
    order = itertools.count()
    events: list[tuple[float, int, int | SimulatedReplica]] = []
    for chat in range(CHATS):
        heapq.heappush(events, (draw.uniform(0, THINKING_SECONDS), next(order), chat))
    waits = []
    by_name = {replica.name: replica for replica in replicas}
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, int):
            made = msgspec.structs.replace(request("r"), prompt=prompts[event], tenant="t")
            turn = ChatTurn(event, routing_key(made), len(prompts[event]), now)
            replica = by_name[choose(turn.key, replicas)]
            replica.submit(turn)
            turn.assignment = Assignment(replica.name, "t", 0.0)
            if not replica.busy:
                replica.busy = True
                heapq.heappush(events, (now, next(order), replica))
            continue
        if not event.load:
            event.busy = False
            continue
        end, ended = event.step(now)
        heapq.heappush(events, (end, next(order), event))
        for turn in ended:
            waits.append(turn.first_token_at - turn.arrived)
            release(turn)
            turns[turn.chat] += 1
            if turns[turn.chat] < TURNS:
                prompts[turn.chat] += [draw.randrange(10**6) for _ in range(ANSWER + QUESTION)]
                heapq.heappush(events, (end + draw.expovariate(1 / THINKING_SECONDS), next(order), turn.chat))
    assert len(waits) == CHATS * TURNS
    return sorted(waits)


def simulate_router() -> tuple[list[SimulatedReplica], list[float]]:
    replicas = [SimulatedReplica(name, CACHE) for name in NAMES]
    router = ReplicaRouter()
    assignments: dict[int, Assignment] = {}

    def choose(key: RoutingKey, replicas: list[SimulatedReplica]) -> str:
        assignment = router.choose(key, [replica.name for replica in replicas])
        assignments[id(key)] = assignment
        return assignment.replica

    return replicas, simulate(replicas, choose, lambda turn: router.release(assignments.pop(id(turn.key))))


def share(replicas: list[SimulatedReplica]) -> float:
    return sum(replica.hits for replica in replicas) / sum(replica.total for replica in replicas)


def test_router_keeps_the_cached_share_of_one_large_replica() -> None:
    routed, _ = simulate_router()
    single = [SimulatedReplica("a", 4 * CACHE, speed=4.0)]
    simulate(single, lambda key, replicas: "a", lambda turn: None)
    assert share(routed) >= 0.9 * share(single)


def test_router_does_not_delay_first_tokens_against_a_least_loaded_one() -> None:
    _, waits = simulate_router()
    replicas = [SimulatedReplica(name, CACHE) for name in NAMES]
    least = simulate(replicas, lambda key, found: min(found, key=lambda replica: replica.load).name, lambda turn: None)
    position = round(0.99 * len(waits)) - 1
    assert waits[position] <= 1.5 * least[position]
