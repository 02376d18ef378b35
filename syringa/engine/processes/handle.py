"""What the supervisor knows of one model worker."""

from __future__ import annotations

import math
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from syringa.engine.client import protocol
from syringa.engine.interface import LoadStatus
from syringa.engine.processes import eviction, managed_process
from syringa.engine.processes.control import MessageConnection, Suspects, WorkerState
from syringa.engine.processes.health import HealthPage
from syringa.engine.processes.suspects import SuspectTable
from syringa.engine.worker.options import WorkerOptions
from syringa.types import EngineStats, ModelInfo

Phase = Literal["cold", "queued", "loading", "ready", "unloading", "failed"]
SETTLE_SECONDS = 2.0  # time for waiting requests to reach a model that was just loaded, before it may be evicted

_STATUS: dict[Phase, LoadStatus] = {
    "cold": "cold",
    "queued": "loading",
    "loading": "loading",
    "ready": "loaded",
    "unloading": "cold",
    "failed": "failed",
}


class WorkerHandle:
    def __init__(
        self,
        key: str,
        options: WorkerOptions,
        memory_needs: Mapping[eviction.Device, int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key, self.options, self.memory_needs = key, options, memory_needs
        self.name = options.model  # for logs
        self.device: eviction.Device = "cpu"  # expected, until the worker reports it
        self.memory_device: eviction.Device = "cpu"  # whose memory it waits for: a GPU model may lack host memory
        self.expected_gpu_bytes = 0  # what the worker may allocate
        self.gpu_bytes = 0  # what the worker reported
        self.phase: Phase = "cold"
        self.reason = ""
        self.idle_timeout, self.restart, self.released = 0.0, False, False
        self.opportunistic = False  # no request waits for it
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: MessageConnection[protocol.FromWorker] | None = None
        self.socket = ""
        self.info: ModelInfo | None = None
        self.busy = self.served = False
        self.requested_at = self.queued_at = self.used_at = self.ready_at = -math.inf
        self.unload_requested_at = self.stats_requested_at = -math.inf
        self.unload_deadline = math.inf
        self.retry_at = 0.0
        self.insufficient_free = self.insufficient_when_empty = self.free_at_start = 0  # see `eviction.PendingModel`
        self.insufficient_reason = ""
        self.failed_starts = 0  # in a row
        self.retryable = True  # whether another start may succeed without intervention
        self.failure_reported = False  # whether the worker printed why it failed
        self.health: HealthPage | None = None
        self.watched_from = -math.inf  # see `watchdog.assess`
        self.hanging = False  # whether it does not respond
        self.kill_reason = ""  # why the watchdog has killed it
        self.hangs = self.crashes = 0  # see `WorkerCounts`
        self.suspects = SuspectTable(clock)
        self._backoff = managed_process.MIN_BACKOFF_SECONDS

    @property
    def reason_file(self) -> str:
        return self.socket + ".reason"

    def state(self) -> WorkerState:
        """Return the state for API servers. A worker that is requested again while it is unloaded is "loading"."""
        status = _STATUS[self.phase]
        if self.phase == "unloading" and self.requested_at > self.unload_requested_at:
            status = "loading"
        elif self.phase == "ready" and self.hanging:
            status = "hanging"
        socket = self.socket if self.phase in ("ready", "unloading") else ""
        return WorkerState(self.key, status, socket, self.reason, self.hangs, self.crashes)

    def suspects_message(self) -> Suspects:
        return Suspects(self.key, self.suspects.levels())

    def enter(self, phase: Phase, reason: str, now: float) -> bool:
        """Change the phase. Return whether phase or reason are new."""
        if phase == "queued" and self.phase != "queued":
            self.queued_at = now
        if phase == "loading":
            self.served = False
        changed = (phase, reason) != (self.phase, self.reason)
        self.phase, self.reason = phase, reason
        return changed

    def observe(self, stats: EngineStats, now: float) -> None:
        self.busy = bool(stats.running or stats.waiting)
        self.served = self.served or self.busy or stats.steps > 0
        self.used_at = max(self.used_at, now - stats.idle_seconds)

    def back_off(self, now: float) -> None:
        """Delay the next start after a failure. The delay doubles, unless the worker had been healthy for long."""
        if self.phase == "ready" and now - self.ready_at > managed_process.HEALTHY_SECONDS:
            self._backoff = managed_process.MIN_BACKOFF_SECONDS
        self.retry_at = now + self._backoff
        self._backoff = min(2 * self._backoff, managed_process.MAX_BACKOFF_SECONDS)

    def pending_model(self) -> eviction.PendingModel:
        return eviction.PendingModel(
            device=self.memory_device,
            estimate=self.memory_needs[self.memory_device],
            insufficient_free=self.insufficient_free,
            insufficient_when_empty=self.insufficient_when_empty,
        )

    def resident_model(self, now: float, free: int = 0) -> eviction.ResidentModel:
        """`free`: bytes that its device has free now."""
        state: Literal["loading", "loaded", "unloading"] = "loading"
        if self.phase == "unloading":
            state = "unloading"
        elif self.phase == "ready" and (self.served or now - self.ready_at > SETTLE_SECONDS):
            state = "loaded"
        held = self._held(free)
        loading = self.phase == "loading"
        expected = max(self.expected_gpu_bytes, self.memory_needs[self.device]) if loading else held
        return eviction.ResidentModel(
            key=self.key,
            device=self.device,
            used_at=self.used_at,
            busy=self.busy or self.hanging,  # it would not exit if it was asked to
            state=state,
            memory=max(held, expected),
            held=held,
            idle_timeout=self.idle_timeout,
            released=self.released,
        )

    def read_reason(self) -> str:
        """Return the reason that a failed worker wrote, or an empty string."""
        try:
            return Path(self.reason_file).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def _held(self, free: int) -> int:
        """Return the bytes it uses on its device. While it loads on a GPU, they are inferred from free memory."""
        if self.device == "cpu":
            return self._resident_bytes()
        return self.gpu_bytes if self.phase != "loading" else max(0, self.free_at_start - free)

    def _resident_bytes(self) -> int:
        """Return the resident set size of its process."""
        if self.process is None:
            return 0
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return self.memory_needs["cpu"]  # a system without /proc
