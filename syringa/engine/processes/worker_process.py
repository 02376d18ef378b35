"""A worker process as its parent sees it: started, connected to, watched, and cleared away when it has ended."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from syringa.engine.client import protocol
from syringa.engine.processes import managed_process, watchdog
from syringa.engine.processes.control import MessageConnection
from syringa.engine.processes.health import HealthPage, create_page
from syringa.engine.vllm.launch import spawn_vllm_worker
from syringa.engine.worker.options import WorkerOptions
from syringa.types import EngineStats, LoadProgress

logger = logging.getLogger("syringa.supervisor")

WORKER_MODULE = "syringa.engine.worker.server"
STATS_SECONDS = 1.0  # interval of stats requests to a worker
PROGRESS_SECONDS = 0.2  # in which progress of loading is noticed at most once, unless a phase begins
STARTING = LoadProgress("starting")
UNLOAD_SECONDS = 10.0  # for an idle worker to exit
DRAIN_MARGIN_SECONDS = 2.0  # after the grace period of a drain, for API servers to move the remaining requests

Spawn = Callable[[WorkerOptions], subprocess.Popen[bytes]]


def spawn_worker(options: WorkerOptions) -> subprocess.Popen[bytes]:
    """Start a worker of the engine that `options` name."""
    environment = {"CUDA_VISIBLE_DEVICES": options.gpu} if options.gpu else {}
    if options.engine == "vllm":
        return spawn_vllm_worker(options, environment)
    return managed_process.spawn(WORKER_MODULE, options, pass_fds=options.inherited_fds, environment=environment)


class WorkerProcess:
    """What is known of one worker process at a time. Nothing here blocks."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: MessageConnection[protocol.FromWorker] | None = None
        self.socket = ""
        self.address = ""  # for clients on other machines, if it has one
        self.fingerprint = ""
        self.stats = EngineStats()
        self.stats_requested_at = -math.inf
        self.health: HealthPage | None = None
        self.watched_from = -math.inf  # see `watchdog.assess`
        self.hanging = False  # whether it does not respond
        self.kill_reason = ""  # why the watchdog has killed it
        self.progress = STARTING  # while it loads
        self._progress_at = -math.inf

    @property
    def reason_file(self) -> str:
        return self.socket + ".reason"

    def launch(self, spawn: Spawn, options: WorkerOptions, now: float) -> None:
        """Start the process, with a health page of its own. `options` have its socket."""
        self.socket, self.watched_from = options.socket, now
        self.progress, self._progress_at = STARTING, -math.inf
        health_fd = create_page()
        self.health = HealthPage(health_fd)
        try:
            self.process = spawn(msgspec.structs.replace(options, health_fd=health_fd))
        finally:
            os.close(health_fd)

    def connect(self, selector: selectors.BaseSelector) -> None:
        """Connect to the worker, which listens before it loads. Nothing happens while its process is still starting."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(self.socket)
        except OSError:
            connection.close()
            return
        self.connection = MessageConnection(connection, protocol.client_decoder(), selector)

    def receive(self) -> list[protocol.FromWorker]:
        """Send what is unsent, and return the messages that have arrived."""
        if self.connection is None:
            return []
        self.connection.flush()
        return self.connection.receive()

    def request_stats(self, now: float, interval: float = STATS_SECONDS) -> None:
        """Ask for statistics, once per interval."""
        if self.connection is not None and now - self.stats_requested_at >= interval:
            self.stats_requested_at = now
            self.connection.send(protocol.GetStats())

    def watch(self, limits: watchdog.WatchdogLimits, now: float, where: str) -> bool:
        """Find out whether it hangs, and kill it if that lasts. Return whether `hanging` has changed.

        `where`: the worker, for logs.
        """
        assert self.health is not None
        assert self.process is not None
        verdict = watchdog.assess(self.health.read(), limits, watched_from=self.watched_from, now=now)
        if verdict.action == "none":
            if self.hanging and not self.kill_reason:
                logger.warning("model worker responds again: %s", where)
                self.hanging = False
                return True
            return False
        begins = not self.hanging
        if begins:
            logger.error("model worker hangs: %s reason=%r", where, verdict.reason)
            self.hanging = True
        if verdict.action == "kill" and not self.kill_reason:
            logger.error("model worker is killed because it hangs: %s reason=%r", where, verdict.reason)
            self.kill_reason = verdict.reason
            self.process.kill()  # also ends a stopped process
        return begins

    def notice_progress(self, now: float) -> bool:
        """Find out how far it is in loading its model. Return whether `progress` has changed."""
        assert self.health is not None
        progress = self.health.loading()
        if progress == self.progress:
            return False
        if progress.phase == self.progress.phase and now < self._progress_at + PROGRESS_SECONDS:
            return False
        self.progress, self._progress_at = progress, now
        return True

    def running(self) -> list[bytes]:
        """Return the fingerprints of the requests that it computes, or computed when it died."""
        return self.health.running() if self.health is not None else []

    def read_reason(self) -> str:
        """Return the reason that a failed worker wrote, or an empty string."""
        try:
            return Path(self.reason_file).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def clear_process(self) -> None:
        """Forget a process that has ended, and remove its files."""
        if self.connection is not None:
            self.connection.close()
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        if self.health is not None:
            self.health.close()
        self.process = self.connection = self.health = None
        self.hanging, self.kill_reason = False, ""
        self.stats = EngineStats()
        for path in (self.socket, self.reason_file):
            with contextlib.suppress(OSError):
                os.unlink(path)


def is_crash(status: int) -> bool:
    """Return whether a worker that had loaded its model ended by a fault, by its exit status."""
    return status not in (0, -signal.SIGTERM)


def start_failure(status: int, reason: str, kill_reason: str) -> str:
    """Return in words why a worker could not load its model. `reason`: what it wrote itself."""
    if kill_reason:
        return f"its worker hung while loading: {kill_reason}"
    return reason or f"its worker ended with {managed_process.describe_exit(status)}"
