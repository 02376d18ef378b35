from __future__ import annotations

import pytest

from syringa.engine.scheduling.isolation import MAX_SECONDS, IsolationQueue
from syringa.engine.scheduling.limits import QueueFull, SchedulerLimits
from syringa.engine.scheduling.scheduler_output import SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.model_free_engine import ModelFreeEngine, sequence


def scheduled(output: SchedulerOutput) -> set[Sequence]:
    return {item.sequence for item in output.scheduled}


def started(blocks: int = 100, limits: SchedulerLimits | None = None) -> tuple[ModelFreeEngine, list[Sequence]]:
    """Return an engine with two running sequences."""
    engine = ModelFreeEngine(blocks, limits)
    others = [engine.submit(sequence([token] * 20, max_tokens=30)) for token in (1, 2)]
    assert scheduled(engine.step()) == set(others)
    return engine, others


def test_suspects_are_computed_alone_until_their_first_token() -> None:
    engine, others = started(limits=SchedulerLimits(step_tokens=32, max_running=32))
    first = engine.submit(sequence([3] * 40, tenant="t", isolation="start"))
    second = engine.submit(sequence([4] * 10, tenant="t", choices=2, isolation="start"))
    new = engine.submit(sequence([5] * 10))
    # The first prompt takes two steps, the second one.
    assert [scheduled(engine.step()) for _ in range(3)] == [{first}, {first}, {second}]
    together = scheduled(engine.step())
    assert {*others, first, second, new} <= together
    assert len(together) == 6  # with the second choice
    engine.run()


def test_suspect_of_two_crashes_is_computed_alone_to_its_end() -> None:
    engine, others = started()
    suspect = engine.submit(sequence([3] * 10, tenant="t", max_tokens=3, isolation="full"))
    assert [scheduled(engine.step()) for _ in range(3)] == [{suspect}] * 3
    assert scheduled(engine.step()) == set(others)
    engine.run()


def test_suspect_is_computed_alone_for_a_limited_time() -> None:
    now = 100.0
    engine, others = started()
    engine.scheduler.isolation = IsolationQueue(lambda: now)
    suspect = engine.submit(sequence([3] * 10, tenant="t", max_tokens=20, isolation="full"))
    assert scheduled(engine.step()) == {suspect}
    now += MAX_SECONDS
    assert scheduled(engine.step()) == {suspect, *others}
    engine.run()


def test_suspect_waits_for_the_step_in_flight() -> None:
    engine, others = started()
    suspect = engine.submit(sequence([3] * 10, tenant="t", isolation="start"))
    assert not engine.scheduler.schedule(in_flight=True).scheduled
    assert scheduled(engine.step()) == {suspect}
    assert others[0] in engine.scheduler.running
    engine.run()


def test_suspect_preempts_others_if_there_is_no_room() -> None:
    engine, others = started(blocks=6)
    suspect = engine.submit(sequence([3] * 60, tenant="t", max_tokens=2, isolation="start"))
    assert scheduled(engine.step()) == {suspect}
    assert others[1] not in engine.scheduler.running
    engine.run()


def test_aborted_suspects_leave_nothing() -> None:
    engine, others = started()
    first, second = (engine.submit(sequence([3] * 10, tenant="t", isolation="full")) for _ in range(2))
    engine.drop(second)  # waits
    assert scheduled(engine.step()) == {first}
    engine.drop(first)  # is computed
    assert scheduled(engine.step()) == set(others)
    assert not engine.scheduler.isolation.active
    engine.run()


def test_waiting_suspects_count_for_the_queue_limit() -> None:
    engine = ModelFreeEngine(100, SchedulerLimits(max_queue=2))
    for _ in range(2):
        engine.submit(sequence([3] * 10, isolation="start"))
    with pytest.raises(QueueFull):
        engine.submit(sequence([3] * 10, isolation="start"))
    with pytest.raises(QueueFull):
        engine.submit(sequence([3] * 10))
    engine.run()


def test_choices_of_a_resumed_suspect_share_the_time() -> None:
    now = 100.0
    engine, others = started()
    engine.scheduler.isolation = IsolationQueue(lambda: now)
    choices = [sequence([3] * 10, tenant="t", max_tokens=20, isolation="full") for _ in range(3)]
    for each in choices:
        each.request, each.begun = choices[0].request, True
        engine.submit(each)
    assert scheduled(engine.step()) == {choices[0]}
    now += MAX_SECONDS
    assert scheduled(engine.step()) == {*choices[:2]}  # each begins without other requests
    assert scheduled(engine.step()) == {*choices}
    assert scheduled(engine.step()) == {*choices, *others}
    engine.run()


def test_begun_and_background_suspects_are_never_overdue() -> None:
    queue = IsolationQueue()
    new, resumed = (sequence([3], isolation="start") for _ in range(2))
    resumed.begun = True
    for each in (new, resumed, sequence([3], isolation="start", background=True)):
        queue.add(each)
    assert queue.overdue(1.0) == [new]
