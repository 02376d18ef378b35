from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from syringa.engine.client.router import (
    COMMON_USES,
    LOAD_FACTOR,
    LOAD_MARGIN,
    Assignment,
    ReplicaRouter,
    prefix_points,
    routing_key,
)
from syringa.types import EngineRequest, Image, ResumedChoice
from tests.engine.processes.supervisor_harness import request

REPLICAS = ["a", "b", "c", "d"]


def prompt(*parts: int, length: int = 100) -> list[int]:
    """Return tokens that are made of parts, each of so many tokens."""
    return [1000 * part + each for part in parts for each in range(length)]


def make(tokens: list[int], tenant: str = "t", **fields: object) -> EngineRequest:
    return msgspec.structs.replace(request("r"), prompt=tokens, tenant=tenant, **fields)


def choose(router: ReplicaRouter, tokens: list[int], tenant: str = "t", replicas: list[str] = REPLICAS) -> Assignment:
    return router.choose(routing_key(make(tokens, tenant)), replicas)


def test_routing_key_has_equal_hashes_for_equal_prefixes_only() -> None:
    first, second = routing_key(make(prompt(1, 2, 3))), routing_key(make(prompt(1, 2, 4)))
    shared = set(first.prefixes) & set(second.prefixes)
    assert max(length for length, _ in shared) == 192  # of 200
    assert [length for length, _ in first.prefixes] == sorted((length for length, _ in first.prefixes), reverse=True)
    for other in (
        make(prompt(1, 2, 3), cache_key=b"other"),
        make(prompt(1, 2, 3), images=(Image(data=b"", digest=b"d"),)),
        make(prompt(1, 2, 3), use_cache=False),
    ):
        assert not set(first.prefixes) & set(routing_key(other).prefixes)


def test_routing_key_of_long_prompt_has_few_hashes() -> None:
    assert len(routing_key(make(list(range(100_000)))).prefixes) < 150
    assert routing_key(make([1, 2, 3])).prefixes == ()


@pytest.mark.parametrize("length", [31, 32, 1024, 1500, 9000, 50_001])
@pytest.mark.parametrize("growth", [1, 40, 900, 5000])
def test_prefix_points_of_a_longer_prompt_include_one_near_the_end_of_a_shorter_one(length: int, growth: int) -> None:
    """Within about a sixteenth of what has been added."""
    before, after = prefix_points(length), prefix_points(length + growth)
    assert before == sorted(set(before))
    assert length - max({0, *before} & {0, *after}) <= 32 + growth / 16


def test_routing_key_counts_resumed_tokens() -> None:
    resumed = make(prompt(1), resumed=(ResumedChoice([1] * 50), ResumedChoice([1] * 20)))
    assert routing_key(resumed).length == 150


def test_router_follows_the_longest_prefix() -> None:
    router = ReplicaRouter()
    homes = {}
    for part in range(20):
        assignment = choose(router, prompt(part, part + 1))
        homes[part] = assignment.replica
        router.release(assignment)
    assert set(homes.values()) == set(REPLICAS)
    for part, home in homes.items():
        assignment = choose(router, prompt(part, part + 1, 99))
        router.release(assignment)
        assert assignment.replica == home


def test_router_spreads_requests_that_share_a_common_prefix() -> None:
    """Without load, all would go to the replica that was the first to have it."""
    router = ReplicaRouter()
    used: Counter[str] = Counter()
    for part in range(COMMON_USES, COMMON_USES + 60):
        assignment = choose(router, prompt(1, part))
        router.release(assignment)
        used[assignment.replica] += 1
    assert used.most_common(1)[0][1] >= COMMON_USES  # at first
    assert set(used) == set(REPLICAS)


def test_router_avoids_holder_of_prefix_above_the_load_bound() -> None:
    router = ReplicaRouter()
    assignments = [choose(router, prompt(1, part)) for part in range(40)]
    counts = Counter(each.replica for each in assignments)
    mean = len(assignments) / len(REPLICAS)
    assert set(counts) == set(REPLICAS)
    assert max(counts.values()) <= LOAD_FACTOR * mean + LOAD_MARGIN + 1
    for each in assignments:
        router.release(each)
    assert not any(load.total > 1e-6 or load.tenants for load in router._loads.values())


def test_router_follows_a_prefix_to_a_busy_replica_if_it_saves_more_than_that_has_to_do() -> None:
    router = ReplicaRouter()
    chat = list(range(2000))
    home = choose(router, chat).replica  # still runs, and is all the load there is
    assert router._loads[home].total > LOAD_FACTOR * router._loads[home].total / len(REPLICAS) + LOAD_MARGIN
    assert choose(router, [*chat, *range(5000, 5100)]).replica == home
    router = ReplicaRouter()
    home = choose(router, chat).replica
    assert choose(router, [*chat[:64], *range(5000, 5100)]).replica != home


def test_router_chooses_among_available_replicas_only() -> None:
    router = ReplicaRouter()
    home = choose(router, prompt(1, 2)).replica
    others = [each for each in REPLICAS if each != home]
    assert choose(router, prompt(1, 2, 3), replicas=others).replica in others


def test_router_spreads_each_organization_over_all_replicas() -> None:
    router = ReplicaRouter()
    generator = random.Random(5)
    counts: dict[str, Counter[str]] = {"big": Counter(), "small": Counter()}
    for number in range(120):
        tenant = "small" if number % 6 == 0 else "big"
        tokens = [generator.randrange(10**6) for _ in range(64)]
        counts[tenant][choose(router, tokens, tenant).replica] += 1
    assert set(counts["big"].values()) == {25}
    assert set(counts["small"].values()) == {5}


def test_router_sheds_waiting_requests_until_a_new_replica_has_as_much_load() -> None:
    router = ReplicaRouter()
    assignments = [choose(router, prompt(part), replicas=["a", "b"]) for part in range(12)]
    moving = router.shed(assignments, "c")
    loads = Counter(each.replica for each in assignments)
    left = loads - Counter(assignments[position].replica for position in moving)
    assert moving == sorted(moving)
    assert left == {"a": 4, "b": 4}
    assert len(moving) == 4
    assert moving[0] == 0  # those that came first
    taken = choose(router, prompt(99), replicas=["c"])
    assert len(router.shed(assignments, "c")) == 3
    assert router.shed([taken], "c") == []


def test_router_forgets_replicas_that_are_gone() -> None:
    router = ReplicaRouter()
    gone = choose(router, prompt(1, 2))
    left = [each for each in REPLICAS if each != gone.replica]
    router.retain(left)
    router.release(gone)  # of a replica that is not known any more
    assert choose(router, prompt(1, 2), replicas=left).replica in left
    assert gone.replica not in router._loads


def test_router_does_not_take_the_load_of_a_replica_from_one_that_returns_with_its_id() -> None:
    router = ReplicaRouter()
    before = choose(router, prompt(1), replicas=["a"])
    router.retain([])
    after = choose(router, prompt(1), replicas=["a"])
    router.release(before)
    assert router._loads["a"].total == after.load > 0
    router.release(after)
    assert router._loads["a"].total == 0


def test_router_table_is_bounded() -> None:
    router = ReplicaRouter(max_prefixes=50)
    for part in range(100):
        router.release(choose(router, prompt(part, part + 1)))
    assert len(router._holders) == 50


@pytest.mark.parametrize("seed", range(3))
def test_router_finds_the_replica_of_multi_turn_chats(seed: int) -> None:
    """Chats with one system prompt return to their replica, unless it has more than its share of the load."""
    router, generator = ReplicaRouter(), random.Random(seed)
    system = prompt(7, length=300)
    chats = [system + [generator.randrange(10**6) for _ in range(100)] for _ in range(100)]
    homes: dict[int, str] = {}
    stayed = turns = 0
    running: list[Assignment] = []
    for _ in range(800):
        number = generator.randrange(len(chats))
        assignment = choose(router, chats[number])
        running.append(assignment)
        if len(running) > 40:
            router.release(running.pop(generator.randrange(len(running))))
        if number in homes:
            turns += 1
            stayed += homes[number] == assignment.replica
        homes[number] = assignment.replica
        chats[number] += [generator.randrange(10**6) for _ in range(50)]
    assert stayed / turns > 0.9


@pytest.mark.parametrize("system", [20, 6000])
def test_router_keeps_long_conversations_with_many_short_turns_on_their_replica(system: int) -> None:
    """Also those of agents with one long system prompt. Turns are shorter than the distance of prefixes before them."""
    router, generator = ReplicaRouter(), random.Random(3)
    chats = [[*range(system), *(generator.randrange(10**6) for _ in range(50))] for _ in range(20)]
    homes: list[set[str]] = [set() for _ in chats]
    for _ in range(24):
        for chat, home in zip(chats, homes, strict=True):
            assignment = choose(router, chat)
            router.release(assignment)
            home.add(assignment.replica)
            chat += [generator.randrange(10**6) for _ in range(40)]
    assert [len(home) for home in homes] == [1] * len(chats)


def test_router_does_not_take_a_repeated_prompt_for_one_that_many_requests_share() -> None:
    router = ReplicaRouter()
    used = set()
    for _ in range(2 * COMMON_USES):
        assignment = choose(router, prompt(1, 2))
        router.release(assignment)
        used.add(assignment.replica)
    assert len(used) == 1
