"""Several tenants on one scheduler. Steps are counted, not timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.limits import ATTENTION_SPAN, TURN_STEPS, Limits, QueueFull
from syringa.engine.scheduling.scheduler_output import Plan
from syringa.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.builders import DryEngine, sequence


def tokens_for(plan: Plan, tenant: str) -> int:
    return sum(item.count for item in plan.items if item.sequence.request.tenant == tenant)


def steps_to_first_token(engine: DryEngine, one: Sequence, most: int = 200) -> int:
    for count in range(1, most):
        engine.step()
        if one.generated:
            return count
    raise AssertionError(f"no token in {most} steps")


def noisy(engine: DryEngine, count: int, length: int, tenant: str = "noisy", **options: int) -> list[Sequence]:
    return [engine.submit(sequence([number] * length, tenant=tenant, **options)) for number in range(count)]


# The budget


@pytest.mark.parametrize("running", [0, 1, 30], ids=["none begun", "one begun", "all begun"])
def test_a_small_prompt_is_in_the_very_next_step(running: int) -> None:
    engine = DryEngine(2600, Limits(step_tokens=512, max_running=256))
    noisy(engine, 40, 1000, max_tokens=64)
    for _ in range(2 * running):
        engine.step()
    small = engine.submit(sequence([7] * 100, tenant="small"))
    assert steps_to_first_token(engine, small) == 1
    assert engine.scheduler.preemptions == 0


def test_many_long_prompts_that_were_let_in_do_not_hold_up_a_small_one() -> None:
    """Scoring takes small chunks, so many prompts run at once and each is far from done."""
    engine = DryEngine(2600, Limits(step_tokens=512, max_running=256))
    for number in range(40):
        engine.submit(sequence([number] * 1000, tenant="noisy", scoring=True))
    for _ in range(10):
        engine.step()
    assert sum(s.needed > 1 for s in engine.scheduler.running) > 3
    small = engine.submit(sequence([7] * 100, tenant="small"))
    assert steps_to_first_token(engine, small) == 1


def test_a_long_prompt_that_has_its_turn_is_not_left_in_the_middle() -> None:
    engine = DryEngine(3000, Limits(step_tokens=512, max_running=256))
    noisy(engine, 30, 1000, max_tokens=64)
    for _ in range(40):
        engine.step()
    assert any(s.needed > 1 for s in engine.scheduler.running)
    small = engine.submit(sequence([7] * 1000, tenant="small"))
    # Two of 512 if it were alone; decoding, and the look back that streams wait for, take a part of each.
    assert steps_to_first_token(engine, small) <= 4


def test_a_turn_ends() -> None:
    engine = DryEngine(2600, Limits(step_tokens=100, max_running=8))
    noisy(engine, 3, 10_000)
    other = engine.submit(sequence([7] * 10_000, tenant="other"))
    given = {"noisy": 0, "other": 0}
    for _ in range(60):
        plan = engine.step()
        for tenant in given:
            given[tenant] += tokens_for(plan, tenant)
        assert abs(given["noisy"] - given["other"]) <= TURN_STEPS * 100
    assert other.computed > 2500


def test_three_tenants_share_the_budget() -> None:
    engine = DryEngine(1000, Limits(step_tokens=64, max_running=64), caching=False)
    for tenant, count, length in (("one", 80, 40), ("two", 16, 200), ("three", 3, 1000)):
        noisy(engine, count, length, tenant, max_tokens=1)
    given = dict.fromkeys(("one", "two", "three"), 0)
    for _ in range(80):
        plan = engine.step()
        for tenant in given:
            given[tenant] += tokens_for(plan, tenant)
    assert sum(given.values()) > 0.95 * 80 * 64
    assert min(given.values()) > 1000
    assert max(given.values()) - min(given.values()) <= TURN_STEPS * 64
    small = engine.submit(sequence([7] * 40, tenant="small"))
    assert steps_to_first_token(engine, small) == 1


def test_idle_time_is_not_saved_up() -> None:
    engine = DryEngine(1000, Limits(step_tokens=50, max_running=50))
    noisy(engine, 40, 200, "busy", max_tokens=1)
    early = engine.submit(sequence([7] * 10, tenant="late", max_tokens=1))
    for _ in range(100):
        engine.step()
    assert early in engine.finished
    noisy(engine, 40, 200, "late", max_tokens=1)
    given = {"busy": 0, "late": 0}
    for _ in range(50):
        plan = engine.step()
        for tenant in given:
            given[tenant] += tokens_for(plan, tenant)
    assert min(given.values()) > 1000
    assert abs(given["busy"] - given["late"]) <= TURN_STEPS * 50


def test_streams_of_all_tenants_go_on_beside_long_prompts_of_all() -> None:
    """A step is never longer than its budget, and has a token for everyone that waits for one."""
    engine = DryEngine(1200, Limits(step_tokens=256, max_running=64))
    streams = [s for t in "abc" for s in noisy(engine, 4, 10, t, max_tokens=400)]
    engine.step()
    for tenant in "abcd":
        noisy(engine, 2, 2000, tenant, max_tokens=2)
    for _ in range(50):
        waiting = [s for s in engine.scheduler.running if s.needed == 1]
        plan = engine.step()
        prompts = [item for item in plan.items if item.sequence not in waiting]
        assert {id(item.sequence) for item in plan.items} >= {id(s) for s in waiting}
        cost = sum(item.count * (ATTENTION_SPAN + item.start) / ATTENTION_SPAN for item in prompts)
        assert len(waiting) + cost <= 256 + len(prompts) + 3  # what does not divide is rounded
        assert prompts
    assert all(s.generated == 51 for s in streams)


# Places and blocks


def full_places() -> DryEngine:
    engine = DryEngine(200, Limits(step_tokens=512, max_running=16))
    noisy(engine, 40, 20, max_tokens=40)
    return engine


def full_blocks() -> DryEngine:
    engine = DryEngine(100, Limits(step_tokens=512, max_running=256))
    noisy(engine, 60, 40, max_tokens=60)
    return engine


def no_budget() -> DryEngine:
    engine = DryEngine(200, Limits(step_tokens=1, max_running=16))
    noisy(engine, 40, 1, max_tokens=40)
    return engine


@pytest.mark.parametrize("make", [full_places, full_blocks, no_budget])
def test_a_tenant_with_nothing_running_gets_a_place(make: Callable[[], DryEngine]) -> None:
    engine = make()
    for _ in range(5):
        engine.step()
    assert len(engine.scheduler.waiting)
    before = list(engine.scheduler.running)
    preempted = engine.scheduler.preemptions
    small = engine.submit(sequence([7] * 16, tenant="small", max_tokens=20))
    steps = steps_to_first_token(engine, small)
    assert steps <= (1 if make is not no_budget else 16)
    sent_back = [s for s in before if s not in engine.scheduler.running and s in engine.live]
    assert sent_back == before[len(before) - len(sent_back) :], "the youngest go first"
    assert engine.scheduler.preemptions - preempted == len(sent_back) <= 2
    engine.run(5000)
    assert [s for s in engine.finished if s in sent_back] == sent_back
    assert all(s.generated == s.request.stopping.max_tokens for s in engine.finished)


def test_one_after_another_each_gets_its_place() -> None:
    engine = full_blocks()
    for number in range(20):
        small = engine.submit(sequence([100 + number] * 40, tenant="small", max_tokens=10))
        assert steps_to_first_token(engine, small) == 1
        while small in engine.live:
            engine.step()
    engine.run(5000)


def test_a_prompt_in_several_steps_keeps_the_room_that_it_was_given() -> None:
    """The noisy one's streams grow while it is computed, at their own expense."""
    engine = DryEngine(200, Limits(step_tokens=64, max_running=40), caching=False)
    noisy(engine, 40, 64, max_tokens=200)
    for _ in range(40):
        engine.step()
    small = engine.submit(sequence([7] * 600, tenant="small", max_tokens=5))
    assert not engine.pool.available > 600 // BLOCK_SIZE
    computed = []
    while not small.generated:
        engine.step()
        computed.append(small.computed)
    assert computed == sorted(computed), "it was never sent back"
    assert len(computed) < 100
    engine.run(50_000)


def test_nobody_is_let_into_room_that_another_tenants_prompt_is_to_get() -> None:
    engine = DryEngine(40, Limits(step_tokens=16, max_running=8), caching=False)
    one = engine.submit(sequence([1] * 400, tenant="one", max_tokens=3))
    engine.step()
    noisy(engine, 3, 260, "other", max_tokens=3)
    engine.scheduler.turns.begin(["one", "other"])
    engine.scheduler.turns.charge("one", 300)  # the other's turn
    engine.run()
    assert engine.scheduler.preemptions == 0
    assert engine.finished[0] is one


def test_nobody_is_sent_back_for_its_own_tenant() -> None:
    engine = full_places()
    for _ in range(50):
        engine.step()
    assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize("places", [1, 2, 3, 8])
def test_tenants_do_not_throw_one_another_out_in_turns(places: int) -> None:
    engine = DryEngine(100, Limits(step_tokens=64, max_running=places))
    for number in range(30):
        for tenant in "abcde":
            engine.submit(sequence([number] * 20, tenant=tenant, max_tokens=10))
    engine.run()
    # Fewer than the tenants: who has one place has as much as there is.
    assert engine.scheduler.preemptions <= (0 if places < 5 else 30)
    assert engine.steps < 150 * 30 / places * 1.5


def test_a_tenant_that_has_had_more_waits_for_its_turn() -> None:
    engine = DryEngine(2600, Limits(step_tokens=512, max_running=4))
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


def test_a_request_larger_than_its_share_is_not_overtaken_for_ever() -> None:
    """It sends nobody back, since nobody has more than its share; but then nobody is let in before it."""
    engine = DryEngine(40, Limits(step_tokens=512, max_running=64), caching=False)
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


def test_a_tenant_that_waits_for_more_does_not_keep_out_those_with_nothing() -> None:
    engine = DryEngine(40, Limits(step_tokens=512, max_running=64), caching=False)
    noisy(engine, 2, 10 * BLOCK_SIZE, max_tokens=40)
    engine.step()
    rich = engine.submit(sequence([7] * 25 * BLOCK_SIZE, tenant="noisy", max_tokens=2))
    small = engine.submit(sequence([7] * 16, tenant="small", max_tokens=3))
    # Even where it was given more lately than the one that waits.
    engine.scheduler.turns.begin(["noisy", "small"])
    engine.scheduler.turns.charge("small", 10_000)
    engine.step()
    assert small.generated == 1
    assert not rich.begun
    engine.run()


# Everything


class Tenants(RuleBasedStateMachine):
    """Four tenants in pools and queues that are much too small: `DryEngine` checks blocks, order, and that all end."""

    @initialize(
        blocks=st.integers(4, 14),
        step_tokens=st.integers(1, 70),
        max_running=st.integers(1, 8),
        max_queue=st.integers(1, 10),
        caching=st.booleans(),
    )
    def start(self, blocks: int, step_tokens: int, max_running: int, max_queue: int, caching: bool) -> None:
        self.engine = DryEngine(blocks, Limits(step_tokens, max_running, max_queue), caching=caching)
        self.room = blocks * BLOCK_SIZE

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
        prompt = [kind] * min(length, self.room)
        max_tokens = min(max_tokens, self.room - len(prompt) + 1)
        for _ in range(count):
            one = sequence(prompt, tenant=tenant, choices=choices, max_tokens=max_tokens, use_cache=use_cache)
            try:
                self.engine.submit(one)
            except QueueFull:
                self.displace(one)
        self.engine.check()

    def displace(self, one: Sequence) -> None:
        scheduler, tenant = self.engine.scheduler, one.request.tenant
        lines = {t: sum(s.request.tenant == t for s in self.waiting()) for t in {*scheduler.waiting.tenants, tenant}}
        displaced = scheduler.displaced_by(tenant)
        if displaced is None:
            share = scheduler.limits.max_queue / len(lines)
            assert lines[tenant] >= share or any(s.begun for s in self.waiting())
            return
        assert not displaced.begun
        assert lines[displaced.request.tenant] == max(lines.values()) > lines[tenant]
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
            assert not self.engine.scheduler._counts
            self.engine.scheduler.schedule()
            assert len(self.engine.scheduler.turns) == 0


TestTenants = Tenants.TestCase
TestTenants.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    loads=st.lists(st.tuples(st.integers(1, 200), st.integers(1, 30)), min_size=1, max_size=3),
    places=st.integers(2, 12),
    blocks=st.integers(60, 100),
    warm=st.integers(0, 60),
    length=st.integers(1, 100),
)
def test_a_small_tenant_never_waits_long(
    loads: list[tuple[int, int]], places: int, blocks: int, warm: int, length: int
) -> None:
    """Whatever up to three others are doing, its prompt takes hardly longer than without them."""
    places = max(places, 2 * (len(loads) + 1))  # with fewer, somebody has to end first
    engine = DryEngine(blocks, Limits(step_tokens=64, max_running=places))
    for number, (size, max_tokens) in enumerate(loads):
        noisy(engine, 20, size, f"noisy {number}", max_tokens=max_tokens)
    for _ in range(warm):
        if engine.live:
            engine.step()
    small = engine.submit(sequence([7] * length, tenant="small", max_tokens=1))
    # Of a budget of 64, streams take some.
    own = -(-length // (64 - places)) + 1
    assert steps_to_first_token(engine, small) <= own + 2
    engine.run(20_000)
