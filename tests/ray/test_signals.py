"""Signals that arrive while `syringa cluster start` and `join` are starting something, without Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from syringa.cli import cluster_start
from syringa.cli.cluster_start import ClusterStart
from syringa.cli.serve_process import ServeOptions
from syringa.cluster.folder import ClusterFolder
from syringa.cluster.join import ServerAddress
from syringa.config import Config
from syringa.engine.processes import managed_process
from syringa.ray import internals, member
from syringa.ray.member import ClusterMember, MemberOptions
from syringa.ray.processes import START_SECONDS, reconnect_seconds


class FakeProcess:
    """A server that ends when it is told to."""

    stdin, pid = None, 0

    def __init__(self) -> None:
        self.status: int | None = None
        self.terminated = 0

    def poll(self) -> int | None:
        return self.status

    def terminate(self) -> None:
        self.terminated += 1
        self.status = 0

    def wait(self, timeout: float | None = None) -> int:
        if self.status is None:
            raise subprocess.TimeoutExpired("server", timeout or 0.0)
        return self.status

    def kill(self) -> None:
        self.status = -9


class FakeNode:
    """A node of Ray that has not been listed yet."""

    running, stopped = True, False

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def start(tmp_path: Path) -> ClusterStart:
    return ClusterStart(Config(), ClusterFolder(tmp_path), ServerAddress("10.0.0.7", 8470), "")


@pytest.mark.parametrize(("redis", "passed"), [("", False), ("10.0.0.9:6379", True)])
def test_password_of_redis_is_given_to_a_head_that_uses_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis: str, passed: bool
) -> None:
    given: list[str] = []
    monkeypatch.setattr(cluster_start, "RayProcess", lambda name, arguments, *_: given.extend(arguments))
    monkeypatch.setattr(cluster_start, "environment", lambda folder, redis: {})
    ClusterStart(Config(), ClusterFolder(tmp_path), ServerAddress("10.0.0.7", 8470), redis, "secret")._launch_head()
    assert any("secret" in each for each in given) is passed


def test_a_signal_while_the_server_is_being_started_still_stops_it(
    start: ClusterStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeProcess()

    def spawn(_: ServeOptions) -> Any:
        start._on_signal()
        return server

    monkeypatch.setattr(cluster_start, "_spawn_server", spawn)
    start._poll_server(ServeOptions(flags={}, file=None))
    assert (start._stop_server(), server.terminated) == (0, 1)


def test_a_server_that_drains_after_a_signal_is_not_told_twice(
    start: ClusterStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = FakeProcess()
    monkeypatch.setattr(cluster_start, "_spawn_server", lambda _: server)
    start._poll_server(ServeOptions(flags={}, file=None))
    start._on_signal()
    assert (start._stop_server(), server.terminated) == (0, 1)


def test_the_pause_before_a_restart_is_short_again_after_the_server_ran_for_a_while(
    start: ClusterStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    server = FakeProcess()
    monkeypatch.setattr(cluster_start, "_spawn_server", lambda _: server)
    pauses = []
    for seconds in (1, 1, 1, cluster_start.STABLE_SECONDS, 1):
        start._poll_server(ServeOptions(flags={}, file=None))
        now += seconds
        server.status = -9
        start._poll_server(ServeOptions(flags={}, file=None))
        pauses.append(start._server_start_at - now)
        now, server.status = start._server_start_at, None
    assert pauses == [0.5, 1.0, 2.0, 0.5, 1.0]


def test_joining_is_given_up_at_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "check_head", lambda *_: None)
    node = FakeNode()
    monkeypatch.setattr(member, "RayProcess", lambda *_: node)
    monkeypatch.setattr(member, "environment", lambda *_: {})
    joining = ClusterMember(
        MemberOptions(
            head="h:1", folder=ClusterFolder(tmp_path), name="n", address="10.0.0.8", labels={}, cpus=None, gpus=None
        )
    )
    monkeypatch.setattr(joining, "_look", lambda: None)
    looks = iter([False, True])
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert joining.start(lambda: next(looks)) is None
    assert node.stopped


@pytest.mark.parametrize(("status", "result"), [(0, 0), (managed_process.EXIT_CANNOT_START, 1), (1, None), (-9, None)])
def test_a_server_that_fails_is_started_again_unless_it_cannot_start(
    start: ClusterStart, monkeypatch: pytest.MonkeyPatch, status: int, result: int | None
) -> None:
    servers: list[FakeProcess] = []

    def spawn(_: ServeOptions) -> Any:
        servers.append(FakeProcess())
        return servers[-1]

    monkeypatch.setattr(cluster_start, "_spawn_server", spawn)
    monkeypatch.setattr(cluster_start, "MIN_BACKOFF_SECONDS", 0.0)
    start._backoff = 0.0
    options = ServeOptions(flags={}, file=None)
    assert start._poll_server(options) is None
    servers[0].status = status
    assert start._poll_server(options) == result
    if result is None:
        assert start._poll_server(options) is None
        assert len(servers) == 2


class FakeHead:
    """A head of Ray that runs until the test ends it."""

    log = "log"

    def __init__(self) -> None:
        self.running, self.stopped = True, False

    def failure(self) -> str:
        return "gcs_server has ended"

    def stop(self) -> None:
        self.running, self.stopped = False, True


class Heads:
    """The heads that `cluster start` has started, and the time."""

    def __init__(self, start: ClusterStart, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[FakeHead] = []
        self.now, self.accepts = 1000.0, False
        self._start = start
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        monkeypatch.setattr(start, "_launch_head", self._launch)
        monkeypatch.setattr(start, "_head_accepts", lambda: self.accepts)
        start._head, start._head_ready = self._launch(), True  # type: ignore[assignment]

    def _launch(self) -> FakeHead:
        self.started.append(FakeHead())
        return self.started[-1]

    def until_started(self) -> float:
        """Return after how many seconds another head is started."""
        count, began = len(self.started), self.now
        while len(self.started) == count:
            self._start._poll_head()
            self.now += 0.25
        return self.now - began


def test_a_head_that_never_accepts_is_started_again_after_seconds(
    start: ClusterStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = Heads(start, monkeypatch)
    heads.started[-1].running = False
    assert heads.until_started() >= reconnect_seconds()  # its nodes wait for it
    pauses = []
    for _ in range(3):
        heads.started[-1].running = False
        pauses.append(heads.until_started())
    assert max(pauses) < 5
    assert pauses == sorted(pauses)
    heads.accepts = True
    start._poll_head()
    heads.started[-1].running = False
    assert heads.until_started() >= reconnect_seconds()


def test_a_new_head_that_runs_and_does_not_accept_is_replaced(
    start: ClusterStart, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = Heads(start, monkeypatch)
    heads.started[-1].running = False
    heads.until_started()
    silent = heads.started[-1]
    assert heads.until_started() >= START_SECONDS
    assert silent.stopped
