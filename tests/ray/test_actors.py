"""The actors on nodes and the calls of them, without Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from syringa.fleet.provider import OwnerLoad
from syringa.ray.actors import NodeAgent, ReplicaActor
from syringa.ray.driver import ActorGone, CallFailed, RayDriver
from syringa.ray.observation import NodeObservation


class Exited(BaseException):
    """A process has exited, or a test has seen enough of an endless loop."""


def test_a_host_that_fails_exits_instead_of_repeating_its_last_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def exit_(status: int) -> None:
        raise Exited(status)

    def tick() -> None:
        raise OSError("the folder is gone")

    monkeypatch.setattr(os, "_exit", exit_)
    actor = ReplicaActor.__new__(ReplicaActor)
    actor._lock, actor._host = threading.Lock(), cast(Any, SimpleNamespace(ended=False, tick=tick))
    with pytest.raises(Exited, match="1"):
        actor._tick()


def test_an_agent_whose_measurement_fails_reports_no_load_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[OwnerLoad | None] = []
    results: list[Callable[[], OwnerLoad]] = [lambda: OwnerLoad(cpu_pct=1.0), lambda: 1 // 0, OwnerLoad]  # type: ignore[list-item, return-value]

    def sleep(_: float) -> None:
        seen.append(msgspec.msgpack.decode(agent.observe(), type=NodeObservation).owner_load)
        if len(seen) == 3:
            raise Exited

    monkeypatch.setattr("time.sleep", sleep)
    agent = NodeAgent.__new__(NodeAgent)
    agent._load, agent._meter = None, cast(Any, SimpleNamespace(measure=lambda: results[len(seen)]()))
    with pytest.raises(Exited):
        agent._measure()
    assert seen == [OwnerLoad(cpu_pct=1.0), None, OwnerLoad()]


class _RayError(Exception): ...


class _RayActorError(_RayError): ...


class _ActorUnavailableError(_RayActorError): ...


class _ActorUnschedulableError(_RayError): ...


class _RuntimeEnvSetupError(_RayError): ...


class _RayTaskError(_RayError): ...


class _GetTimeoutError(_RayError): ...


_EXCEPTIONS = {each.__name__.removeprefix("_"): each for each in (
    _RayError, _RayActorError, _ActorUnavailableError, _ActorUnschedulableError, _RuntimeEnvSetupError, _RayTaskError
)}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_RayActorError, ActorGone),
        (_ActorUnschedulableError, ActorGone),
        (_RuntimeEnvSetupError, ActorGone),
        (_ActorUnavailableError, CallFailed),
        (_RayTaskError, CallFailed),
        (_GetTimeoutError, CallFailed),
        (_RayError, CallFailed),
    ],
)
def test_only_errors_of_the_actor_itself_mean_that_it_is_gone(
    error: type[Exception], expected: type[Exception]
) -> None:
    def get(*_: object, **__: object) -> None:
        raise error("why")

    driver = RayDriver.__new__(RayDriver)
    driver._ray = cast(Any, SimpleNamespace(get=get, exceptions=SimpleNamespace(**_EXCEPTIONS)))
    with pytest.raises(expected, match="why"):
        driver.result(object())
