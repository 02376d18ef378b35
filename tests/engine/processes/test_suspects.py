from __future__ import annotations

from typing import Any

import msgspec
import pytest

from syringa.engine.processes.suspects import KEEP_SECONDS, MAX_SUSPECTS, REFUSED, SuspectTable, fingerprint
from syringa.types import EngineRequest, Grammar, Image, ResumedChoice, SamplingParams, StopConditions

POISON, ONE, TWO = b"poison", b"one", b"two"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SuspectTable:
    return SuspectTable(clock)


def test_request_alone_at_its_second_crash_is_refused(table: SuspectTable) -> None:
    table.record_crash([POISON, ONE, TWO])
    table.record_crash([POISON])
    assert table.levels() == {POISON: REFUSED, ONE: 1, TWO: 1}


def test_request_alone_at_a_single_crash_is_not_refused(table: SuspectTable) -> None:
    table.record_crash([POISON])
    assert table.levels() == {POISON: 1}


def test_requests_that_crash_only_together_are_not_refused(table: SuspectTable) -> None:
    for _ in range(5):
        table.record_crash([POISON, ONE])
    assert table.levels() == {POISON: 5, ONE: 5}
    table.record_crash([POISON])
    assert table.levels() == {POISON: REFUSED, ONE: 5}


def test_answered_request_is_cleared_unless_it_is_refused(table: SuspectTable) -> None:
    table.record_crash([POISON, ONE])
    table.record_crash([POISON])
    assert table.clear(ONE)
    assert not table.clear(ONE)
    assert not table.clear(POISON)
    assert table.levels() == {POISON: REFUSED}


def test_suspects_are_forgotten_after_some_minutes(table: SuspectTable, clock: Clock) -> None:
    table.record_crash([POISON, ONE])
    clock.now = 60
    table.record_crash([POISON])
    clock.now = KEEP_SECONDS
    assert table.expire()
    assert table.levels() == {POISON: REFUSED}
    assert not table.expire()
    clock.now += 60
    assert table.expire()
    assert table.levels() == {}


def test_number_of_suspects_is_bounded(table: SuspectTable) -> None:
    table.record_crash([POISON])
    for number in range(MAX_SUSPECTS):
        table.record_crash([str(number).encode()])
    assert len(table.levels()) == MAX_SUSPECTS
    assert POISON not in table.levels()


def test_fingerprint_depends_on_tenant_and_content_only() -> None:
    sampling = SamplingParams(seed=1, logit_bias={1: 2.0, 2: 3.0})
    stopping = StopConditions(max_tokens=5, end_tokens=frozenset((1, 2)))
    image = Image(data=b"data", digest=b"digest")
    request = EngineRequest(id="a", prompt=[1, 2], sampling=sampling, stopping=stopping, tenant="x", images=(image,))
    same: list[dict[str, Any]] = [
        {"id": "b"},
        {"isolation": "start"},
        {"fingerprint": b"known"},
        {"priority": 3},
        {"resumed": (ResumedChoice([7]),)},
        {"sampling": msgspec.structs.replace(sampling, seed=2, logit_bias={2: 3.0, 1: 2.0})},
    ]
    other: list[dict[str, Any]] = [
        {"prompt": [1, 3]},
        {"tenant": "y"},
        {"choices": 2},
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"images": ()},
        {"sampling": msgspec.structs.replace(sampling, grammar=Grammar("regex", "a"))},
        {"stopping": msgspec.structs.replace(stopping, max_tokens=6)},
    ]
    assert len(fingerprint(request)) == 16
    assert {fingerprint(msgspec.structs.replace(request, **each)) for each in same} == {fingerprint(request)}
    assert len({fingerprint(msgspec.structs.replace(request, **each)) for each in other}) == len(other)
    assert fingerprint(request) not in {fingerprint(msgspec.structs.replace(request, **each)) for each in other}
