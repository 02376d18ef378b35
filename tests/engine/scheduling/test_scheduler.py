from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.limits import SCORING_CHUNK, SCORING_ROWS, QueueFull, SchedulerLimits
from tests.engine.scheduling.model_free_engine import ModelFreeEngine, sequence
from tests.tiers import examples


def test_scheduler_computes_prompt_in_chunks_of_the_budget() -> None:
    engine = ModelFreeEngine(20, SchedulerLimits(step_tokens=40, max_running=4))
    one = engine.submit(sequence([1] * 100))
    counts = [engine.step().scheduled[0].count for _ in range(4)]
    assert counts == [40, 40, 20, 1]
    assert one.generated == 2


def test_scheduler_schedules_decoding_before_prompts() -> None:
    engine = ModelFreeEngine(40, SchedulerLimits(step_tokens=16, max_running=8))
    short = [engine.submit(sequence([i] * 3, max_tokens=20)) for i in range(3)]
    engine.step()
    engine.submit(sequence([9] * 200))
    for _ in range(10):
        output = engine.step()
        assert [item.sequence for item in output.scheduled[:3]] == short
        assert [item.count for item in output.scheduled[:3]] == [1, 1, 1]
        assert 10 <= output.scheduled[3].count <= 13


def test_scheduler_shrinks_chunks_of_long_context_while_streams_wait() -> None:
    engine = ModelFreeEngine(1000, SchedulerLimits(step_tokens=512, max_running=8))
    stream = engine.submit(sequence([1] * 3, max_tokens=200))
    engine.step()
    long = engine.submit(sequence([9] * 6000))
    counts = []
    while long.needed > 1 or not counts:
        output = engine.step()
        assert output.scheduled[0].sequence is stream
        counts += [item.count for item in output.scheduled if item.sequence is long]
    assert counts[0] > 500
    assert 64 < counts[-2] < 512 * 1536 / (1536 + 5000)
    # Without streams, it gets the whole budget.
    engine = ModelFreeEngine(1000, SchedulerLimits(step_tokens=512, max_running=8))
    engine.submit(sequence([9] * 6000))
    assert [engine.step().scheduled[0].count for _ in range(10)] == [512] * 10


@pytest.mark.parametrize("choices", [1, 3])
def test_scheduler_budget_covers_every_running_choice(choices: int) -> None:
    engine = ModelFreeEngine(200, SchedulerLimits(step_tokens=2, max_running=6))
    for i in range(8):
        engine.submit(sequence([i] * 9, choices=choices, max_tokens=30))
    for _ in range(60):
        engine.step()  # checks that no decoding choice was left out
        assert len(engine.scheduler.running) <= 6


def test_scheduler_counts_unforked_choices_as_running() -> None:
    engine = ModelFreeEngine(200, SchedulerLimits(step_tokens=512, max_running=6))
    for i in range(3):
        engine.submit(sequence([i] * 300, choices=3, max_tokens=30, scoring=True))
    for _ in range(20):
        engine.step()
        assert len(engine.scheduler.running) <= 6


def test_scheduler_runs_request_with_more_choices_than_limit() -> None:
    engine = ModelFreeEngine(64, SchedulerLimits(step_tokens=16, max_running=4))
    engine.submit(sequence([1] * 20, choices=10))
    engine.run()
    assert len(engine.finished) == 10


def test_scheduler_forks_choices_with_copy_on_write() -> None:
    engine = ModelFreeEngine(20)
    one = engine.submit(sequence([1] * 20, choices=3, max_tokens=3))
    output = engine.step()
    assert [item.count for item in output.scheduled] == [20]
    assert [s.choice for s in output.scheduled[0].sampled] == [0, 1, 2]
    assert engine.pool.total - engine.pool.available == 2
    assert all(s.block_table == one.block_table for s in engine.live)
    output = engine.step()
    assert len(output.copies) == 2  # the last to write keeps the block
    assert len({s.block_table[1] for s in engine.live}) == 3
    assert len({s.block_table[0] for s in engine.live}) == 1
    engine.run()


def test_scheduler_reuses_cached_prefix() -> None:
    engine = ModelFreeEngine(20)
    engine.submit(sequence([1] * 40))
    engine.run()
    again = engine.submit(sequence([1] * 40))
    assert engine.step().scheduled[0].count == 8
    assert again.cached == 32
    other = engine.submit(sequence([1] * 40, use_cache=False))
    assert engine.step().scheduled[-1].count == 40
    assert other.cached == 0
    engine.run()


def test_scheduler_does_not_share_blocks_between_tenants() -> None:
    """Neither cached blocks nor, checked in every step, blocks in use: a hit would show what others have sent."""
    engine = ModelFreeEngine(40)
    prompt = list(range(40))
    engine.submit(sequence(prompt, tenant="a"))
    engine.run()
    guess = engine.submit(sequence(prompt, tenant="b", max_tokens=8))
    engine.step()
    assert guess.cached == 0
    again = engine.submit(sequence(prompt, tenant="a", max_tokens=8))
    engine.step()
    assert again.cached == 32
    engine.run()


def test_preempted_choice_finds_blocks_of_its_own_request_again() -> None:
    """Not those of another tenant with the same prompt."""
    engine = ModelFreeEngine(12, SchedulerLimits(max_running=8))
    prompt = list(range(40))
    for tenant in "ab":
        engine.submit(sequence(prompt, tenant=tenant, choices=2, max_tokens=40))
    while not engine.scheduler.preemptions:
        engine.step()
    for tenant in engine.scheduler.waiting.tenants:
        preempted = engine.scheduler.waiting.head(tenant)
        (sibling,) = [one for one in engine.scheduler.running if one.request is preempted.request]
        found, _ = preempted.find_cached_prefix(engine.pool)
        assert found[:2] == sibling.block_table[:2]
    engine.run()
    assert len(engine.finished) == 4


def test_eviction_of_another_tenants_prefix_shows_nothing_of_it() -> None:
    """Which prefixes stay depends on when they were used, not on whether another tenant's prompt is the same."""
    hits = []
    for guess in (list(range(40)), list(range(100, 140))):
        engine = ModelFreeEngine(9)
        for tenant, prompt in (("a", list(range(40))), ("b", guess), ("b", list(range(200, 240)))):
            engine.submit(sequence(prompt, tenant=tenant, max_tokens=1))
            engine.run()
        again = engine.submit(sequence(guess, tenant="b", max_tokens=1))
        engine.run()
        hits.append((again.cached, engine.pool.free, engine.pool.cached))
    assert hits[0] == hits[1]


def test_scheduler_does_not_cache_blocks_of_uncached_request() -> None:
    engine = ModelFreeEngine(20)
    engine.submit(sequence([1] * 40, use_cache=False))
    engine.run()
    assert engine.pool.cached == 0


def test_scheduler_scores_prompt_in_small_chunks_without_cache() -> None:
    engine = ModelFreeEngine(40, SchedulerLimits(step_tokens=512))
    engine.submit(sequence([1] * 300))
    engine.run()
    scored = engine.submit(sequence([1] * 300, scoring=True))
    assert [engine.step().scheduled[0].count for _ in range(3)] == [
        SCORING_CHUNK,
        SCORING_CHUNK,
        300 - 2 * SCORING_CHUNK,
    ]
    assert scored.cached == 0


def test_scheduler_bounds_scored_rows_per_step() -> None:
    """Scoring needs a row of logits per token, and a GPU step has thousands of tokens."""
    engine = ModelFreeEngine(400, SchedulerLimits(step_tokens=8192, max_running=64))
    for i in range(20):
        engine.submit(sequence([i] * 200, scoring=True))
    engine.submit(sequence([99] * 300))
    while engine.live:
        scoring = {one for one in engine.live if one.scoring}
        output = engine.step()
        rows = sum(item.count for item in output.scheduled if item.sequence in scoring)
        assert rows <= SCORING_ROWS
        if engine.steps == 1:  # a prompt that is not scored does not wait for those that are
            assert rows == SCORING_ROWS
            assert output.scheduled[-1].count == 300
    assert len(engine.finished) == 21
    assert engine.scheduler.preemptions == 0


def test_scheduler_reserves_blocks_for_admitted_scored_prompts() -> None:
    engine = ModelFreeEngine(100, SchedulerLimits(step_tokens=8192, max_running=64))
    for i in range(30):  # of 13 blocks each: seven fit
        engine.submit(sequence([i] * 200, scoring=True, max_tokens=2))
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_scheduler_preempts_and_recomputes_youngest() -> None:
    engine = ModelFreeEngine(6, caching=False)
    old = engine.submit(sequence([1] * 30, max_tokens=40))
    young = engine.submit(sequence([2] * 30, max_tokens=40))
    for _ in range(25):
        engine.step()
    assert engine.scheduler.preemptions == 1
    assert old in engine.scheduler.running
    assert young not in engine.scheduler.running
    assert young.generated > 0
    engine.run()
    assert engine.finished == [old, young]
    assert young.generated == 40


def test_scheduler_reports_cached_tokens_of_first_admission() -> None:
    """A prompt that was preempted half-way finds its own blocks again, which does not count as cached."""
    engine = ModelFreeEngine(9, SchedulerLimits(step_tokens=45, max_running=4))
    for i in range(3):
        engine.submit(sequence([i] * 15, max_tokens=10))
    engine.step()
    young = engine.submit(sequence([7] * 80))
    for _ in range(2):
        engine.step()
    assert engine.scheduler.preemptions == 1
    assert young.generated == 0
    engine.run()
    assert young.cached == 0


def test_scheduler_add_raises_queue_full() -> None:
    engine = ModelFreeEngine(4, SchedulerLimits(max_queue=2))
    for _ in range(2):
        engine.submit(sequence([1]))
    with pytest.raises(QueueFull):
        engine.submit(sequence([1]))
    engine.step()
    engine.submit(sequence([1]))
    engine.run()


def test_scheduler_serves_tenant_in_order_of_arrival() -> None:
    engine = ModelFreeEngine(40, SchedulerLimits(max_running=1))
    order = [engine.submit(sequence([i] * 5, max_tokens=3)) for i in range(6)]
    engine.run()
    assert engine.finished == order


def tokens_of(engine: ModelFreeEngine, tenant: str) -> int:
    done = [*engine.finished, *engine.scheduler.running]
    return sum(s.computed or len(s.tokens) - 1 for s in done if s.request.tenant == tenant)


def test_scheduler_gives_tenants_equal_shares() -> None:
    engine = ModelFreeEngine(100, SchedulerLimits(max_running=4))
    for i in range(200):
        engine.submit(sequence([i] * 10, tenant="noisy", max_tokens=10))
    for i in range(20):
        engine.submit(sequence([i] * 40, tenant="quiet", max_tokens=5))
    while any(s.request.tenant == "quiet" for s in engine.live):
        engine.step()
    assert tokens_of(engine, "noisy") == pytest.approx(tokens_of(engine, "quiet"), rel=0.15)


def test_scheduler_ignores_past_use_of_idle_tenants() -> None:
    engine = ModelFreeEngine(100, SchedulerLimits(max_running=2))
    for i in range(100):  # one tenant has the engine to itself for a long time
        engine.submit(sequence([i] * 20, tenant="regular", max_tokens=10))
    engine.run()
    engine.finished.clear()
    # Then another tenant arrives first, with an empty queue, and both have plenty to do.
    for tenant in ("new", "regular"):
        for i in range(40):
            engine.submit(sequence([i] * 20, tenant=tenant, max_tokens=10))
    while len(engine.finished) < 20:
        engine.step()
    counts = [sum(s.request.tenant == tenant for s in engine.finished) for tenant in ("new", "regular")]
    assert min(counts) >= 8


class SchedulerMachine(RuleBasedStateMachine):
    """Submit, fork, abort, finish and preempt at random, in pools that are far too small."""

    @initialize(
        blocks=st.integers(2, 10),
        step_tokens=st.integers(1, 70),
        max_running=st.integers(1, 6),
        max_queue=st.integers(1, 8),
        caching=st.booleans(),
    )
    def start(self, blocks: int, step_tokens: int, max_running: int, max_queue: int, caching: bool) -> None:
        self.engine = ModelFreeEngine(blocks, SchedulerLimits(step_tokens, max_running, max_queue), caching=caching)
        self.capacity = blocks * BLOCK_SIZE

    @rule(
        family=st.integers(0, 1),
        shared=st.integers(0, 80),
        own=st.lists(st.integers(0, 2), max_size=20),
        choices=st.integers(1, 4),
        max_tokens=st.integers(1, 40),
        tenant=st.sampled_from("ab"),
        use_cache=st.booleans(),
        scoring=st.booleans(),
        background=st.booleans(),
    )
    def submit(
        self,
        family: int,
        shared: int,
        own: list[int],
        choices: int,
        max_tokens: int,
        tenant: str,
        use_cache: bool,
        scoring: bool,
        background: bool,
    ) -> None:
        prompt = ([family] * shared + own or [0])[: self.capacity]
        max_tokens = min(max_tokens, self.capacity - len(prompt) + 1)
        one = sequence(
            prompt,
            tenant=tenant,
            choices=choices,
            max_tokens=max_tokens,
            use_cache=use_cache,
            scoring=scoring,
            background=background,
        )
        scheduler = self.engine.scheduler
        full = not background and len(scheduler.waiting) >= scheduler.limits.max_queue
        try:
            self.engine.submit(one)
        except QueueFull:
            assert full
        else:
            assert not full
        self.engine.check()

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
            self.engine.run()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
