"""What a step of an embedding engine contains."""

from __future__ import annotations

import pytest

from syringa.engine.embedding.batch import pack_inputs, similar_lengths
from syringa.engine.embedding.scheduler import GOOD_STEPS, EmbeddingJob, EmbeddingScheduler, ScheduledInput
from syringa.engine.scheduling.limits import QueueFull, SchedulerLimits
from syringa.types import EmbeddingRequest


def job(id: str, *lengths: int, **fields: object) -> EmbeddingJob:
    return EmbeddingJob(EmbeddingRequest(id=id, inputs=[[5] * each for each in lengths], **fields), 0, 0.0)  # type: ignore[arg-type]


def scheduler(*jobs: EmbeddingJob, budget: int = 100, max_queue: int = 16) -> EmbeddingScheduler:
    made = EmbeddingScheduler(SchedulerLimits(step_tokens=budget, max_queue=max_queue))
    for each in jobs:
        made.add(each)
    return made


def names(step: list[ScheduledInput]) -> list[tuple[str, int]]:
    return [(item.job.request.id, len(item.tokens)) for item in step]


def test_step_packs_inputs_up_to_the_budget() -> None:
    made = scheduler(job("a", 40, 10, 50), job("b", 30))
    assert names(made.schedule()) == [("a", 50), ("a", 40), ("a", 10)]
    assert names(made.schedule()) == [("b", 30)]
    assert made.schedule() == []


def test_input_longer_than_the_budget_is_computed_alone() -> None:
    made = scheduler(job("a", 10, 500))
    assert names(made.schedule()) == [("a", 500)]
    assert names(made.schedule()) == [("a", 10)]


def test_tenants_share_a_step_whatever_the_number_of_their_requests() -> None:
    many = [job(f"m{i}", 10, 10, 10, tenant="many") for i in range(8)]
    made = scheduler(*many, job("f", *[10] * 8, tenant="few"))
    served = [item.job.request.tenant for _ in range(2) for item in made.schedule()]
    assert served[:10].count("few") == 5
    assert served.count("few") == 8


def test_lower_priority_value_comes_first_inside_of_a_tenant() -> None:
    made = scheduler(job("late", 10, priority=1), job("soon", 10, priority=-1), budget=10)
    assert names(made.schedule()) == [("soon", 10)]


def test_background_request_waits_for_all_others() -> None:
    made = scheduler(job("b", 10, 10, background=True), budget=10)
    assert names(made.schedule()) == [("b", 10)]
    made.add(job("i", 10, 10))
    assert [names(made.schedule()) for _ in range(3)] == [[("i", 10)], [("i", 10)], [("b", 10)]]


def test_isolated_request_is_computed_first_and_alone() -> None:
    made = scheduler(job("a", 10), job("s", 10, 10, isolated=True), budget=15)
    assert [names(made.schedule()) for _ in range(3)] == [[("s", 10)], [("s", 10)], [("a", 10)]]


def test_full_queue_refuses_the_tenant_with_the_most_and_lets_others_displace_it() -> None:
    made = scheduler(*(job(f"m{i}", 10, tenant="many") for i in range(4)), max_queue=4)
    with pytest.raises(QueueFull):
        made.add(job("m4", 10, tenant="many"))
    displaced = made.add(job("f", 10, tenant="few"))
    assert displaced is not None
    assert displaced.request.id == "m3"
    assert len(made) == 4


def test_background_requests_take_no_place_in_the_queue_from_others() -> None:
    made = scheduler(*(job(f"b{i}", 10, background=True) for i in range(9)), max_queue=2)  # none is refused
    for name in "ij":
        assert made.add(job(name, 10)) is None
    with pytest.raises(QueueFull):
        made.add(job("k", 10))
    assert made.add(job("b9", 10, background=True)) is None
    assert names(made.schedule()) == [("i", 10), ("j", 10)]


def test_background_request_may_wait_as_long_as_others_have_something_to_do() -> None:
    made = scheduler(job("b", 10, background=True), job("i", 10))
    assert [each.request.id for each in made.overdue(1.0)] == ["i"]


def test_step_without_memory_is_scheduled_again_in_halves_and_the_budget_recovers() -> None:
    made = scheduler(job("a", 40, 40), job("b", 20))
    failed = made.schedule()
    assert len(failed) == 3
    made.roll_back(failed)
    assert [names(made.schedule()) for _ in range(3)] == [[("a", 40)], [("a", 40)], [("b", 20)]]
    for _ in range(GOOD_STEPS):
        made.record_success()
    made.add(job("c", 50, 50))
    assert names(made.schedule()) == [("c", 50), ("c", 50)]


def test_dropped_request_is_not_scheduled() -> None:
    dropped = job("a", 60, 60)
    made = scheduler(dropped, job("b", 10))
    made.schedule()
    made.remove(dropped)
    assert names(made.schedule()) == [("b", 10)]
    assert len(made) == 0


def test_batch_has_positions_and_types_of_each_input() -> None:
    batch = pack_inputs([[7, 8, 9], [4], [5, 6]], [2, 0, 1])
    assert batch.tokens.tolist() == [7, 8, 9, 4, 5, 6]
    assert batch.starts.tolist() == [0, 3, 4, 6]
    assert batch.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert batch.types.tolist() == [0, 0, 1, 0, 0, 1]


def test_groups_of_similar_lengths_hold_each_input_once_within_twice_their_tokens() -> None:
    lengths = [3, 500, 7, 1, 260, 4, 5, 33, 6, 90]
    groups = similar_lengths(lengths, 600)
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[index] for index in group]
        assert max(own) < 2 * min(own)
        assert len(own) == 1 or len(own) * max(own) <= 600
