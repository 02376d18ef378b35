"""The model workers of a server: started on demand, unloaded when idle or evicted for others.

A model has one replica, which a request brings up, and more if `add_replica` is called, as the controller does
(`syringa.fleet`). Runs in the supervisor's only thread, one `tick` at a time, and never blocks.
"""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable
from pathlib import Path

from syringa.config import Config
from syringa.engine.client import protocol
from syringa.engine.cpu.features import available_memory
from syringa.engine.processes import eviction, managed_process, watchdog
from syringa.engine.processes.control import AcquireModel, SupervisorReport, worker_key
from syringa.engine.processes.handle import Phase, WorkerHandle
from syringa.engine.processes.memory import MemoryPlanner, launch_options, memory_needs, place
from syringa.engine.processes.model_workers import ModelWorkers
from syringa.engine.processes.nvml import GpuMemory, gpu_memories
from syringa.engine.processes.worker_process import (
    DRAIN_MARGIN_SECONDS,
    STATS_SECONDS,
    UNLOAD_SECONDS,
    Spawn,
    is_crash,
    spawn_worker,
    start_failure,
)
from syringa.fleet.provider import LOCAL_NODE, EventKind, ReplicaEvent
from syringa.fleet.status import FleetStatus, NodeStatus

logger = logging.getLogger("syringa.supervisor")

URGENT_STATS_SECONDS = 0.1  # interval of stats requests to a worker while a model waits to be loaded
EVICT_BUSY_AFTER_SECONDS = 10.0  # a model that has waited for so long evicts a busy one
MAX_FAILED_STARTS = 2  # in a row, before the failure is reported

RESTARTING = "the model worker has ended and is being started again"
HANGING = "the model worker does not respond"


class WorkerManager:
    def __init__(
        self,
        folder: str,
        config: Config,
        selector: selectors.BaseSelector,
        publish: Callable[[SupervisorReport], None],
        *,
        spawn: Spawn = spawn_worker,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[], int] = available_memory,
        gpus: Callable[[], list[GpuMemory]] = gpu_memories,
    ) -> None:
        """`publish` is called with every change of a model's state and of its suspected requests."""
        self._folder, self._config, self._selector, self._publish = folder, config, selector, publish
        self._spawn, self._clock, self._memory = spawn, clock, MemoryPlanner(config, free, gpus)
        self._limits = watchdog.WatchdogLimits(config.heartbeat_timeout, config.step_timeout)
        self._models: dict[str, ModelWorkers] = {}
        self._events: list[ReplicaEvent] = []
        self._last_id = 0
        self._ticked_at = clock()
        self._stats_interval = STATS_SECONDS

    def acquire(self, request: AcquireModel, planned_free: int = 0) -> ModelWorkers:
        """Return a model, and start a replica of it as soon as there is memory, unless it has one.

        `planned_free`: the bytes of memory that its next worker was planned for; 0: what is free at its start.
        """
        now = self._clock()
        key = worker_key(request.options)
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = ModelWorkers(key, request.options, memory_needs(request.options), self._clock)
        model.configure(request)
        model.planned_free = planned_free or model.planned_free
        staying = [each for each in model.replicas if not each.drained]
        worker = staying[0] if staying else self._add(model)
        starts = worker.phase == "cold" or (worker.phase == "failed" and now >= model.retry_at)
        if not request.opportunistic:
            model.requested_at, worker.opportunistic = now, False
        elif starts:
            worker.opportunistic = True
        if starts and not model.active_replicas:
            self._set_phase(worker, "queued")
        return model

    def release(self, key: str) -> None:
        """Unload the replicas of a model that is no longer configured, once they are idle."""
        if model := self._models.get(key):
            model.released, model.restart = True, False
            for worker in model.replicas:
                if worker.phase in ("queued", "failed"):
                    self._set_phase(worker, "cold")

    def keep(self, key: str, idle_timeout: float) -> None:
        """Set the idle timeout of a loaded model, until it is loaded again."""
        if model := self._models.get(key):
            model.idle_timeout = idle_timeout
            self._publish(model.state())

    def add_replica(self, key: str) -> str:
        """Start one more replica of a model, unless another one would have to be evicted for it. Return its id."""
        worker = self._add(self._models[key])
        worker.opportunistic = True
        self._set_phase(worker, "queued")
        return worker.id

    def drain(self, id: str, grace: float) -> bool:
        """End a replica: its requests finish within `grace` seconds or move. Return whether there is such a replica."""
        worker = next((each for each in self._workers() if each.id == id and not each.drained), None)
        if worker is None or worker.phase in ("cold", "failed"):
            return False
        worker.drained = True
        logger.info("replica is drained: replica=%s grace=%g", id, grace)
        if worker.phase in ("ready", "unloading"):
            self._unload(worker, drain=True, grace=grace)
        elif worker.process is not None:
            worker.unload_requested_at, worker.unload_deadline = self._clock(), self._clock()
            self._set_phase(worker, "unloading")
        else:
            self._set_phase(worker, "cold")
        return True

    def clear_suspect(self, key: str, fingerprint: bytes) -> None:
        """Forget a suspected request that was answered."""
        model = self._models.get(key)
        if model is not None and model.suspects.clear(fingerprint):
            self._publish(model.suspects_message())

    def drain_node(self, name: str, grace: float | None) -> None:
        """Do nothing: the only node is this machine, and ends with the server."""

    def set_pool(self, name: str, open: bool | None) -> None:
        """Do nothing: there are no pools on a single machine."""

    def fleet_status(self) -> FleetStatus:
        """Return what operators see of nodes and pools."""
        return FleetStatus([NodeStatus(LOCAL_NODE, "ready", replicas=len(self._running()))])

    def reports(self) -> list[SupervisorReport]:
        """Return what a new API server has to know."""
        suspects = [model.suspects_message() for model in self._models.values()]
        return [*(each for each in suspects if each.levels), *(model.state() for model in self._models.values())]

    def processes(self) -> dict[str, int]:
        """Return the process ids of running workers, by model; with several replicas, of the last one."""
        return {each.model.options.model: each.process.pid for each in self._running() if each.process is not None}

    @property
    def models(self) -> list[ModelWorkers]:
        return list(self._models.values())

    def take_events(self) -> list[ReplicaEvent]:
        """Return what has happened to replicas since the last call."""
        events, self._events = self._events, []
        return events

    def tick(self) -> None:
        """Read messages, notice exits, unload idle models and start queued ones."""
        self._notice_pause()
        waiting = any(worker.phase == "queued" for worker in self._workers())
        self._stats_interval = URGENT_STATS_SECONDS if waiting else STATS_SECONDS
        for model in [each for each in self.models if each.suspects.expire()]:
            self._publish(model.suspects_message())
        for worker in self._workers():
            self._update(worker)
        self._unload_idle()
        for worker in sorted(self._workers(), key=lambda each: (each.opportunistic, each.model.requested_at)):
            if worker.phase == "queued":
                self._try_start(worker)
        for model in self.models:
            self._forget_ended(model)

    def stop(self, grace: float, *, leave_replicas: bool = False) -> None:
        """Terminate all workers, and kill them after `grace` seconds. None can outlive this process."""
        running = [(worker, worker.process) for worker in self._workers() if worker.process is not None]
        for _, process in running:
            process.terminate()
        for worker, process in running:
            managed_process.terminate(process, grace)
            worker.clear_process()

    def _add(self, model: ModelWorkers) -> WorkerHandle:
        worker = WorkerHandle(model, self._memory.expected_device(model.options))
        model.replicas.append(worker)
        return worker

    def _forget_ended(self, model: ModelWorkers) -> None:
        """Forget replicas that have ended, but the last one, which holds the state of the model."""
        ended = [each for each in model.replicas if each.phase in ("cold", "failed") and each.process is None]
        for worker in sorted(ended, key=lambda each: (not each.drained, each.phase == "failed")):
            if len(model.replicas) > 1:
                model.replicas.remove(worker)
            else:
                worker.drained = False
        if model.released and model.status == "cold" and not any(each.process for each in model.replicas):
            del self._models[model.key]

    def _event(self, worker: WorkerHandle, kind: EventKind, reason: str = "") -> None:
        self._events.append(ReplicaEvent(kind, worker.id, worker.model.key, reason=reason))

    # Events of one worker

    def _update(self, worker: WorkerHandle) -> None:
        now = self._clock()
        if worker.process is None:
            model = worker.model
            if worker.phase == "failed" and model.restart and model.retryable and now >= model.retry_at:
                worker.opportunistic = True
                self._set_phase(worker, "queued")
            return
        if worker.connection is None and worker.phase == "loading":
            worker.connect(self._selector)
        self._read_messages(worker, now)
        status = worker.process.poll()
        if status is not None:
            self._on_exit(worker, status, now)
            return
        if worker.watch(self._limits, now, f"model={worker.model.name} replica={worker.id}"):
            worker.model.hangs += worker.hanging
            self._set_phase(worker, worker.phase, HANGING if worker.hanging else "")
        if worker.phase == "loading" and worker.notice_progress(now) and worker.model.status == "loading":
            self._publish(worker.model.state())
        if worker.phase == "ready":
            worker.request_stats(now, self._stats_interval)
        elif worker.phase == "unloading" and now > worker.unload_deadline + UNLOAD_SECONDS:
            worker.process.kill()
        elif worker.phase == "unloading" and now > worker.unload_deadline:
            worker.process.terminate()

    def _read_messages(self, worker: WorkerHandle, now: float) -> None:
        for message in worker.receive():
            match message:
                case protocol.Ready() if worker.phase == "loading":
                    self._on_ready(worker, message, now)
                case protocol.StatsReply(stats):
                    worker.observe(stats, now)
                case protocol.RetireDeclined(stats):
                    worker.observe(stats, now)
                    if worker.phase == "unloading" and not worker.drained:
                        self._set_phase(worker, "ready")
        if worker.connection is not None and not worker.connection.open and worker.phase == "unloading":
            worker.unload_deadline = min(worker.unload_deadline, now + UNLOAD_SECONDS)

    def _on_ready(self, worker: WorkerHandle, ready: protocol.Ready, now: float) -> None:
        model = worker.model
        worker.device = worker.memory_device = ready.device
        worker.gpu_bytes, worker.fingerprint, worker.address = ready.memory, ready.fingerprint, ready.address
        worker.ready_at = worker.used_at = now
        model.info = ready.info
        model.insufficient_free = model.insufficient_when_empty = model.failed_starts = 0
        logger.info("model loaded: model=%s replica=%s", model.name, worker.id)
        self._event(worker, "ready")
        self._set_phase(worker, "ready")

    def _notice_pause(self) -> None:
        """Give all workers a fresh interval if this process was itself stopped, for example with the machine."""
        now = self._clock()
        if now - self._ticked_at > watchdog.MAX_PAUSE_SECONDS:
            for worker in self._workers():
                worker.watched_from = now
        self._ticked_at = now

    def _record_crash(self, worker: WorkerHandle) -> bool:
        """Remember the requests that were computed when a worker died. Return whether there were any."""
        running = worker.running()
        worker.model.crashes += 1
        if running:
            worker.model.suspects.record_crash(running)
            self._publish(worker.model.suspects_message())
        return bool(running)

    def _on_exit(self, worker: WorkerHandle, status: int, now: float) -> None:
        model, phase, reason, kill_reason = worker.model, worker.phase, worker.read_reason(), worker.kill_reason
        crashed = is_crash(status) and phase in ("ready", "unloading")
        served = crashed and self._record_crash(worker)
        worker.clear_process()
        exit_ = "killed, because it hung" if kill_reason else managed_process.describe_exit(status)
        if phase == "unloading":
            logger.info("model unloaded: model=%s replica=%s", model.name, worker.id)
            self._event(worker, "ended")
            if managed_process.HEALTHY_SECONDS < now - worker.ready_at < math.inf:
                model.reset_back_off()
            wanted = model.requested_at > worker.unload_requested_at or (worker.drained and worker.is_needed(now))
            again = wanted and not model.active_replicas
            worker.drained = worker.drained and not again
            self._set_phase(worker, "queued" if again else "cold")
            return
        model.back_off(now, worker.ready_at if phase == "ready" else None)
        self._event(worker, "failed", exit_)
        if phase == "ready":
            logger.error("model worker died: model=%s replica=%s exit=%s", model.name, worker.id, exit_)
            restart = served or worker.is_needed(now)
            self._set_phase(worker, "queued" if restart else "cold", RESTARTING if restart else "")
            return
        model.retryable = status != managed_process.EXIT_CANNOT_START
        if status in (managed_process.EXIT_NO_MEMORY, managed_process.EXIT_NO_GPU_MEMORY):
            device: eviction.Device = "cpu" if status == managed_process.EXIT_NO_MEMORY else "cuda"
            checked = worker.memory_device == device
            if not checked:
                worker.free_at_start = min(self._memory.free(device, gpu) for gpu in worker.gpus)
            if device == "cuda":
                worker.device = device  # the expected device may have been wrong
            worker.memory_device = device
            # What it may use of free memory is what others will not take.
            insufficient = max(1, worker.spare_at_start if checked else worker.free_at_start)
            model.insufficient_free, model.insufficient_reason = insufficient, reason
            if not any(each.device == device for each in self._running()):
                model.insufficient_when_empty = insufficient
            else:
                self._set_phase(worker, "queued", "memory is short")
                return
        model.failed_starts += 1
        reported = status in managed_process.REPORTED_STATUSES
        if not reported and not model.starts_server and model.failed_starts < MAX_FAILED_STARTS:
            self._set_phase(worker, "queued", RESTARTING)
            return
        model.failure_reported = reported or bool(reason)  # a worker that leaves a reason has printed it
        self._fail(worker, start_failure(status, reason, kill_reason))

    def _fail(self, worker: WorkerHandle, reason: str) -> None:
        if not worker.model.starts_server:  # the server prints that failure, and ends
            logger.error("model cannot be loaded: model=%s reason=%r", worker.model.name, reason)
        self._set_phase(worker, "failed", reason)

    # Loading and unloading

    def _try_start(self, worker: WorkerHandle) -> None:
        """Start a queued worker, or evict another one for it."""
        now, model = self._clock(), worker.model
        timeout = self._config.load_timeout
        if timeout and not model.restart and not worker.opportunistic and now - model.requested_at > timeout:
            self._set_phase(worker, "cold")  # the waiting requests have timed out
            return
        if now < model.retry_at:
            return
        if worker.opportunistic and any(each.phase == "queued" and not each.opportunistic for each in self._workers()):
            return  # a request waits for memory, which this one would take
        decision, free = place(
            worker,
            self._running(),
            self._memory,
            now=now,
            max_loaded=self._config.max_loaded,
            evict_busy=now - worker.queued_at > EVICT_BUSY_AFTER_SECONDS,
        )
        match decision.action:
            case "start":
                worker.spare_at_start = decision.spare
                self._start(worker, free)
            case "evict" | "wait" if worker.opportunistic:
                self._event(worker, "failed", decision.reason)
                self._set_phase(worker, "cold")
            case "evict":
                victim = next(each for each in self._workers() if each.id == decision.key)
                self._unload(victim, drain=victim.busy)
            case "never":
                model.back_off(now)
                self._event(worker, "failed", decision.reason)
                self._fail(worker, model.insufficient_reason or decision.reason)
            case "wait" if worker.reason != decision.reason:
                self._set_phase(worker, "queued", decision.reason)

    def _start(self, worker: WorkerHandle, free: int) -> None:
        worker.socket = str(Path(self._folder) / f"{worker.id.rpartition('-')[2]}.sock")
        worker.free_at_start = free
        known = [each for each in self._workers() if not each.model.released]
        worker.launch(self._spawn, launch_options(worker, self._memory, known), self._clock())
        worker.ready_at = -math.inf
        self._set_phase(worker, "loading")

    def _unload_idle(self) -> None:
        now = self._clock()
        unloaded = [model for model in self.models if model.idle_timeout or model.released]
        resident = [each for model in unloaded if (each := model.resident_model(now)) is not None]
        for key in eviction.models_to_unload(resident, now):
            model = self._models[key]
            for worker in model.replicas:
                if worker.phase == "ready":
                    self._unload(worker, idle=0.0 if model.released else model.idle_timeout)

    def _unload(self, worker: WorkerHandle, *, idle: float = 0.0, drain: bool = False, grace: float = math.inf) -> None:
        """Ask a worker to exit. API servers are notified first, so that they know why a late request was lost.

        With `drain`, its requests have `grace` seconds to finish or move.
        """
        now = self._clock()
        worker.grace = grace if drain else UNLOAD_SECONDS
        worker.unload_requested_at = now
        worker.unload_deadline = now + worker.grace + (DRAIN_MARGIN_SECONDS if drain else 0.0)
        self._set_phase(worker, "unloading")
        if worker.connection is not None:
            worker.connection.send(protocol.Retire(idle, drain))

    def _workers(self) -> list[WorkerHandle]:
        return [worker for model in self._models.values() for worker in model.replicas]

    def _running(self) -> list[WorkerHandle]:
        return [worker for worker in self._workers() if worker.process is not None]

    def _set_phase(self, worker: WorkerHandle, phase: Phase, reason: str = "") -> None:
        if phase == "queued" and worker.phase != "queued":
            self._last_id += 1
            worker.id = f"{worker.model.short_name}-{self._last_id}"
        if worker.enter(phase, reason, self._clock()):
            self._publish(worker.model.state())
