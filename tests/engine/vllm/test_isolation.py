"""Requests that are computed alone on vLLM."""

from __future__ import annotations

from syringa.engine.vllm.isolation import MAX_SECONDS, IsolationGate
from syringa.types import Isolation
from tests.engine.vllm.test_requests import request


class StubRun:
    def __init__(self, isolation: Isolation = "none") -> None:
        self.request = request(isolation=isolation)
        self.begun = self.ended = False


class GateHarness:
    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[StubRun] = []
        self.gate: IsolationGate[StubRun] = IsolationGate(self.started.append, lambda: self.now)

    def add(self, isolation: Isolation = "none") -> StubRun:
        run = StubRun(isolation)
        self.gate.add(run)
        return run

    def advance(self) -> None:
        self.gate.advance([each for each in self.started if not each.ended])


def test_requests_start_at_once_while_none_is_to_be_alone() -> None:
    harness = GateHarness()
    assert harness.started == [harness.add()]
    assert not harness.gate.active


def test_request_waits_for_those_before_it_and_delays_those_after_it() -> None:
    harness = GateHarness()
    before, alone, after = harness.add(), harness.add("start"), harness.add()
    harness.advance()
    assert harness.started == [before]
    before.ended = True
    harness.advance()
    assert harness.started == [before, alone]
    harness.advance()
    assert list(harness.gate.waiting) == [after]
    alone.begun = True
    harness.advance()
    assert harness.started == [before, alone, after]
    assert not harness.gate.active


def test_requests_are_computed_alone_one_after_another() -> None:
    harness = GateHarness()
    first, second = harness.add("start"), harness.add("full")
    harness.advance()
    first.begun = True
    harness.advance()
    assert harness.started == [first, second]  # the first one has had its token, and goes on
    second.begun = True
    harness.advance()
    assert harness.gate.active
    second.ended = True
    harness.advance()
    assert not harness.gate.active


def test_requests_do_not_wait_for_those_that_were_computed_alone_and_go_on() -> None:
    harness = GateHarness()
    suspects = [harness.add("start") for _ in range(4)]
    for number, run in enumerate(suspects):
        harness.advance()
        assert harness.started == suspects[: number + 1]
        assert harness.gate.computes_alone
        run.begun = True
    harness.advance()
    assert not harness.gate.active
    ordinary, another = harness.add(), harness.add("start")
    harness.advance()
    assert harness.started == [*suspects, ordinary]  # for that one it does wait
    assert not harness.gate.computes_alone
    ordinary.ended = True
    harness.advance()
    assert harness.started == [*suspects, ordinary, another]


def test_neither_waits_for_longer_than_the_limit() -> None:
    harness = GateHarness()
    before, alone, after = harness.add(), harness.add("full"), harness.add()
    harness.now = MAX_SECONDS
    harness.advance()
    assert harness.started == [before, alone]
    harness.now += MAX_SECONDS
    harness.advance()
    assert harness.started == [before, alone, after]


def test_aborted_requests_are_not_started() -> None:
    harness = GateHarness()
    before, alone, after = harness.add(), harness.add("start"), harness.add()
    alone.ended = after.ended = True
    harness.advance()
    assert harness.started == [before]
    assert not harness.gate.active
