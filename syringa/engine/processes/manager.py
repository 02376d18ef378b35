"""The model workers of a server: each is started when it is wanted, and leaves when others need its place.

All of this runs in the supervisor's one thread, a `tick` at a time; nothing here waits for anything.
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
from syringa.engine.processes import eviction, managed_process
from syringa.engine.processes.control import Link, State, Want, key_of
from syringa.engine.processes.handle import ModelWorker, Phase
from syringa.engine.processes.memory import Memory, needs
from syringa.engine.processes.nvml import GpuMemory, gpu_memory
from syringa.engine.worker.server import WorkerOptions

logger = logging.getLogger("syringa.supervisor")

WORKER_MODULE = "syringa.engine.worker.server"
STATS_SECONDS = 1.0  # between two questions to a worker how it does
URGENT_SECONDS = 0.1  # the same, while another waits for its place
PATIENCE = 10.0  # a model for which all others have been too busy for so long gets one of their places
LEAVE_SECONDS = 10.0  # for a worker that has nothing to do to end
MOST_DEATHS = 2  # while it loads, in a row, before who waits for it is told
RECENT_SECONDS = 60.0  # a worker that dies is started again if it was used in this time

AGAIN = "the model worker has ended and is being started again"

Spawn = Callable[[WorkerOptions], subprocess.Popen[bytes]]


class ModelWorkers:
    def __init__(
        self,
        folder: str,
        config: Config,
        selector: selectors.BaseSelector,
        tell: Callable[[State], None],
        *,
        spawn: Spawn = lambda options: managed_process.spawn(WORKER_MODULE, options),
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[], int] = available_memory,
        gpu: Callable[[], GpuMemory | None] = gpu_memory,
    ) -> None:
        self._folder, self._config, self._selector, self._tell = folder, config, selector, tell
        self._spawn, self._clock, self._memory = spawn, clock, Memory(config, free, gpu)
        self._all: dict[str, ModelWorker] = {}
        self._started = 0
        self._pace = STATS_SECONDS

    def want(self, want: Want) -> ModelWorker:
        """It is started as soon as there is room."""
        now = self._clock()
        key = key_of(want.options)
        worker = self._all.get(key)
        if worker is None:
            worker = self._all[key] = ModelWorker(key, want.options, needs(want.options))
            worker.device = worker.short_of = self._memory.guess(want.options)
        worker.name = want.name or worker.name
        worker.idle, worker.keep, worker.dropped = want.idle, want.keep or worker.keep, False
        begins = worker.phase == "cold" or (worker.phase == "failed" and now >= worker.retry_at)
        if not want.soft:
            worker.wanted_at, worker.soft = now, False
        elif begins:
            worker.soft = True
        if begins:
            self._set(worker, "queued")
        return worker

    def drop(self, key: str) -> None:
        if worker := self._all.get(key):
            worker.dropped, worker.keep = True, False
            if worker.phase in ("queued", "failed"):
                self._set(worker, "cold")

    def states(self) -> list[State]:
        return [worker.state() for worker in self._all.values()]

    def tick(self) -> None:
        waiting = any(worker.phase == "queued" for worker in self._all.values())
        self._pace = URGENT_SECONDS if waiting else STATS_SECONDS
        for worker in list(self._all.values()):
            self._attend(worker)
        self._unload()
        for worker in sorted(self._all.values(), key=lambda each: (each.soft, each.wanted_at)):
            if worker.phase == "queued":
                self._make_room(worker)
        for key, worker in list(self._all.items()):
            if worker.dropped and worker.phase == "cold":
                del self._all[key]

    def stop(self, grace: float) -> None:
        processes = [worker.process for worker in self._all.values() if worker.process is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            managed_process.stop(process, grace)
        for worker in self._running():
            self._forget_process(worker)

    # What goes on in each

    def _attend(self, worker: ModelWorker) -> None:
        now = self._clock()
        if worker.process is None:
            if worker.phase == "failed" and worker.keep and worker.may_recover and now >= worker.retry_at:
                worker.soft = True
                self._set(worker, "queued")
            return
        if worker.link is None and worker.phase == "loading":
            worker.link = self._connect(worker.socket)
        self._hear(worker, now)
        status = worker.process.poll()
        if status is not None:
            self._ended(worker, status, now)
            return
        if worker.phase == "ready" and worker.link and now - worker.asked_at >= self._pace:
            worker.asked_at = now
            worker.link.send(protocol.AskStats())
        elif worker.phase == "leaving" and now > worker.leave_by + LEAVE_SECONDS:
            worker.process.kill()
        elif worker.phase == "leaving" and now > worker.leave_by:
            worker.process.terminate()

    def _hear(self, worker: ModelWorker, now: float) -> None:
        if worker.link is None:
            return
        worker.link.flush()
        for message in worker.link.receive():
            match message:
                case protocol.Ready(info, device, memory):
                    worker.device, worker.on_gpu = device, memory
                    worker.short_of = device
                    worker.info, worker.ready_at, worker.used_at = info, now, now
                    worker.too_little = worker.hopeless = worker.deaths = 0
                    logger.info("%s is loaded", worker.name)
                    self._set(worker, "ready")
                case protocol.Stats(stats):
                    worker.observe(stats, now)
                case protocol.Stays(stats):
                    worker.observe(stats, now)
                    if worker.phase == "leaving":
                        self._set(worker, "ready")
        if not worker.link.open and worker.phase == "leaving":
            worker.leave_by = min(worker.leave_by, now + LEAVE_SECONDS)

    def _ended(self, worker: ModelWorker, status: int, now: float) -> None:
        phase, reason = worker.phase, worker.reason_left()
        self._forget_process(worker)
        name = worker.name
        if phase == "leaving":
            logger.info("%s is unloaded", name)
            self._set(worker, "queued" if worker.wanted_at > worker.left_at else "cold")
            return
        worker.back_off(now)
        if phase == "ready":
            logger.error("the worker of %s ended (%s)", name, managed_process.tell_exit(status))
            again = worker.keep or now - max(worker.wanted_at, worker.used_at) < RECENT_SECONDS
            self._set(worker, "queued" if again else "cold", AGAIN if again else "")
            return
        worker.may_recover = status != managed_process.CANNOT_START
        if status in (managed_process.NO_MEMORY, managed_process.NO_GPU_MEMORY):
            device: eviction.Device = "cpu" if status == managed_process.NO_MEMORY else "cuda"
            if worker.short_of != device:
                worker.free_at_start = self._memory.free(device)
            if device == "cuda":
                worker.device = device  # it may not have been thought to be there
            worker.short_of = device
            worker.too_little, worker.too_little_said = worker.free_at_start, reason
            if not any(each.device == device for each in self._running()):
                worker.hopeless = worker.free_at_start
            else:
                self._set(worker, "queued", "memory is short")
                return
        worker.deaths += 1
        begins = worker.keep and worker.info is None  # with the server: people wait to see whether it can
        if status not in managed_process.SAID and not begins and worker.deaths < MOST_DEATHS:
            self._set(worker, "queued", AGAIN)
            return
        worker.told = status in managed_process.SAID
        self._set(worker, "failed", reason or f"its worker ended with {managed_process.tell_exit(status)}")

    # Who comes and who goes

    def _unload(self) -> None:
        for key in eviction.due(self._loaded(), self._clock()):
            worker = self._all[key]
            self._retire(worker, idle=0.0 if worker.dropped else worker.idle)

    def _make_room(self, worker: ModelWorker) -> None:
        now = self._clock()
        timeout = self._config.load_timeout
        if timeout and not worker.keep and now - worker.wanted_at > timeout:
            self._set(worker, "cold")  # whoever waited has gone
            return
        if now < worker.retry_at:
            return
        free = self._memory.free(worker.short_of)
        verdict = eviction.room(
            worker.newcomer(),
            self._loaded(),
            free=free,
            most=self._config.max_loaded,
            impatient=now - worker.queued_at > PATIENCE,
        )
        match verdict.action:
            case "start":
                self._start(worker, free)
            case "evict" | "wait" if worker.soft:
                self._set(worker, "cold")
            case "evict":
                victim = self._all[verdict.key]
                self._retire(victim, drain=victim.busy)
            case "never":
                worker.back_off(now)
                self._set(worker, "failed", worker.too_little_said or verdict.reason)
            case "wait" if worker.reason != verdict.reason:
                self._set(worker, "queued", verdict.reason)

    def _start(self, worker: ModelWorker, free: int) -> None:
        self._started += 1
        worker.socket = str(Path(self._folder) / f"{self._started}.sock")
        worker.free_at_start = free
        options = msgspec.structs.replace(worker.options, socket=worker.socket)
        if worker.device == "cuda":
            known = [(each.options, each.device) for each in self._all.values() if not each.dropped]
            fraction = self._memory.fraction(options, known)
            options = msgspec.structs.replace(options, gpu_memory_fraction=fraction)
            worker.expected = self._memory.expected(fraction)
        worker.process = self._spawn(options)
        self._set(worker, "loading")

    def _retire(self, worker: ModelWorker, *, idle: float = 0.0, drain: bool = False) -> None:
        """Everybody is told before the worker is: a request that comes too late can then know why it was lost."""
        now = self._clock()
        worker.left_at = now
        worker.leave_by = float("inf") if drain else now + LEAVE_SECONDS
        self._set(worker, "leaving")
        if worker.link is not None:
            worker.link.send(protocol.Retire(idle, drain))

    def _loaded(self) -> list[eviction.Loaded]:
        now = self._clock()
        return [worker.loaded(now, self._memory.free(worker.device)) for worker in self._running()]

    def _running(self) -> Iterable[ModelWorker]:
        return [worker for worker in self._all.values() if worker.process is not None]

    def _set(self, worker: ModelWorker, phase: Phase, reason: str = "") -> None:
        if worker.enter(phase, reason, self._clock()):
            self._tell(worker.state())

    def _connect(self, path: str) -> Link[protocol.FromWorker | protocol.Tokens] | None:
        """A worker listens before it loads, but not before it has started."""
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.setblocking(False)
            connection.connect(path)
        except OSError:
            connection.close()
            return None
        return Link(connection, protocol.client_frames(), self._selector)

    def _forget_process(self, worker: ModelWorker) -> None:
        if worker.link is not None:
            worker.link.close()
        if worker.process is not None and worker.process.stdin is not None:
            worker.process.stdin.close()
        worker.process = worker.link = None
        worker.busy, worker.on_gpu = False, 0
        for path in (worker.socket, worker.reason_file):
            with contextlib.suppress(OSError):
                os.unlink(path)
