"""Background requests run in the gaps that other requests leave."""

from __future__ import annotations

import pytest

from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.engine.scheduling.limits import QueueFull, SchedulerLimits
from syringa.engine.scheduling.request_class import (
    MIN_ALONE_TOKENS,
    MIN_SHARED_TOKENS,
    BackgroundSteps,
    StepTokens,
)
from syringa.engine.scheduling.scheduler_output import SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.model_free_engine import ModelFreeEngine, sequence


def submit_background(engine: ModelFreeEngine, count: int, *, tenant: str = "", length: int = 8) -> list[Sequence]:
    return [
        engine.submit(sequence([number] * length, tenant=tenant, max_tokens=40, background=True))
        for number in range(count)
    ]


def background_tokens(output: SchedulerOutput) -> int:
    return sum(item.count for item in output.scheduled if item.sequence.request.background)


def test_background_requests_run_while_nothing_else_does() -> None:
    engine = ModelFreeEngine(200)
    submit_background(engine, 5)
    engine.run()
    assert len(engine.finished) == 5


def test_step_with_an_interactive_prompt_has_no_background_tokens() -> None:
    engine = ModelFreeEngine(400)
    running = submit_background(engine, 4)
    engine.step()
    assert all(one.generated for one in running)
    prompt = engine.submit(sequence([9] * 30))
    output = engine.step()
    assert [item.sequence for item in output.scheduled] == [prompt]
    assert prompt.generated == 1
    assert engine.scheduler.preemptions == 0  # they keep their blocks, and go on in the next step


def test_step_with_streams_has_few_background_tokens() -> None:
    engine = ModelFreeEngine(400)
    stream = engine.submit(sequence([9] * 30, max_tokens=10))
    engine.step()
    submit_background(engine, 20)
    output = engine.step()
    assert output.scheduled[0].sequence is stream
    assert background_tokens(output) == MIN_SHARED_TOKENS


def test_step_without_other_requests_has_more_background_tokens() -> None:
    engine = ModelFreeEngine(400)
    submit_background(engine, 100)
    assert background_tokens(engine.step()) == MIN_ALONE_TOKENS


def test_background_request_is_not_admitted_while_an_interactive_one_waits() -> None:
    engine = ModelFreeEngine(100, SchedulerLimits(step_tokens=64, max_running=2))
    for number in range(3):
        engine.submit(sequence([number] * 4, max_tokens=3))
    background = engine.submit(sequence([7] * 4, background=True))
    while len(engine.scheduler.waiting):
        engine.step()
        if len(engine.scheduler.waiting):
            assert background not in engine.scheduler.running
    engine.run()
    assert background in engine.finished


def test_interactive_request_preempts_background_ones_when_slots_run_out() -> None:
    engine = ModelFreeEngine(400, SchedulerLimits(step_tokens=64, max_running=4))
    running = submit_background(engine, 4)
    for _ in range(3):
        engine.step()
    prompt = engine.submit(sequence([9] * 30))
    engine.step()
    assert prompt.generated == 1  # in the next step
    assert [one in engine.scheduler.running for one in running] == [True, True, True, False]  # the youngest gave way
    engine.run()
    assert len(engine.finished) == 5


def test_interactive_request_preempts_background_ones_when_blocks_run_out() -> None:
    engine = ModelFreeEngine(12, SchedulerLimits(step_tokens=64, max_running=8), caching=False)
    running = submit_background(engine, 5, length=BLOCK_SIZE + 2)
    for _ in range(6):
        engine.step()
    assert engine.pool.available < 3
    prompt = engine.submit(sequence([9] * (3 * BLOCK_SIZE + 5)))
    engine.step()
    assert prompt.generated == 1
    assert engine.scheduler.preemptions > 0
    assert running[0] in engine.scheduler.running
    engine.run()
    assert len(engine.finished) == 6


def test_growing_interactive_sequence_takes_blocks_of_background_ones() -> None:
    engine = ModelFreeEngine(8, SchedulerLimits(step_tokens=64, max_running=8), caching=False)
    stream = engine.submit(sequence([1] * BLOCK_SIZE, tenant="a", max_tokens=5 * BLOCK_SIZE))
    engine.step()
    submit_background(engine, 4, tenant="b", length=BLOCK_SIZE)
    while stream in engine.live:
        before = stream.generated
        engine.step()
        assert stream.generated == before + 1  # never preempted, never skipped
    engine.run()


def test_background_sequences_never_preempt_interactive_ones() -> None:
    engine = ModelFreeEngine(6, SchedulerLimits(step_tokens=64, max_running=8), caching=False)
    stream = engine.submit(sequence([1] * BLOCK_SIZE, max_tokens=2 * BLOCK_SIZE))
    engine.step()
    submit_background(engine, 3, tenant="other", length=BLOCK_SIZE)
    while stream in engine.live:
        assert stream in engine.scheduler.running
        engine.step()
    engine.run()


def test_tenants_share_background_steps_fairly() -> None:
    engine = ModelFreeEngine(2000, SchedulerLimits(step_tokens=512, max_running=256))
    submit_background(engine, 60, tenant="large", length=40)
    for _ in range(5):
        engine.step()
    small = submit_background(engine, 1, tenant="small", length=20)[0]
    for _ in range(3):  # it does not wait for the fifty others
        engine.step()
    assert small.generated


def test_background_requests_are_never_refused_and_leave_the_interactive_queue_alone() -> None:
    engine = ModelFreeEngine(400, SchedulerLimits(step_tokens=64, max_running=2, max_queue=3))
    submit_background(engine, 20)
    for _ in range(3):
        engine.submit(sequence([1] * 4))
    with pytest.raises(QueueFull):
        engine.submit(sequence([1] * 4))
    submit_background(engine, 1)
    engine.run()
    assert len(engine.finished) == 24


def test_outputs_do_not_depend_on_the_class() -> None:
    """The tokens of a request depend on its prompt and seed alone, however often it was preempted."""
    outputs = []
    for background in (False, True):
        engine = ModelFreeEngine(14, SchedulerLimits(step_tokens=64, max_running=8), caching=False)
        watched = engine.submit(sequence([3] * 20, max_tokens=30, background=background))
        for number in range(6):
            engine.step()
            engine.submit(sequence([number] * 40, tenant=str(number), max_tokens=4))
        engine.run()
        outputs.append(watched.tokens)
    assert outputs[0] == outputs[1]


def test_step_tokens_follow_the_time_of_steps() -> None:
    tokens = StepTokens(0.03, 32, 512)
    for _ in range(50):
        tokens.record(tokens.limit, 0.01)
    assert tokens.limit == 512
    tokens.record(512, 0.06)
    assert tokens.limit == 256
    tokens.record(10, 0.01)  # a small step says nothing about a larger one
    assert tokens.limit == 256
    for _ in range(20):
        tokens.record(tokens.limit, 10.0)
    assert tokens.limit == 32


def test_step_tokens_grow_within_a_few_steps_that_are_not_full() -> None:
    tokens = StepTokens(0.25, 32, 512)
    for _ in range(6):
        tokens.record(tokens.limit - 5, 0.02)  # chunks of prompts end at blocks
    assert tokens.limit == 512
    tokens = StepTokens(0.03, 32, 512)
    for _ in range(20):  # no faster than the time of steps allows
        tokens.record(tokens.limit, 0.0001 * tokens.limit + 0.002)
        assert 0.0001 * tokens.limit + 0.002 <= 0.0301
    assert tokens.limit > 250


def test_interrupted_steps_are_computed_again() -> None:
    outputs = []
    for interrupt in (False, True):
        engine = ModelFreeEngine(60, SchedulerLimits(step_tokens=64, max_running=8))
        submit_background(engine, 4, length=2 * BLOCK_SIZE + 3)
        engine.submit(sequence([7] * 40, choices=3, background=True))
        while engine.live:
            if interrupt:
                output = engine.scheduler.schedule()
                engine.live += output.forks
                engine.scheduler.interrupt(output)
                engine.check()
            engine.step()
        assert engine.pool.free + engine.pool.cached == engine.pool.total
        outputs.append(
            sorted((one.arrival - (engine.first_arrival or 0), one.choice, one.tokens) for one in engine.finished)
        )
    assert outputs[0] == outputs[1]


def test_steps_with_interactive_requests_are_not_interrupted() -> None:
    engine = ModelFreeEngine(200)
    submit_background(engine, 2)
    engine.step()
    engine.submit(sequence([9] * 30, max_tokens=2))
    assert not engine.scheduler.may_interrupt(engine.step())
    output = engine.step()  # the stream and some background tokens
    assert background_tokens(output)
    assert not engine.scheduler.may_interrupt(output)
    assert engine.scheduler.may_interrupt(engine.step())


def test_background_steps_are_longer_where_they_can_be_interrupted() -> None:
    steps = BackgroundSteps(512)
    limits = []
    for interruptible in (False, True):
        steps.set_interruptible(interruptible)
        for _ in range(50):
            steps._alone.record(steps._alone.limit, steps._alone.limit / 2000)  # half a millisecond for each token
        limits.append(steps._alone.limit)
    assert limits[0] < 120
    assert limits[1] > 450
    steps.record_interruption()
    assert steps._alone.limit < 260
