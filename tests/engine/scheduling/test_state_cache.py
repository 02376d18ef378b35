"""The state cache of hybrid models: slots, snapshots, forks, preemption and aborts, without a model."""

from __future__ import annotations

import random

import pytest

from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.scheduling.scheduler import Scheduler
from syringa.engine.scheduling.scheduler_output import SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.scheduling.state_cache import (
    GENERATED_INTERVAL,
    MIN_SLOTS,
    SNAPSHOT_MULTIPLE,
    SNAPSHOT_SLOTS,
    StateCache,
    StatePool,
    count_slots,
    running_slots,
)
from tests.engine.scheduling.model_free_engine import ModelFreeEngine, sequence


class StatefulEngine(ModelFreeEngine):
    """A model-free engine whose state of a sequence is the list of its tokens, which the next step must continue."""

    def __init__(self, blocks: int, slots: int, limits: SchedulerLimits | None = None, *, caching: bool = True) -> None:
        super().__init__(blocks, limits, caching=caching)
        self.states = StateCache(slots, caching=caching)
        self.scheduler = Scheduler(self.pool, limits or SchedulerLimits(), self.states)
        self.memory: dict[int, list[int] | None] = dict.fromkeys(range(slots))
        self.computed_tokens = 0

    def _compute(self, output: SchedulerOutput) -> None:
        self._copy(output.state_copies)
        super()._compute(output)
        for item in output.scheduled:
            tokens, slot = item.sequence.tokens, item.sequence.state_slot
            state = [] if item.start == 0 else self.memory[slot]
            assert state == tokens[: item.start], "a state that does not belong to the sequence"
            if item.snapshot is not None:
                position, target = item.snapshot
                assert item.count > 1
                assert item.start < position <= item.start + item.count
                assert position % SNAPSHOT_MULTIPLE == 0
                self.memory[target] = tokens[:position]
            self.memory[slot] = tokens[: item.start + item.count]
            self.computed_tokens += item.count
        self._copy(output.forked_states)

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        targets = [target for _, target in copies]
        assert len(set(targets)) == len(targets), "two copies to one slot"
        self.memory |= {target: self.memory[source] for source, target in list(copies)}

    def check(self) -> None:
        super().check()
        pool, running = self.states.pool, self.scheduler.running
        slots = [one.state_slot for one in running]
        slots += [slot for one in running for _, slot in one.unsaved_snapshots]
        assert all(slot >= 0 for slot in slots)
        assert all(one.state_slot < 0 and not one.unsaved_snapshots for one in self.live if one not in running)
        every = [*slots, *pool._free, *pool._snapshots.values()]
        assert sorted(every) == list(range(pool.total)), "a slot is lost or has two owners"

    def assert_no_leak(self) -> None:
        pool = self.states.pool
        assert pool.free + pool.snapshots == pool.total
        assert not self.states._generated


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 31 * seed) % 997 for i in range(length)]


def test_state_pool_evicts_least_recently_used_snapshot() -> None:
    pool = StatePool(3)
    for name in (b"a", b"b", b"c"):
        slot = pool.allocate()
        assert slot is not None
        pool.save(name, slot)
    first = pool.find(b"a")
    assert pool.available == 3
    assert pool.allocate() not in (None, first)
    assert pool.has(b"a")
    assert not pool.has(b"b")
    assert [pool.allocate() is None for _ in range(3)] == [False, False, True]


def test_state_pool_keeps_first_snapshot_of_a_hash() -> None:
    pool = StatePool(3)
    one, two = pool.allocate(), pool.allocate()
    assert one is not None
    assert two is not None
    pool.save(b"a", one)
    pool.save(b"a", two)
    assert (pool.find(b"a"), pool.snapshots, pool.free) == (one, 1, 2)


def test_slots_are_counted_by_memory_and_leave_some_for_snapshots() -> None:
    assert count_slots(256, 100, 10**9) == 256 + SNAPSHOT_SLOTS
    assert count_slots(256, 100, 4_000) == 40
    assert count_slots(256, 100, 0) == MIN_SLOTS
    assert [running_slots(slots) for slots in (2, 4, 40, 272)] == [1, 3, 30, 256]


def test_prompt_is_reused_up_to_the_snapshot_at_its_end() -> None:
    engine = StatefulEngine(100, 8)
    engine.submit(sequence(prompt(200)))
    engine.run()
    assert engine.states.pool.snapshots == 1
    before = engine.computed_tokens
    again = engine.submit(sequence([*prompt(200), 1, 2, 3]))
    engine.run()
    assert again.cached == 192
    assert engine.computed_tokens - before == 11 + 3
    engine.assert_no_leak()


def test_prefix_without_snapshot_is_computed_again_and_saved_where_prompts_part() -> None:
    engine = StatefulEngine(200, 8)
    shared = prompt(150)
    found = []
    for seed in range(3):
        one = engine.submit(sequence(shared + prompt(100, seed + 1)))
        engine.run()
        found.append(one.cached)
    assert found == [0, 0, 128]  # the second one leaves the first one's blocks there
    engine.assert_no_leak()


def test_states_are_carried_between_chunks_of_a_prompt() -> None:
    engine = StatefulEngine(100, 8, SchedulerLimits(step_tokens=37, max_running=4))
    engine.submit(sequence(prompt(300)))
    engine.submit(sequence(prompt(90, 1)))
    engine.run()
    assert engine.states.pool.snapshots == 2
    engine.assert_no_leak()


def test_forks_get_copies_of_the_state() -> None:
    engine = StatefulEngine(100, 8, SchedulerLimits(max_running=6))
    engine.submit(sequence(prompt(70), choices=4, max_tokens=6))
    engine.run()
    assert engine.scheduler.preemptions == 0
    engine.assert_no_leak()


def test_forks_without_a_slot_are_computed_later() -> None:
    engine = StatefulEngine(100, 3, SchedulerLimits(max_running=2))
    engine.submit(sequence(prompt(70), choices=6, max_tokens=5))
    engine.run()
    assert engine.scheduler.preemptions > 0
    assert len(engine.finished) == 6
    engine.assert_no_leak()


def test_preempted_sequence_goes_on_from_its_snapshot() -> None:
    engine = StatefulEngine(16, 8, SchedulerLimits(max_running=4))
    for seed in range(4):
        engine.submit(sequence(prompt(70, seed), max_tokens=30))
    engine.run()
    assert engine.scheduler.preemptions > 0
    engine.assert_no_leak()


def test_generated_tokens_leave_one_snapshot_per_sequence() -> None:
    engine = StatefulEngine(100, 8)
    length = 10
    one = engine.submit(sequence(prompt(length), max_tokens=2 * GENERATED_INTERVAL + 40))
    engine.run()
    assert engine.states.pool.snapshots == 1
    tokens = one.tokens[: 2 * GENERATED_INTERVAL + 20]
    again = engine.submit(sequence(tokens))
    engine.run()
    assert again.cached == 2 * GENERATED_INTERVAL
    engine.assert_no_leak()


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_aborted_sequences_free_their_slots(steps: int) -> None:
    engine = StatefulEngine(100, 6, SchedulerLimits(step_tokens=80, max_running=4))
    ones = [engine.submit(sequence(prompt(100, seed), choices=2, max_tokens=9)) for seed in range(3)]
    for _ in range(steps):
        engine.step()
    for one in ones:
        for each in [each for each in engine.live if each.request is one.request]:
            engine.drop(each)
    engine.check()
    engine.assert_no_leak()


def test_no_snapshots_are_taken_without_prefix_caching() -> None:
    for engine, cached in ((StatefulEngine(100, 6, caching=False), True), (StatefulEngine(100, 6), False)):
        engine.submit(sequence(prompt(200), max_tokens=2 * GENERATED_INTERVAL, use_cache=cached))
        engine.run()
        assert engine.states.pool.snapshots == 0
        assert engine.states.pool.free == 6


def test_output_out_of_memory_restarts_its_sequences() -> None:
    engine = StatefulEngine(100, 8, SchedulerLimits(step_tokens=100, max_running=4))
    one = engine.submit(sequence(prompt(250)))
    engine.step()
    assert one.computed
    output = engine.scheduler.schedule()
    assert engine.scheduler.roll_back(output, copied=True) == []
    assert (one.computed, one.block_table, one.unsaved_snapshots) == (0, [], [])
    assert one.state_slot >= 0
    assert one in engine.scheduler.running
    engine.check()
    engine.run()
    engine.assert_no_leak()


def test_sequence_whose_state_was_not_restored_starts_over() -> None:
    engine = StatefulEngine(100, 8)
    engine.submit(sequence(prompt(200)))
    engine.run()
    again = engine.submit(sequence(prompt(200)))
    output = engine.scheduler.schedule()
    assert output.state_copies
    engine.scheduler.roll_back(output, copied=False)
    assert again not in engine.scheduler.running
    engine.check()
    engine.run()
    engine.assert_no_leak()


def test_restored_state_is_not_saved_again_before_it_is_in_its_slot() -> None:
    engine = StatefulEngine(100, 2, SchedulerLimits(step_tokens=1, max_running=1))
    one = engine.submit(sequence(prompt(10), max_tokens=GENERATED_INTERVAL + 10))
    while len(one.tokens) < GENERATED_INTERVAL + 2:
        engine.step()
    engine.scheduler._preempt(SchedulerOutput(), one)
    engine.step()
    assert one.computed == GENERATED_INTERVAL + 1
    tokens = [*one.tokens]
    engine.drop(one)
    again = engine.submit(sequence([*tokens, 1, 2]))
    engine.run()  # checks the states
    assert again.cached == GENERATED_INTERVAL
    engine.assert_no_leak()


def test_snapshot_that_was_not_copied_is_discarded_though_its_hash_is_known() -> None:
    engine = StatefulEngine(100, 8)
    one = engine.submit(sequence(prompt(10), max_tokens=GENERATED_INTERVAL + 10))
    while one.computed < GENERATED_INTERVAL:
        engine.step()
    output = engine.scheduler.schedule()
    assert output.state_copies
    engine.scheduler.cache_full_blocks(one)  # when the tokens of the step before are read
    assert engine.states.pool.snapshots == 1
    engine.scheduler.roll_back(output, copied=False)
    assert engine.states.pool.snapshots == 0
    engine.check()
    engine.run()
    engine.assert_no_leak()


def test_random_requests_keep_their_states() -> None:
    reused = preempted = 0
    for seed in range(6):
        submitted, preemptions = run_random_requests(random.Random(seed))
        reused += sum(one.cached > 0 for one in submitted)
        preempted += preemptions
    assert reused > 0
    assert preempted > 0


def run_random_requests(rng: random.Random) -> tuple[list[Sequence], int]:
    """Run two dozen requests, some of which are aborted. Return them and the number of preemptions."""
    limits = SchedulerLimits(step_tokens=rng.choice([24, 100, 600]), max_running=rng.choice([2, 4, 7]))
    engine = StatefulEngine(rng.choice([40, 90]), rng.choice([3, 6, 12]), limits)
    submitted: list[Sequence] = []
    while len(submitted) < 25 or engine.live:
        if len(submitted) < 25 and rng.random() < 0.4:
            base = prompt(rng.choice([64, 130, 200]), rng.randrange(2))
            tokens = base[: rng.choice([len(base), rng.randint(1, len(base))])] + prompt(rng.randint(0, 80), 2)
            new = sequence(
                tokens,
                tenant=str(rng.randrange(2)),
                choices=rng.choice([1, 1, 1, 3]),
                max_tokens=rng.randint(1, 40),
                use_cache=rng.random() < 0.9,
            )
            submitted.append(engine.submit(new))
        elif engine.live and rng.random() < 0.02:
            engine.drop(rng.choice(engine.live))
        if engine.live:
            engine.step()
    engine.assert_no_leak()
    return submitted, engine.scheduler.preemptions
