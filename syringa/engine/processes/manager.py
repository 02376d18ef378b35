"""The model workers of a server: started on demand, unloaded when idle or evicted for others.

Runs in the supervisor's only thread, one `tick` at a time, and never blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from syringa.config import Config
from syringa.engine.client import protocol
from syringa.engine.cpu.features import available_memory
from syringa.engine.processes import eviction, managed_process, watchdog
from syringa.engine.processes.control import (
    AcquireModel,
    MessageConnection,
    SupervisorReport,
    worker_key,
)
from syringa.engine.processes.handle import Phase, WorkerHandle
from syringa.engine.processes.health import HealthPage, create_page
from syringa.engine.processes.memory import MemoryPlanner, memory_needs
from syringa.engine.processes.nvml import GpuMemory, gpu_memory
from syringa.engine.worker.options import WorkerOptions

logger = logging.getLogger("syringa.supervisor")

WORKER_MODULE = "syringa.engine.worker.server"
STATS_SECONDS = 1.0  # interval of stats requests to a worker
URGENT_STATS_SECONDS = 0.1  # the same, while a model waits to be loaded
EVICT_BUSY_AFTER_SECONDS = 10.0  # a model that has waited for so long evicts a busy one
UNLOAD_SECONDS = 10.0  # for an idle worker to exit
MAX_FAILED_STARTS = 2  # in a row, before the failure is reported
RECENT_SECONDS = 60.0  # a worker that dies is restarted if it was used within this time

RESTARTING = "the model worker has ended and is being started again"
HANGING = "the model worker does not respond"

Spawn = Callable[[WorkerOptions], subprocess.Popen[bytes]]


class WorkerManager:
    def __init__(
        self,
        folder: str,
        config: Config,
        selector: selectors.BaseSelector,
        publish: Callable[[SupervisorReport], None],
        *,
        spawn: Spawn = lambda options: managed_process.spawn(WORKER_MODULE, options, pass_fds=(options.health_fd,)),
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[], int] = available_memory,
        gpu: Callable[[], GpuMemory | None] = gpu_memory,
    ) -> None:
        """`publish` is called with every change of a worker's state and of its suspected requests."""
        self._folder, self._config, self._selector, self._publish = folder, config, selector, publish
        self._spawn, self._clock, self._memory = spawn, clock, MemoryPlanner(config, free, gpu)
        self._limits = watchdog.WatchdogLimits(config.heartbeat_timeout, config.step_timeout)
        self._workers: dict[str, WorkerHandle] = {}
        self._started = 0
        self._ticked_at = clock()
        self._stats_interval = STATS_SECONDS

    def acquire(self, request: AcquireModel) -> WorkerHandle:
        """Return the worker of a model, and start it as soon as there is memory."""
        now = self._clock()
        key = worker_key(request.options)
        worker = self._workers.get(key)
        if worker is None:
            worker = self._workers[key] = WorkerHandle(key, request.options, memory_needs(request.options), self._clock)
            worker.device = worker.memory_device = self._memory.expected_device(request.options)
        worker.name = request.name or worker.name
        worker.idle_timeout, worker.released = request.idle_timeout, False
        worker.restart = request.restart or worker.restart
        starts = worker.phase == "cold" or (worker.phase == "failed" and now >= worker.retry_at)
        if not request.opportunistic:
            worker.requested_at, worker.opportunistic = now, False
        elif starts:
            worker.opportunistic = True
        if starts:
            self._set_phase(worker, "queued")
        return worker

    def release(self, key: str) -> None:
        """Unload the worker of a model that is no longer configured, once it is idle."""
        if worker := self._workers.get(key):
            worker.released, worker.restart = True, False
            if worker.phase in ("queued", "failed"):
                self._set_phase(worker, "cold")

    def clear_suspect(self, key: str, fingerprint: bytes) -> None:
        """Forget a suspected request that was answered."""
        worker = self._workers.get(key)
        if worker is not None and worker.suspects.clear(fingerprint):
            self._publish(worker.suspects_message())

    def reports(self) -> list[SupervisorReport]:
        """Return what a new API server has to know."""
        workers = self._workers.values()
        suspects = [worker.suspects_message() for worker in workers]
        return [*(each for each in suspects if each.levels), *(worker.state() for worker in workers)]

    def processes(self) -> dict[str, int]:
        """Return the process ids of running workers by model."""
        return {each.options.model: each.process.pid for each in self._running() if each.process is not None}

    def tick(self) -> None:
        """Read messages, notice exits, unload idle models and start queued ones."""
        self._notice_pause()
        waiting = any(worker.phase == "queued" for worker in self._workers.values())
        self._stats_interval = URGENT_STATS_SECONDS if waiting else STATS_SECONDS
        for worker in list(self._workers.values()):
            if worker.suspects.expire():
                self._publish(worker.suspects_message())
            self._update(worker)
        for key in eviction.models_to_unload(self._resident(), self._clock()):
            worker = self._workers[key]
            self._unload(worker, idle=0.0 if worker.released else worker.idle_timeout)
        for worker in sorted(self._workers.values(), key=lambda each: (each.opportunistic, each.requested_at)):
            if worker.phase == "queued":
                self._try_start(worker)
        for key, worker in list(self._workers.items()):
            if worker.released and worker.phase == "cold":
                del self._workers[key]

    def stop(self, grace: float) -> None:
        """Terminate all workers, and kill them after `grace` seconds."""
        processes = [worker.process for worker in self._workers.values() if worker.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            managed_process.terminate(process, grace)
        for worker in self._running():
            self._clear_process(worker)

    # Events of one worker

    def _update(self, worker: WorkerHandle) -> None:
        now = self._clock()
        if worker.process is None:
            if worker.phase == "failed" and worker.restart and worker.retryable and now >= worker.retry_at:
                worker.opportunistic = True
                self._set_phase(worker, "queued")
            return
        if worker.connection is None and worker.phase == "loading":
            worker.connection = self._connect(worker.socket)
        self._read_messages(worker, now)
        status = worker.process.poll()
        if status is not None:
            self._on_exit(worker, status, now)
            return
        self._watch(worker, now)
        if worker.phase == "ready" and worker.connection:
            if now - worker.stats_requested_at >= self._stats_interval:
                worker.stats_requested_at = now
                worker.connection.send(protocol.GetStats())
        elif worker.phase == "unloading" and now > worker.unload_deadline + UNLOAD_SECONDS:
            worker.process.kill()
        elif worker.phase == "unloading" and now > worker.unload_deadline:
            worker.process.terminate()

    def _read_messages(self, worker: WorkerHandle, now: float) -> None:
        if worker.connection is None:
            return
        worker.connection.flush()
        for message in worker.connection.receive():
            match message:
                case protocol.Ready(info, device, memory):
                    worker.device = worker.memory_device = device
                    worker.gpu_bytes = memory
                    worker.info, worker.ready_at, worker.used_at = info, now, now
                    worker.insufficient_free = worker.insufficient_when_empty = worker.failed_starts = 0
                    logger.info("model loaded: model=%s", worker.name)
                    self._set_phase(worker, "ready")
                case protocol.StatsReply(stats):
                    worker.observe(stats, now)
                case protocol.RetireDeclined(stats):
                    worker.observe(stats, now)
                    if worker.phase == "unloading":
                        self._set_phase(worker, "ready")
        if not worker.connection.open and worker.phase == "unloading":
            worker.unload_deadline = min(worker.unload_deadline, now + UNLOAD_SECONDS)

    def _notice_pause(self) -> None:
        """Give all workers a fresh interval if this process was itself stopped, for example with the machine."""
        now = self._clock()
        if now - self._ticked_at > watchdog.MAX_PAUSE_SECONDS:
            for worker in self._workers.values():
                worker.watched_from = now
        self._ticked_at = now

    def _watch(self, worker: WorkerHandle, now: float) -> None:
        """Notice a worker that hangs, and kill it if that lasts."""
        assert worker.health is not None
        verdict = watchdog.assess(worker.health.read(), self._limits, watched_from=worker.watched_from, now=now)
        if verdict.action == "none":
            if worker.hanging and not worker.kill_reason:
                logger.warning("model worker responds again: model=%s", worker.name)
                worker.hanging = False
                self._set_phase(worker, worker.phase)
            return
        if not worker.hanging:
            logger.error("model worker hangs: model=%s reason=%r", worker.name, verdict.reason)
            worker.hanging = True
            worker.hangs += 1
            self._set_phase(worker, worker.phase, HANGING if worker.phase == "ready" else worker.reason)
        if verdict.action == "kill" and not worker.kill_reason:
            logger.error("model worker is killed because it hangs: model=%s reason=%r", worker.name, verdict.reason)
            worker.kill_reason = verdict.reason
            assert worker.process is not None
            worker.process.kill()  # also ends a stopped process

    def _record_crash(self, worker: WorkerHandle) -> bool:
        """Remember the requests that were computed when a worker died. Return whether there were any."""
        running = worker.health.running() if worker.health is not None else []
        worker.crashes += 1
        if running:
            worker.suspects.record_crash(running)
            self._publish(worker.suspects_message())
        return bool(running)

    def _on_exit(self, worker: WorkerHandle, status: int, now: float) -> None:
        phase, reason, kill_reason = worker.phase, worker.read_reason(), worker.kill_reason
        served = status != 0 and phase in ("ready", "unloading") and self._record_crash(worker)
        self._clear_process(worker)
        exit_ = "killed, because it hung" if kill_reason else managed_process.describe_exit(status)
        if phase == "unloading":
            logger.info("model unloaded: model=%s", worker.name)
            self._set_phase(worker, "queued" if worker.requested_at > worker.unload_requested_at else "cold")
            return
        worker.back_off(now)
        if phase == "ready":
            logger.error("model worker died: model=%s exit=%s", worker.name, exit_)
            restart = worker.restart or served or now - max(worker.requested_at, worker.used_at) < RECENT_SECONDS
            self._set_phase(worker, "queued" if restart else "cold", RESTARTING if restart else "")
            return
        worker.retryable = status != managed_process.EXIT_CANNOT_START
        if status in (managed_process.EXIT_NO_MEMORY, managed_process.EXIT_NO_GPU_MEMORY):
            device: eviction.Device = "cpu" if status == managed_process.EXIT_NO_MEMORY else "cuda"
            if worker.memory_device != device:
                worker.free_at_start = self._memory.free(device)
            if device == "cuda":
                worker.device = device  # the expected device may have been wrong
            worker.memory_device = device
            worker.insufficient_free, worker.insufficient_reason = worker.free_at_start, reason
            if not any(each.device == device for each in self._running()):
                worker.insufficient_when_empty = worker.free_at_start
            else:
                self._set_phase(worker, "queued", "memory is short")
                return
        worker.failed_starts += 1
        at_startup = worker.restart and worker.info is None  # the server reports the first failure of its default model
        reported = status in managed_process.REPORTED_STATUSES
        if not reported and not at_startup and worker.failed_starts < MAX_FAILED_STARTS:
            self._set_phase(worker, "queued", RESTARTING)
            return
        worker.failure_reported = reported
        if kill_reason:
            reason = f"its worker hung while loading: {kill_reason}"
        self._set_phase(worker, "failed", reason or f"its worker ended with {managed_process.describe_exit(status)}")

    # Loading and unloading

    def _try_start(self, worker: WorkerHandle) -> None:
        """Start a queued worker, or evict another one for it."""
        now = self._clock()
        timeout = self._config.load_timeout
        if timeout and not worker.restart and now - worker.requested_at > timeout:
            self._set_phase(worker, "cold")  # the waiting requests have timed out
            return
        if now < worker.retry_at:
            return
        free = self._memory.free(worker.memory_device)
        decision = eviction.decide_load(
            worker.pending_model(),
            self._resident(),
            free=free,
            max_loaded=self._config.max_loaded,
            evict_busy=now - worker.queued_at > EVICT_BUSY_AFTER_SECONDS,
        )
        match decision.action:
            case "start":
                self._start(worker, free)
            case "evict" | "wait" if worker.opportunistic:
                self._set_phase(worker, "cold")
            case "evict":
                victim = self._workers[decision.key]
                self._unload(victim, drain=victim.busy)
            case "never":
                worker.back_off(now)
                self._set_phase(worker, "failed", worker.insufficient_reason or decision.reason)
            case "wait" if worker.reason != decision.reason:
                self._set_phase(worker, "queued", decision.reason)

    def _start(self, worker: WorkerHandle, free: int) -> None:
        self._started += 1
        worker.socket = str(Path(self._folder) / f"{self._started}.sock")
        worker.free_at_start = free
        health_fd = create_page()
        worker.health, worker.watched_from = HealthPage(health_fd), self._clock()
        options = msgspec.structs.replace(worker.options, socket=worker.socket, health_fd=health_fd)
        if worker.device == "cuda":
            known = [(each.options, each.device) for each in self._workers.values() if not each.released]
            fraction = self._memory.gpu_fraction(options, known)
            options = msgspec.structs.replace(options, gpu_memory_fraction=fraction)
            worker.expected_gpu_bytes = self._memory.gpu_bytes(fraction)
        worker.process = self._spawn(options)
        os.close(health_fd)
        self._set_phase(worker, "loading")

    def _unload(self, worker: WorkerHandle, *, idle: float = 0.0, drain: bool = False) -> None:
        """Ask a worker to exit. API servers are notified first, so that they know why a late request was lost."""
        now = self._clock()
        worker.unload_requested_at = now
        worker.unload_deadline = float("inf") if drain else now + UNLOAD_SECONDS
        self._set_phase(worker, "unloading")
        if worker.connection is not None:
            worker.connection.send(protocol.Retire(idle, drain))

    def _resident(self) -> list[eviction.ResidentModel]:
        now = self._clock()
        return [worker.resident_model(now, self._memory.free(worker.device)) for worker in self._running()]

    def _running(self) -> Iterable[WorkerHandle]:
        return [worker for worker in self._workers.values() if worker.process is not None]

    def _set_phase(self, worker: WorkerHandle, phase: Phase, reason: str = "") -> None:
        if worker.enter(phase, reason, self._clock()):
            self._publish(worker.state())

    def _connect(self, path: str) -> MessageConnection[protocol.FromWorker] | None:
        """Connect to a worker, which listens before it loads. None while its process is still starting."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(path)
        except OSError:
            connection.close()
            return None
        return MessageConnection(connection, protocol.client_decoder(), self._selector)

    def _clear_process(self, worker: WorkerHandle) -> None:
        if worker.connection is not None:
            worker.connection.close()
        if worker.process is not None and worker.process.stdin is not None:
            worker.process.stdin.close()
        if worker.health is not None:
            worker.health.close()
        worker.process = worker.connection = worker.health = None
        worker.busy, worker.hanging, worker.kill_reason, worker.gpu_bytes = False, False, "", 0
        for path in (worker.socket, worker.reason_file):
            with contextlib.suppress(OSError):
                os.unlink(path)
