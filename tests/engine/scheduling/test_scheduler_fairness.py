"""Fairness of the scheduler between tenants, measured in steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.limits import ATTENTION_SPAN, PROMPT_QUANTUM_STEPS, QueueFull, SchedulerLimits
from syringa.engine.scheduling.scheduler_output import SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.model_free_engine import ModelFreeEngine, sequence
from tests.tiers import examples


def tokens_for(output: SchedulerOutput, tenant: str) -> int:
    return sum(item.count for item in output.scheduled if item.sequence.request.tenant == tenant)


def steps_to_first_token(engine: ModelFreeEngine, one: Sequence, limit: int = 200) -> int:
    for count in range(1, limit):
        engine.step()
        if one.generated:
            return count
    raise AssertionError(f"no token in {limit} steps")


def noisy(engine: ModelFreeEngine, count: int, length: int, tenant: str = "noisy", **options: int) -> list[Sequence]:
    return [engine.submit(sequence([number] * length, tenant=tenant, **options)) for number in range(count)]


# The budget


@pytest.mark.parametrize("running", [0, 1, 30], ids=["none begun", "one begun", "all begun"])
def test_small_prompt_of_another_tenant_is_in_the_next_step(running: int) -> None:
    engine = ModelFreeEngine(2600, SchedulerLimits(step_tokens=512, max_running=256))
    noisy(engine, 40, 1000, max_tokens=64)
    for _ in range(2 * running):
        engine.step()
    small = engine.submit(sequence([7] * 100, tenant="small"))
    assert steps_to_first_token(engine, small) == 1
    assert engine.scheduler.preemptions == 0


def test_small_prompt_does_not_wait_for_admitted_long_prompts() -> None:
    """Scoring uses small chunks, so many prompts run at once and each is far from complete."""
    engine = ModelFreeEngine(2600, SchedulerLimits(step_tokens=512, max_running=256))
    for number in range(40):
        engine.submit(sequence([number] * 1000, tenant="noisy", scoring=True))
    for _ in range(10):
        engine.step()
    assert sum(s.needed > 1 for s in engine.scheduler.running) > 3
    small = engine.submit(sequence([7] * 100, tenant="small"))
    assert steps_to_first_token(engine, small) == 1


def test_started_prompt_is_not_interrupted_within_its_quantum() -> None:
    engine = ModelFreeEngine(3000, SchedulerLimits(step_tokens=512, max_running=256))
    noisy(engine, 30, 1000, max_tokens=64)
    for _ in range(40):
        engine.step()
    assert any(s.needed > 1 for s in engine.scheduler.running)
    small = engine.submit(sequence([7] * 1000, tenant="small"))
    # Alone it would take two steps of 512; decoding and attention to a long context take a part of each step.
    assert steps_to_first_token(engine, small) <= 4


def test_prompt_is_interrupted_after_its_quantum() -> None:
    engine = ModelFreeEngine(2600, SchedulerLimits(step_tokens=100, max_running=8))
    noisy(engine, 3, 10_000)
    other = engine.submit(sequence([7] * 10_000, tenant="other"))
    served = {"noisy": 0, "other": 0}
    for _ in range(60):
        output = engine.step()
        for tenant in served:
            served[tenant] += tokens_for(output, tenant)
        assert abs(served["noisy"] - served["other"]) <= PROMPT_QUANTUM_STEPS * 100
    assert other.computed > 2500


def test_three_tenants_share_the_budget_equally() -> None:
    engine = ModelFreeEngine(1000, SchedulerLimits(step_tokens=64, max_running=64), caching=False)
    for tenant, count, length in (("one", 80, 40), ("two", 16, 200), ("three", 3, 1000)):
        noisy(engine, count, length, tenant, max_tokens=1)
    served = dict.fromkeys(("one", "two", "three"), 0)
    for _ in range(80):
        output = engine.step()
        for tenant in served:
            served[tenant] += tokens_for(output, tenant)
    assert sum(served.values()) > 0.95 * 80 * 64
    assert min(served.values()) > 1000
    assert max(served.values()) - min(served.values()) <= PROMPT_QUANTUM_STEPS * 64
    small = engine.submit(sequence([7] * 40, tenant="small"))
    assert steps_to_first_token(engine, small) == 1


def test_idle_time_is_not_credit() -> None:
    engine = ModelFreeEngine(1000, SchedulerLimits(step_tokens=50, max_running=50))
    noisy(engine, 40, 200, "busy", max_tokens=1)
    early = engine.submit(sequence([7] * 10, tenant="late", max_tokens=1))
    for _ in range(100):
        engine.step()
    assert early in engine.finished
    noisy(engine, 40, 200, "late", max_tokens=1)
    served = {"busy": 0, "late": 0}
    for _ in range(50):
        output = engine.step()
        for tenant in served:
            served[tenant] += tokens_for(output, tenant)
    assert min(served.values()) > 1000
    assert abs(served["busy"] - served["late"]) <= PROMPT_QUANTUM_STEPS * 50


def test_streams_get_a_token_in_every_step_beside_long_prompts() -> None:
    """A step never exceeds its budget, and has a token for every sequence that decodes."""
    engine = ModelFreeEngine(1200, SchedulerLimits(step_tokens=256, max_running=64))
    streams = [s for t in "abc" for s in noisy(engine, 4, 10, t, max_tokens=400)]
    engine.step()
    for tenant in "abcd":
        noisy(engine, 2, 2000, tenant, max_tokens=2)
    for _ in range(50):
        waiting = [s for s in engine.scheduler.running if s.needed == 1]
        output = engine.step()
        prompts = [item for item in output.scheduled if item.sequence not in waiting]
        assert {id(item.sequence) for item in output.scheduled} >= {id(s) for s in waiting}
        cost = sum(item.count * (ATTENTION_SPAN + item.start) / ATTENTION_SPAN for item in prompts)
        assert len(waiting) + cost <= 256 + len(prompts) + 3  # costs are rounded up
        assert prompts
    assert all(s.generated == 51 for s in streams)


# Slots and blocks


def full_slots() -> ModelFreeEngine:
    engine = ModelFreeEngine(200, SchedulerLimits(step_tokens=512, max_running=16))
    noisy(engine, 40, 20, max_tokens=40)
    return engine


def full_blocks() -> ModelFreeEngine:
    engine = ModelFreeEngine(100, SchedulerLimits(step_tokens=512, max_running=256))
    noisy(engine, 60, 40, max_tokens=60)
    return engine


def no_budget() -> ModelFreeEngine:
    engine = ModelFreeEngine(200, SchedulerLimits(step_tokens=1, max_running=16))
    noisy(engine, 40, 1, max_tokens=40)
    return engine


@pytest.mark.parametrize("make", [full_slots, full_blocks, no_budget])
def test_idle_tenant_preempts_youngest_of_noisy_tenant(make: Callable[[], ModelFreeEngine]) -> None:
    engine = make()
    for _ in range(5):
        engine.step()
    assert len(engine.scheduler.waiting)
    before = list(engine.scheduler.running)
    preempted = engine.scheduler.preemptions
    small = engine.submit(sequence([7] * 16, tenant="small", max_tokens=20))
    steps = steps_to_first_token(engine, small)
    assert steps <= (1 if make is not no_budget else 16)
    preempted_now = [s for s in before if s not in engine.scheduler.running and s in engine.live]
    assert preempted_now == before[len(before) - len(preempted_now) :], "the youngest are preempted first"
    assert engine.scheduler.preemptions - preempted == len(preempted_now) <= 2
    engine.run(5000)
    assert [s for s in engine.finished if s in preempted_now] == preempted_now
    assert all(s.generated == s.request.stopping.max_tokens for s in engine.finished)


def test_idle_tenant_is_admitted_again_and_again() -> None:
    engine = full_blocks()
    for number in range(20):
        small = engine.submit(sequence([100 + number] * 40, tenant="small", max_tokens=10))
        assert steps_to_first_token(engine, small) == 1
        while small in engine.live:
            engine.step()
    engine.run(5000)


def test_admitted_prompt_keeps_its_blocks_over_several_steps() -> None:
    """The noisy tenant's streams grow while it is computed, at their own expense."""
    engine = ModelFreeEngine(200, SchedulerLimits(step_tokens=64, max_running=40), caching=False)
    noisy(engine, 40, 64, max_tokens=200)
    for _ in range(40):
        engine.step()
    small = engine.submit(sequence([7] * 600, tenant="small", max_tokens=5))
    assert not engine.pool.available > 600 // BLOCK_SIZE
    computed = []
    while not small.generated:
        engine.step()
        computed.append(small.computed)
    assert computed == sorted(computed), "it was preempted"
    assert len(computed) < 100
    engine.run(50_000)


def test_blocks_promised_to_admitted_prompt_are_not_given_away() -> None:
    engine = ModelFreeEngine(40, SchedulerLimits(step_tokens=16, max_running=8), caching=False)
    one = engine.submit(sequence([1] * 400, tenant="one", max_tokens=3))
    engine.step()
    noisy(engine, 3, 260, "other", max_tokens=3)
    engine.scheduler.interactive.token_counters.begin_step(["one", "other"])
    engine.scheduler.interactive.token_counters.charge("one", 300)  # the other tenant is next
    engine.run()
    assert engine.scheduler.preemptions == 0
    assert engine.finished[0] is one


def test_tenant_does_not_preempt_itself_for_waiting_requests() -> None:
    engine = full_slots()
    for _ in range(50):
        engine.step()
    assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_tenants_do_not_preempt_each_other_alternately(slots: int) -> None:
    engine = ModelFreeEngine(100, SchedulerLimits(step_tokens=64, max_running=slots))
    for number in range(30):
        for tenant in "abcde":
            engine.submit(sequence([number] * 20, tenant=tenant, max_tokens=10))
    engine.run()
    # With fewer slots than tenants, a tenant with one slot has its share.
    assert engine.scheduler.preemptions <= (0 if slots < 5 else 30)
    assert engine.steps < 150 * 30 / slots * 1.5


def test_tenant_that_was_served_more_does_not_preempt() -> None:
    engine = ModelFreeEngine(2600, SchedulerLimits(step_tokens=512, max_running=4))
    noisy(engine, 20, 20, max_tokens=50)
    engine.step()
    greedy = engine.submit(sequence([7] * 2000, tenant="greedy", max_tokens=1))
    while greedy in engine.live:
        engine.step()
    taken = engine.scheduler.preemptions
    engine.submit(sequence([8] * 2000, tenant="greedy", max_tokens=1))
    engine.step()
    assert engine.scheduler.preemptions == taken
    engine.run()


def test_request_above_fair_share_is_not_starved() -> None:
    """It preempts none, because no tenant is above its share; but no later request is admitted before it."""
    engine = ModelFreeEngine(40, SchedulerLimits(step_tokens=512, max_running=64), caching=False)
    guests = [f"guest {number}" for number in range(10)]
    for number, guest in enumerate(guests):
        engine.submit(sequence([number] * 40, tenant=guest, max_tokens=10 + number))
    engine.step()
    large = engine.submit(sequence([7] * 30 * BLOCK_SIZE, tenant="large", max_tokens=2))
    for count in range(100):
        if large.begun:
            break
        for guest in guests:
            if not any(s.request.tenant == guest for s in engine.live):
                engine.submit(sequence([count] * 40, tenant=guest, max_tokens=20))
        engine.step()
    assert count < 30
    assert engine.scheduler.preemptions == 0
    engine.run()


def test_blocked_request_of_running_tenant_does_not_block_idle_tenants() -> None:
    engine = ModelFreeEngine(40, SchedulerLimits(step_tokens=512, max_running=64), caching=False)
    noisy(engine, 2, 10 * BLOCK_SIZE, max_tokens=40)
    engine.step()
    rich = engine.submit(sequence([7] * 25 * BLOCK_SIZE, tenant="noisy", max_tokens=2))
    small = engine.submit(sequence([7] * 16, tenant="small", max_tokens=3))
    # Even if it was served more lately than the blocked one.
    engine.scheduler.interactive.token_counters.begin_step(["noisy", "small"])
    engine.scheduler.interactive.token_counters.charge("small", 10_000)
    engine.step()
    assert small.generated == 1
    assert not rich.begun
    engine.run()


# Random loads


class TenantMachine(RuleBasedStateMachine):
    """Four tenants in pools and queues that are far too small.

    `ModelFreeEngine` checks blocks, order, and that every sequence finishes.
    """

    @initialize(
        blocks=st.integers(4, 14),
        step_tokens=st.integers(1, 70),
        max_running=st.integers(1, 8),
        max_queue=st.integers(1, 10),
        caching=st.booleans(),
    )
    def start(self, blocks: int, step_tokens: int, max_running: int, max_queue: int, caching: bool) -> None:
        self.engine = ModelFreeEngine(blocks, SchedulerLimits(step_tokens, max_running, max_queue), caching=caching)
        self.capacity = blocks * BLOCK_SIZE

    @rule(
        tenant=st.sampled_from("aaaabbcd"),
        length=st.integers(1, 120),
        kind=st.integers(0, 2),
        choices=st.sampled_from([1, 1, 1, 3]),
        max_tokens=st.integers(1, 40),
        use_cache=st.booleans(),
        count=st.integers(1, 6),
    )
    def submit(
        self, tenant: str, length: int, kind: int, choices: int, max_tokens: int, use_cache: bool, count: int
    ) -> None:
        prompt = [kind] * min(length, self.capacity)
        max_tokens = min(max_tokens, self.capacity - len(prompt) + 1)
        for _ in range(count):
            one = sequence(prompt, tenant=tenant, choices=choices, max_tokens=max_tokens, use_cache=use_cache)
            try:
                self.engine.submit(one)
            except QueueFull:
                self.displace(one)
        self.engine.check()

    def displace(self, one: Sequence) -> None:
        scheduler, tenant = self.engine.scheduler, one.request.tenant
        queued = {t: sum(s.request.tenant == t for s in self.waiting()) for t in {*scheduler.waiting.tenants, tenant}}
        displaced = scheduler.displaced_by(one)
        if displaced is None:
            share = scheduler.limits.max_queue / len(queued)
            assert queued[tenant] >= share or any(s.begun for s in self.waiting())
            return
        assert not displaced.begun
        assert queued[displaced.request.tenant] == max(queued.values()) > queued[tenant]
        self.engine.drop(displaced)
        if len(scheduler.waiting) < scheduler.limits.max_queue:
            self.engine.submit(one)

    def waiting(self) -> list[Sequence]:
        return [s for s in self.engine.live if s not in self.engine.scheduler.running]

    @precondition(lambda self: self.engine.live)
    @rule(count=st.integers(1, 12))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.drop(data.draw(st.sampled_from(self.engine.live)))
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.run(10_000)
            assert not self.engine.scheduler.interactive.running_counts
            self.engine.scheduler.schedule()
            assert len(self.engine.scheduler.interactive.token_counters) == 0


TestTenantFairness = TenantMachine.TestCase
TestTenantFairness.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


@settings(max_examples=examples(60), deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=3),
    slots=st.integers(2, 12),
    blocks=st.integers(60, 100),
    warm=st.integers(0, 60),
    length=st.integers(1, 100),
)
def test_small_tenant_never_waits_long(
    loads: list[tuple[int, int]], slots: int, blocks: int, warm: int, length: int
) -> None:
    """With up to three other tenants, its prompt takes hardly longer than without them."""
    slots = max(slots, 2 * (len(loads) + 1))  # with fewer, a running sequence has to finish first
    engine = ModelFreeEngine(blocks, SchedulerLimits(step_tokens=64, max_running=slots))
    for number, (size, max_tokens) in enumerate(loads):
        noisy(engine, 20, size, f"noisy {number}", max_tokens=max_tokens)
    for _ in range(warm):
        if engine.live:
            engine.step()
    small = engine.submit(sequence([7] * length, tenant="small", max_tokens=1))
    # Streams take a part of the budget of 64.
    own = -(-length // (64 - slots)) + 1
    assert steps_to_first_token(engine, small) <= own + 2
    engine.run(20_000)
