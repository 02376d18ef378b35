"""The host of one replica on a node of a cluster: fetches the model's files, starts a worker and watches it.

It knows neither how it came to the node nor where its reports go. A worker that has ended is not started again: that is
decided by the controller, which may prefer another node.
"""

from __future__ import annotations

import logging
import math
import selectors
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syringa.cluster.tls import TlsFiles
from syringa.engine.client import protocol
from syringa.engine.client.transport import Address
from syringa.engine.cpu.features import available_memory
from syringa.engine.processes import managed_process, watchdog
from syringa.engine.processes.worker_process import (
    DRAIN_MARGIN_SECONDS,
    UNLOAD_SECONDS,
    Spawn,
    WorkerProcess,
    is_crash,
    spawn_worker,
    start_failure,
)
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import SyringaError
from syringa.fleet.bridge_protocol import LaunchReplica, ReplicaPhase, ReplicaReport, initial_report
from syringa.types import ModelInfo

logger = logging.getLogger("syringa.replica")

STOP_SECONDS = 5.0  # for a worker to exit

Progress = Callable[[str], None]
FetchModel = Callable[[WorkerOptions, Progress], WorkerOptions]
"""Make the files of a model available on this node, and return the options with their path.

Called in a thread. Progress is reported in words, and raises `FetchCancelled` when the replica is no longer wanted. A
`SyringaError` says in one line why the files cannot be had.
"""


class FetchCancelled(Exception):
    """The replica for which a model is fetched is no longer wanted."""


def use_local_files(options: WorkerOptions, progress: Progress) -> WorkerOptions:
    """Fetch nothing: the files of the model are at the same path on this node."""
    return options


class ReplicaHost:
    """Call `tick` about ten times per second. All methods are called from one thread; none but `stop` blocks."""

    def __init__(
        self,
        launch: LaunchReplica,
        *,
        host: str,
        tls: TlsFiles,
        folder: str,
        fetch: FetchModel = use_local_files,
        spawn: Spawn = spawn_worker,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[], int] = available_memory,
    ) -> None:
        """`host`: name or address of this node, which its certificate in `tls` has. `folder`: for the socket."""
        self._launch, self._spawn, self._clock, self._free = launch, spawn, clock, free
        self._listen, self._tls = str(Address("tcp", host)), tls
        self._socket = str(Path(folder) / f"{launch.id.rpartition('-')[2]}.sock")
        self._limits = watchdog.WatchdogLimits(launch.heartbeat_timeout, launch.step_timeout)
        self._where = f"model={launch.name} replica={launch.id}"
        self._worker = WorkerProcess()
        self._selector = selectors.DefaultSelector()
        self._phase: ReplicaPhase = "fetching"
        self._info: ModelInfo | None = None
        self._was_ready = False
        self._grace = 0.0
        self._drain_deadline = math.inf
        self._hangs = 0
        self._report = initial_report(launch)  # what does not change
        self._ended: ReplicaReport | None = None
        self._ticked_at = clock()
        self._fetch = _Fetch(fetch, msgspec.json.decode(launch.options, type=WorkerOptions))

    @property
    def ended(self) -> bool:
        return self._ended is not None

    @property
    def pid(self) -> int | None:
        """The process id of the worker, while it runs."""
        return self._worker.process.pid if self._worker.process is not None else None

    def tick(self) -> None:
        """Go on with fetching, notice what the worker reports and whether it lives, and end a drain."""
        now = self._clock()
        if now - self._ticked_at > watchdog.MAX_PAUSE_SECONDS:  # this process was itself stopped
            self._worker.watched_from = now
        self._ticked_at = now
        if self.ended:
            return
        if self._worker.process is None:
            self._continue_fetching(now)
        else:
            self._update(now)

    def status(self) -> ReplicaReport:
        if self._ended is not None:
            return self._ended
        worker, serving = self._worker, self._phase in ("ready", "draining") and self._was_ready
        phase: ReplicaPhase = "hanging" if self._phase == "ready" and worker.hanging else self._phase
        reason = self._fetch.progress if phase == "fetching" else ""
        if phase == "hanging":
            reason = "the model worker does not respond"
        return msgspec.structs.replace(
            self._report,
            phase=phase,
            address=worker.address if serving else "",
            fingerprint=worker.fingerprint if serving else "",
            info=self._info,
            stats=worker.stats if serving else None,
            reason=reason,
            grace=self._grace,
            hangs=self._hangs,
            loading=worker.progress if phase == "loading" else None,
        )

    def drain(self, grace: float) -> None:
        """End the replica: no more requests, those that run have `grace` seconds to finish or move.

        A replica that is not ready ends at once. A second call may shorten the time, not extend it.
        """
        now = self._clock()
        deadline = now + grace + DRAIN_MARGIN_SECONDS
        if self.ended or (self._phase == "draining" and deadline >= self._drain_deadline):
            return
        logger.info("replica is drained: %s grace=%g", self._where, grace)
        if self._worker.process is None:
            self._end(reason="it was drained")
            return
        self._phase, self._grace = "draining", grace
        self._drain_deadline = deadline if self._was_ready else now
        if self._was_ready and self._worker.connection is not None:
            self._worker.connection.send(protocol.Retire(drain=True))

    def stop(self, grace: float = STOP_SECONDS) -> None:
        """End the replica now. A worker that does not exit within `grace` seconds is killed."""
        if self._worker.process is not None:
            managed_process.terminate(self._worker.process, grace)
        if not self.ended:
            self._end(reason="it was stopped")

    def _continue_fetching(self, now: float) -> None:
        if self._fetch.error:
            self._end(reason=self._fetch.error, failed=True)
        elif self._fetch.options is not None:
            options = msgspec.structs.replace(
                self._fetch.options,
                socket=self._socket,
                listen=self._listen,
                tls=self._tls,
                free_memory=self._free(),
            )
            try:
                self._worker.launch(self._spawn, options, now)
            except OSError as error:
                self._end(reason=f"its worker could not be started: {error.strerror}", failed=True)
                return
            self._phase = "loading"

    def _update(self, now: float) -> None:
        worker = self._worker
        assert worker.process is not None
        if worker.connection is None:
            worker.connect(self._selector)
        for message in worker.receive():
            match message:
                case protocol.Ready() if self._phase == "loading":
                    worker.address, worker.fingerprint, self._info = message.address, message.fingerprint, message.info
                    self._phase, self._was_ready = "ready", True
                    logger.info("model loaded: %s address=%s", self._where, message.address)
                case protocol.StatsReply(stats):
                    worker.stats = stats
        status = worker.process.poll()
        if status is not None:
            self._on_exit(status)
            return
        if worker.watch(self._limits, now, self._where):
            self._hangs += worker.hanging
        if self._phase == "loading":
            worker.notice_progress(now)
        if self._phase == "draining" and now > self._drain_deadline:
            if now > self._drain_deadline + UNLOAD_SECONDS:
                worker.process.kill()
            else:
                worker.process.terminate()
        elif self._was_ready:
            worker.request_stats(now)

    def _on_exit(self, status: int) -> None:
        worker = self._worker
        crashed = self._was_ready and is_crash(status)
        failed = self._phase != "draining"
        if self._was_ready:
            exit_ = "was killed, because it hung" if worker.kill_reason else managed_process.describe_exit(status)
            reason = f"its worker ended: {exit_}" if failed or crashed else ""
        else:
            reason = start_failure(status, worker.read_reason(), worker.kill_reason) if failed else ""
        self._end(
            reason=reason,
            failed=failed,
            crashed=crashed,
            retryable=status != managed_process.EXIT_CANNOT_START,
            suspects=worker.running() if crashed else [],
        )

    def _end(
        self,
        *,
        reason: str,
        failed: bool = False,
        crashed: bool = False,
        retryable: bool = True,
        suspects: list[bytes] | None = None,
    ) -> None:
        level = logging.ERROR if failed or crashed else logging.INFO
        logger.log(level, "replica has ended: %s reason=%r", self._where, reason)
        self._fetch.cancelled = True
        self._worker.clear_process()
        self._selector.close()
        self._ended = msgspec.structs.replace(
            self._report,
            phase="ended",
            reason=reason,
            failed=failed,
            crashed=crashed,
            retryable=retryable,
            suspects=suspects or [],
            hangs=self._hangs,
        )


class _Fetch:
    """A thread that fetches the files of a model. It writes each attribute once it is complete."""

    def __init__(self, fetch: FetchModel, options: WorkerOptions) -> None:
        self.cancelled = False
        self.progress = ""
        self.error = ""
        self.options: WorkerOptions | None = None  # once the files are there
        threading.Thread(target=self._run, args=(fetch, options), daemon=True, name="fetch").start()

    def _run(self, fetch: FetchModel, options: WorkerOptions) -> None:
        try:
            self.options = fetch(options, self._report)
        except FetchCancelled:
            pass
        except SyringaError as error:
            self.error = error.message
        except Exception as error:
            logger.exception("model cannot be fetched: model=%s", options.model)
            self.error = f"the model's files cannot be fetched: {error or type(error).__name__}"

    def _report(self, progress: str) -> None:
        if self.cancelled:
            raise FetchCancelled
        self.progress = progress
