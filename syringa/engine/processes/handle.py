"""A worker that may be running, and what the supervisor knows of it."""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from syringa.engine.client import protocol
from syringa.engine.interface import Status
from syringa.engine.processes import eviction, managed_process
from syringa.engine.processes.control import Link, State
from syringa.engine.worker.server import WorkerOptions
from syringa.types import EngineStats, ModelInfo

Phase = Literal["cold", "queued", "loading", "ready", "leaving", "failed"]
SETTLE_SECONDS = 2.0  # one that was just loaded is left to whoever waited for it

_STATUS: dict[Phase, Status] = {
    "cold": "cold", "queued": "loading", "loading": "loading", "ready": "loaded", "leaving": "cold", "failed": "failed",
}  # fmt: skip


class ModelWorker:
    def __init__(self, key: str, options: WorkerOptions, needs: Mapping[eviction.Device, int]) -> None:
        self.key, self.options, self.needs = key, options, needs
        self.name = options.model  # what people call it
        self.device: eviction.Device = "cpu"  # where it is, or probably will be
        self.short_of: eviction.Device = "cpu"  # whose memory it waits for; for one on a GPU, maybe the host's
        self.expected = 0  # bytes on a GPU that it was told it may take
        self.on_gpu = 0  # bytes that it has said it takes there
        self.phase: Phase = "cold"
        self.reason = ""
        self.idle, self.keep, self.dropped = 0.0, False, False
        self.soft = False  # nobody waits for it
        self.process: subprocess.Popen[bytes] | None = None
        self.link: Link[protocol.FromWorker | protocol.Tokens] | None = None
        self.socket = ""
        self.info: ModelInfo | None = None
        self.busy = self.served = False
        self.wanted_at = self.queued_at = self.used_at = self.ready_at = self.left_at = self.asked_at = -math.inf
        self.leave_by = math.inf
        self.retry_at = 0.0
        self.too_little = self.hopeless = self.free_at_start = 0  # bytes, see `eviction.Newcomer`
        self.too_little_said = ""
        self.deaths = 0  # while it was loading, in a row
        self.may_recover = True  # whether trying again may help without anybody's doing
        self.told = False  # whether people have read why it failed
        self._pause = managed_process.FIRST_PAUSE

    @property
    def reason_file(self) -> str:
        return self.socket + ".reason"

    def state(self) -> State:
        """How it is for those who wait for it. One that leaves though it is wanted again is on its way already."""
        status = _STATUS[self.phase]
        if self.phase == "leaving" and self.wanted_at > self.left_at:
            status = "loading"
        return State(self.key, status, self.socket if self.phase in ("ready", "leaving") else "", self.reason)

    def enter(self, phase: Phase, reason: str, now: float) -> bool:
        """Whether that is news."""
        if phase == "queued" and self.phase != "queued":
            self.queued_at = now
        if phase == "loading":
            self.served = False
        news = (phase, reason) != (self.phase, self.reason)
        self.phase, self.reason = phase, reason
        return news

    def observe(self, stats: EngineStats, now: float) -> None:
        self.busy = bool(stats.running or stats.waiting)
        self.served = self.served or self.busy or stats.steps > 0
        self.used_at = max(self.used_at, now - stats.idle_seconds)

    def back_off(self, now: float) -> None:
        """It has died, or could not start: the next start waits a while, unless it had been well for long."""
        if self.phase == "ready" and now - self.ready_at > managed_process.HEALTHY_SECONDS:
            self._pause = managed_process.FIRST_PAUSE
        self.retry_at = now + self._pause
        self._pause = min(2 * self._pause, managed_process.LONGEST_PAUSE)

    def newcomer(self) -> eviction.Newcomer:
        need, where = self.needs[self.short_of], self.short_of
        return eviction.Newcomer(device=where, estimate=need, too_little=self.too_little, hopeless=self.hopeless)

    def loaded(self, now: float, free: int = 0) -> eviction.Loaded:
        """`free`: bytes that its device has free now."""
        state: Literal["loading", "settled", "leaving"] = "loading"
        if self.phase == "leaving":
            state = "leaving"
        elif self.phase == "ready" and (self.served or now - self.ready_at > SETTLE_SECONDS):
            state = "settled"
        held = self._held(free)
        expected = max(self.expected, self.needs[self.device]) if self.phase == "loading" else held
        return eviction.Loaded(
            key=self.key,
            device=self.device,
            used_at=self.used_at,
            busy=self.busy,
            state=state,
            memory=max(held, expected),
            held=held,
            idle_limit=self.idle,
            dropped=self.dropped,
        )

    def reason_left(self) -> str:
        """What a worker that gave up has left behind."""
        try:
            return Path(self.reason_file).read_text(encoding="utf-8").strip()
        except OSError:
            return ""

    def _held(self, free: int) -> int:
        """Bytes that it takes now of its device's memory. What it takes of a GPU's while it loads, nobody says; but so
        much less is free than when it began."""
        if self.device == "cpu":
            return self._resident()
        return self.on_gpu if self.phase != "loading" else max(0, self.free_at_start - free)

    def _resident(self) -> int:
        """Bytes that its process takes now."""
        if self.process is None:
            return 0
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return self.needs["cpu"]  # a system without /proc
