"""The node of a machine, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.errors import StartupError
from syringa.ray import internals, member
from syringa.ray.internals import ConnectionRefused, HeadUnavailable, RayNode
from syringa.ray.member import DRAIN_MARGIN_SECONDS, LISTED_SECONDS, ClusterMember, MemberOptions
from tests.ray.fake_driver import Clock


class FakeProcess:
    """A process of Ray that has just ended."""

    running = False

    def failure(self) -> str:
        return "signal SIGKILL"

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("noticed", [True, False])
def test_a_node_is_started_again_when_ray_has_noticed_its_end(
    noticed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, it would get another name, by which its failures are not known; after a while it is started anyway."""
    started: list[FakeProcess] = []

    def start(*_: object) -> FakeProcess:
        started.append(FakeProcess())
        return started[-1]

    monkeypatch.setattr(member, "RayProcess", start)
    monkeypatch.setattr(member, "environment", lambda _: {})
    clock = Clock()
    node = ClusterMember(MemberOptions(head="h:1", folder=ClusterFolder(tmp_path), name="n", address="10.0.0.8"), clock)
    alive = True
    monkeypatch.setattr(node, "_look", lambda: RayNode("1", "n", "10.0.0.8", alive, False, {}, {}))
    node._process = node._spawn()
    assert node.poll() == "waiting"  # it has ended
    clock.now += 10
    assert (node.poll(), len(started)) == ("waiting", 1)
    if noticed:
        alive = False
    else:
        clock.now += LISTED_SECONDS
    assert (node.poll(), len(started)) == ("waiting", 2)


class RunningProcess(FakeProcess):
    running = True


class FakeHead:
    """The client of a head, which records what is to be drained."""

    def __init__(self) -> None:
        self.drained: list[float] = []
        self.failures = 0

    def drain(self, node_id: str, reason: str, deadline: float) -> None:
        if self.failures:
            self.failures -= 1
            raise HeadUnavailable("late")
        self.drained.append(deadline)


class FakeTime:
    """`time` of the module, whose pauses take no time."""

    def __init__(self, clock: Clock) -> None:
        self.sleep, self.time, self.monotonic = self._sleep, clock, clock
        self._clock = clock

    def _sleep(self, seconds: float) -> None:
        self._clock.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(member, "time", FakeTime(clock))
    monkeypatch.setattr(member, "environment", lambda _: {})
    return clock


@pytest.fixture
def node(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A member whose node runs; `looks` are the answers of the head, the last of which is repeated."""
    monkeypatch.setattr(member, "RayProcess", lambda *_: RunningProcess())
    options = MemberOptions(head="h:1", folder=ClusterFolder(tmp_path), name="n", address="10.0.0.8")
    made: Any = ClusterMember(options, clock)
    made.looks, made._client = [None], FakeHead()
    monkeypatch.setattr(made, "_look", lambda: made.looks.pop(0) if len(made.looks) > 1 else made.looks[0])
    made._process = made._spawn()
    return made


ALIVE = RayNode("1", "n", "10.0.0.8", alive=True)
GONE = RayNode("1", "n", "10.0.0.8", alive=False, drained=True)


def test_a_node_that_leaves_waits_for_a_head_that_answers_late(node: Any, clock: Clock) -> None:
    began = clock.now
    node.looks = [None, ALIVE, None, None, ALIVE, GONE]
    node._client.failures = 1
    node.drain(30.0)
    assert node._client.drained == [began + 30.0]
    assert not node.looks[1:]


def test_a_node_whose_head_is_gone_leaves_after_its_grace(node: Any, clock: Clock) -> None:
    began = clock.now
    node.drain(30.0)
    assert clock.now - began == pytest.approx(30.0 + DRAIN_MARGIN_SECONDS, abs=1.0)
    cancelled = clock.now
    node.drain(30.0, lambda: clock.now > cancelled + 1)
    assert clock.now < cancelled + 3


def test_a_node_that_was_drained_and_has_ended_has_left(node: Any) -> None:
    node._process = FakeProcess()
    node.looks = [GONE]
    assert node.poll() == "left"


def test_a_member_waits_for_its_head(
    node: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Exception | None] = [*[HeadUnavailable("nothing listens") for _ in range(40)], None]

    def check(*_: object) -> None:
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.setattr(internals, "check_head", check)
    node.looks = [ALIVE]
    assert node.start(wait=True) is ALIVE
    assert [each.getMessage() for each in caplog.records].count(
        "cluster: node waits for the head: nothing listens"
    ) == 2
    answers.extend([HeadUnavailable("nothing listens")] * 2)
    assert node.start(lambda: len(answers) < 2, wait=True) is None
    answers[:] = [ConnectionRefused("another cluster")]
    with pytest.raises(StartupError, match="another cluster"):
        node.start(wait=True)
    answers[:] = [HeadUnavailable("nothing listens")]
    with pytest.raises(StartupError, match="nothing listens"):
        node.start()
