"""The host of a replica on a node, with worker processes of the test, and once with a real one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.cluster.tls import TlsFiles
from syringa.engine.client import protocol
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.processes import managed_process
from syringa.engine.processes.replica_host import FetchModel, Progress, ReplicaHost, use_local_files
from syringa.engine.processes.worker_process import DRAIN_MARGIN_SECONDS, UNLOAD_SECONDS
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ModelError
from syringa.fleet.bridge_protocol import LaunchReplica
from syringa.types import EngineDelta, EngineRequest, EngineStats, SamplingParams, StopConditions
from tests.cluster.certificates import Certificates
from tests.engine.processes.manager_harness import FakeProcess, retire_message
from tests.engine.processes.stub_worker import INFO

HANG_SECONDS = 240.0
TLS = TlsFiles(ca="ca.pem", certificate="server.pem", key="server.key")


def launch_of(model: str = "/models/m") -> LaunchReplica:
    options = msgspec.json.encode(WorkerOptions(socket="", model=model, threads=1))
    return LaunchReplica(
        "m-abc123", "key", "node-1", options, cpus=1, pool="night", started_at=5.0, name="m", heartbeat_timeout=10.0,
        step_timeout=60.0, version="1",
    )  # fmt: skip


def wait_for(condition: Callable[[], object], tick: Callable[[], None] = lambda: None) -> None:
    end = time.monotonic() + HANG_SECONDS
    while not condition():
        assert time.monotonic() < end, "the condition did not become true in time"
        tick()
        time.sleep(0.01)


class HostHarness:
    """A host with the clock and the processes of the test."""

    def __init__(self, folder: str, fetch: FetchModel = use_local_files) -> None:
        self.now = 1000.0
        self.processes: list[FakeProcess] = []
        self.host = ReplicaHost(
            launch_of(), host="node-1.example", tls=TLS, folder=folder, fetch=fetch, spawn=self._spawn,
            clock=lambda: self.now, free=lambda: 77,
        )  # fmt: skip

    def _spawn(self, options: WorkerOptions) -> Any:
        self.processes.append(FakeProcess(options, lambda: self.now))
        return self.processes[-1]

    @property
    def process(self) -> FakeProcess:
        return self.processes[0]

    def start(self) -> FakeProcess:
        """Let the worker begin to load."""
        wait_for(lambda: self.processes, self.host.tick)
        self.host.tick()  # connect
        return self.process

    def load(self) -> FakeProcess:
        process = self.start()
        process.send(protocol.Ready(INFO, fingerprint="f", address="tcp:node-1.example:4000"))
        self.host.tick()
        process.health.set_phase("serving")
        process.health.beat()
        return process

    def run_for(self, seconds: float, *beating: FakeProcess) -> None:
        for _ in range(round(2 * seconds)):
            for process in beating:
                process.health.beat()
            self.now += 0.5
            self.host.tick()

    def end(self, status: int) -> None:
        self.process.end(status)
        self.host.tick()


def test_host_starts_a_worker_that_listens_for_other_machines(folder: str) -> None:
    harness = HostHarness(folder)
    process = harness.start()
    options = process.options
    assert (options.listen, options.tls, options.free_memory) == ("tcp:node-1.example:0", TLS, 77)
    assert (options.model, options.threads) == ("/models/m", 1)
    status = harness.host.status()
    assert (status.phase, status.address, status.stats) == ("loading", "", None)
    assert (status.id, status.model, status.node, status.pool) == ("m-abc123", "key", "node-1", "night")
    assert (status.cpus, status.started_at, status.name, status.version) == (1, 5.0, "m", "1")
    harness.host.stop(0.0)


def test_host_reports_a_loaded_worker_and_its_statistics(folder: str) -> None:
    harness = HostHarness(folder)
    process = harness.load()
    assert protocol.GetStats() in process.received()
    process.send(protocol.StatsReply(EngineStats(running=2, waiting=1)))
    harness.host.tick()
    status = harness.host.status()
    assert (status.phase, status.address, status.fingerprint, status.info) == (
        "ready", "tcp:node-1.example:4000", "f", INFO,
    )  # fmt: skip
    assert status.stats == EngineStats(running=2, waiting=1)
    assert not harness.host.ended
    harness.host.stop(0.0)
    assert process.signals == ["TERM"]
    assert (harness.host.status().phase, harness.host.status().failed) == ("ended", False)


def test_host_fetches_files_with_progress_before_it_starts_the_worker(folder: str) -> None:
    reported, go_on = threading.Event(), threading.Event()

    def fetch(options: WorkerOptions, progress: Progress) -> WorkerOptions:
        progress("1.0 of 2.0 GB")
        reported.set()
        assert go_on.wait(HANG_SECONDS)
        return msgspec.structs.replace(options, model="/cache/m")

    harness = HostHarness(folder, fetch)
    assert reported.wait(HANG_SECONDS)
    harness.host.tick()
    assert (harness.host.status().phase, harness.host.status().reason) == ("fetching", "1.0 of 2.0 GB")
    assert harness.processes == []
    go_on.set()
    assert harness.start().options.model == "/cache/m"
    assert harness.host.status().reason == ""
    harness.host.stop(0.0)


def test_host_ends_when_files_cannot_be_fetched(folder: str) -> None:
    def fetch(options: WorkerOptions, progress: Progress) -> WorkerOptions:
        raise ModelError("the disk is full")

    harness = HostHarness(folder, fetch)
    wait_for(lambda: harness.host.ended, harness.host.tick)
    status = harness.host.status()
    assert (status.phase, status.failed, status.crashed, status.reason) == ("ended", True, False, "the disk is full")
    assert harness.processes == []


def test_drain_cancels_a_fetch(folder: str) -> None:
    begun, drained, cancelled = threading.Event(), threading.Event(), threading.Event()

    def fetch(options: WorkerOptions, progress: Progress) -> WorkerOptions:
        begun.set()
        assert drained.wait(HANG_SECONDS)
        try:
            progress("more")
        except BaseException:
            cancelled.set()
            raise
        return options

    harness = HostHarness(folder, fetch)
    assert begun.wait(HANG_SECONDS)
    harness.host.drain(30.0)
    drained.set()
    assert cancelled.wait(HANG_SECONDS)
    harness.host.tick()
    status = harness.host.status()
    assert (status.phase, status.failed) == ("ended", False)
    assert harness.processes == []


def test_host_reports_a_crash_with_the_requests_that_were_computed(folder: str) -> None:
    harness = HostHarness(folder)
    harness.load().health.set_running([b"1" * 16, b"2" * 16])
    harness.end(-signal.SIGSEGV)
    status = harness.host.status()
    assert (status.phase, status.failed, status.crashed, status.retryable) == ("ended", True, True, True)
    assert status.suspects == [b"1" * 16, b"2" * 16]
    assert status.reason == "its worker ended: signal SIGSEGV"
    assert (status.address, status.stats) == ("", None)
    harness.run_for(5)
    assert len(harness.processes) == 1  # the controller decides whether another one is started


def test_host_kills_a_worker_that_hangs(folder: str) -> None:
    harness = HostHarness(folder)
    process = harness.load()
    harness.run_for(10.5)
    status = harness.host.status()
    assert (status.phase, status.hangs, status.address) == ("hanging", 1, "tcp:node-1.example:4000")
    harness.run_for(1, process)
    assert harness.host.status().phase == "ready"
    harness.run_for(20.5)
    assert process.signals == ["KILL"]
    harness.end(-signal.SIGKILL)
    status = harness.host.status()
    assert (status.crashed, status.hangs) == (True, 2)
    assert status.reason == "its worker ended: was killed, because it hung"


def test_host_gives_a_fresh_interval_after_it_was_suspended(folder: str) -> None:
    harness = HostHarness(folder)
    harness.load()
    harness.now += 3600
    harness.host.tick()
    assert harness.host.status().phase == "ready"
    harness.host.stop(0.0)


@pytest.mark.parametrize(
    ("status", "reason", "retryable"),
    [
        (managed_process.EXIT_CANNOT_START, "its file is cut short", False),
        (managed_process.EXIT_NO_MEMORY, "it needs 9 GiB", True),
        (-signal.SIGKILL, "", True),
    ],
)
def test_host_reports_why_a_worker_cannot_load(folder: str, status: int, reason: str, retryable: bool) -> None:
    harness = HostHarness(folder)
    process = harness.start()
    if reason:
        Path(process.options.reason_file).write_text(reason)
    harness.end(status)
    report = harness.host.status()
    assert (report.phase, report.failed, report.crashed, report.retryable) == ("ended", True, False, retryable)
    assert report.reason == (reason or "its worker ended with signal SIGKILL, perhaps out of memory")
    assert list(Path(folder).iterdir()) == []


def test_drained_host_lets_requests_finish_and_then_ends(folder: str) -> None:
    harness = HostHarness(folder)
    process = harness.load()
    harness.host.drain(30.0)
    assert retire_message(process) == protocol.Retire(0.0, True)
    status = harness.host.status()
    assert (status.phase, status.grace, status.address) == ("draining", 30.0, "tcp:node-1.example:4000")
    harness.run_for(29, process)
    assert process.signals == []
    harness.end(0)
    status = harness.host.status()
    assert (status.phase, status.failed, status.crashed, status.reason) == ("ended", False, False, "")


def test_drained_worker_that_does_not_exit_is_terminated_and_then_killed(folder: str) -> None:
    harness = HostHarness(folder)
    process = harness.load()
    harness.host.drain(30.0)
    harness.run_for(30.0 + DRAIN_MARGIN_SECONDS, process)
    assert process.signals == []
    harness.run_for(0.5, process)
    assert process.signals == ["TERM"]
    harness.run_for(UNLOAD_SECONDS + 0.5, process)
    assert process.signals[-1] == "KILL"
    harness.end(-signal.SIGKILL)
    assert not harness.host.status().failed


def test_second_drain_may_shorten_the_grace_period_only(folder: str) -> None:
    harness = HostHarness(folder)
    process = harness.load()
    harness.host.drain(30.0)
    harness.host.drain(60.0)
    assert harness.host.status().grace == 30.0
    harness.host.drain(0.0)
    assert harness.host.status().grace == 0.0
    harness.run_for(DRAIN_MARGIN_SECONDS + 0.5, process)
    assert process.signals == ["TERM"]
    harness.end(-signal.SIGTERM)


def test_drain_ends_a_worker_that_is_loading_at_once(folder: str) -> None:
    harness = HostHarness(folder)
    process = harness.start()
    harness.host.drain(30.0)
    harness.run_for(0.5, process)
    assert process.signals == ["TERM"]
    harness.end(-signal.SIGTERM)
    assert (harness.host.status().phase, harness.host.status().failed) == ("ended", False)


@pytest.mark.slow
def test_real_worker_serves_over_tls_and_its_crash_is_reported(folder: str, tmp_path: Path) -> None:
    from tests.engine.worker.tiny_llama import save_tiny_llama  # it imports torch

    (tmp_path / "tiny").mkdir()
    save_tiny_llama(tmp_path / "tiny")
    certificates = Certificates(tmp_path)
    launch = msgspec.structs.replace(launch_of(str(tmp_path / "tiny")), heartbeat_timeout=HANG_SECONDS)
    host = ReplicaHost(launch, host="127.0.0.1", tls=certificates.server, folder=folder)
    tokens: list[int] = []

    async def generate(address: str) -> None:
        client = WorkerClient(address, tls=certificates.client)
        client.start()
        request = EngineRequest(
            id="r", prompt=[1, 2, 3], sampling=SamplingParams(seed=1), stopping=StopConditions(max_tokens=8)
        )

        def take(delta: EngineDelta) -> bool:
            tokens.extend(delta.tokens)
            return False

        try:
            async with asyncio.timeout(HANG_SECONDS):
                await client.wait_ready()
                await client.submit(request, take)
        finally:
            await client.close()

    try:
        wait_for(lambda: host.status().phase not in ("fetching", "loading"), host.tick)
        status = host.status()
        assert (status.phase, status.reason) == ("ready", "")
        assert status.address.startswith("tcp:127.0.0.1:")
        assert status.fingerprint
        asyncio.run(generate(status.address))
        assert len(tokens) == 8
        wait_for(lambda: (stats := host.status().stats) and stats.steps, host.tick)
        assert host.pid is not None
        os.kill(host.pid, signal.SIGKILL)
        wait_for(lambda: host.ended, host.tick)
        assert host.status().crashed
        assert host.pid is None
    finally:
        host.stop()
