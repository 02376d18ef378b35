"""What the supervisor knows of one replica of a model: a worker process, or the wish for one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

from syringa.engine.interface import ReplicaState, ReplicaStatus
from syringa.engine.processes import eviction
from syringa.engine.processes.model_workers import ModelWorkers
from syringa.engine.processes.worker_process import WorkerProcess
from syringa.types import EngineStats

Phase = Literal["cold", "queued", "loading", "ready", "unloading", "failed"]
RECENT_SECONDS = 60.0  # a worker that dies is restarted if it was used within this time
SETTLE_SECONDS = 2.0  # time for waiting requests to reach a model that was just loaded, before it may be evicted

_STATUS: dict[Phase, ReplicaStatus] = {
    "cold": "ended",
    "queued": "queued",
    "loading": "loading",
    "ready": "ready",
    "unloading": "draining",
    "failed": "ended",
}


class WorkerHandle(WorkerProcess):
    def __init__(self, model: ModelWorkers, device: eviction.Device = "cpu") -> None:
        """`device`: the expected one, until the worker reports it."""
        super().__init__()
        self.model = model
        self.id = ""  # of the current process or the next one
        self.device, self.memory_device = device, device  # the latter is the one whose memory it waits for
        self.gpus: tuple[int, ...] = (0,)  # numbers of its GPUs among those that are visible
        self.expected_gpu_bytes = 0  # what the worker may allocate
        self.planned_bytes = 0  # what it will take of a CPU's memory, with all of its cache
        self.gpu_bytes = 0  # what the worker reported
        self.phase: Phase = "cold"
        self.reason = ""
        self.opportunistic = False  # no request waits for it
        self.drained = False  # whether it ends for good
        self.busy = self.served = False
        self.queued_at = self.used_at = self.ready_at = -math.inf
        self.unload_requested_at = -math.inf
        self.unload_deadline = math.inf
        self.grace = 0.0  # seconds that its requests had when unloading began
        self.free_at_start = self.spare_at_start = 0  # bytes free, and those that others will not take

    def state(self) -> ReplicaState:
        status: ReplicaStatus = "hanging" if self.phase == "ready" and self.hanging else _STATUS[self.phase]
        serving = self.phase in ("ready", "unloading")
        return ReplicaState(
            self.id,
            status,
            address=(self.address or f"unix:{self.socket}") if serving else "",
            fingerprint=self.fingerprint if serving else "",
            reason=self.reason,
            grace=self.grace if self.phase == "unloading" else 0.0,
        )

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
        self.stats = stats
        self.busy = bool(stats.running or stats.waiting)
        self.served = self.served or self.busy or stats.steps > 0
        self.used_at = max(self.used_at, now - stats.idle_seconds)

    def is_needed(self, now: float) -> bool:
        """Return whether it is replaced when it has ended: the model is kept loaded, or it was used lately."""
        model = self.model
        recent = now - max(model.requested_at, self.used_at) < RECENT_SECONDS
        return not model.released and (model.restart or recent)

    def resident_model(self, now: float, free: int = 0, gpu: int = 0) -> eviction.ResidentModel:
        """`free`: bytes that its device has free now. `gpu`: which of its GPUs."""
        state: Literal["loading", "loaded", "unloading"] = "loading"
        if self.phase == "unloading":
            state = "unloading"
        elif self.phase == "ready" and (self.served or now - self.ready_at > SETTLE_SECONDS):
            state = "loaded"
        held = self._held(free)
        loading = self.phase == "loading"
        expected = max(self.expected_gpu_bytes, self.model.memory_needs[self.device]) if loading else held
        if self.device == "cpu":
            expected = max(expected, self.planned_bytes)
        return eviction.ResidentModel(
            key=self.id,
            model=self.model.key,
            device=self.device,
            gpu=gpu,
            used_at=self.used_at,
            busy=self.busy or self.hanging,  # it would not exit if it was asked to
            state=state,
            memory=max(held, expected),
            held=held,
        )

    def clear_process(self) -> None:
        super().clear_process()
        self.busy, self.gpu_bytes = False, 0

    def _held(self, free: int) -> int:
        """Return the bytes it uses on its device. While it loads on a GPU, they are inferred from free memory."""
        if self.device == "cpu":
            return self._resident_bytes()
        return self.gpu_bytes if self.phase != "loading" else max(0, self.free_at_start - free)

    def _resident_bytes(self) -> int:
        """Return the resident set size of its process. vLLM computes in other processes: what it was planned with."""
        if self.model.options.engine == "vllm" and self.process is not None:
            return self.model.memory_needs["cpu"]
        if self.process is None:
            return 0
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError, IndexError):
            return self.model.memory_needs["cpu"]  # a system without /proc
