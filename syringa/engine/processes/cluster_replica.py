"""A replica of a cluster as the supervisor knows it."""

from __future__ import annotations

from syringa.engine.interface import ReplicaState
from syringa.engine.processes.model_state import QUEUED
from syringa.engine.processes.worker_process import STARTING
from syringa.fleet.bridge_protocol import LaunchReplica, ReplicaLoad, ReplicaPhase, ReplicaReport, load_of
from syringa.fleet.provider import Replica, ReplicaCondition
from syringa.types import LoadProgress

_CONDITIONS: dict[ReplicaPhase, ReplicaCondition] = {
    "queued": "queued",
    "fetching": "fetching",
    "loading": "starting",
    "ready": "ready",
    "hanging": "hanging",
    "draining": "draining",
}
SERVING: tuple[ReplicaPhase, ...] = ("ready", "hanging", "draining")


class ClusterReplica:
    """A replica that has not ended: its last report, and what was asked of it since."""

    def __init__(self, report: ReplicaReport, now: float, launch: LaunchReplica | None = None) -> None:
        """`launch`: how it was started, until it is in a report."""
        self.launch, self.launched_at = launch, now
        self.missing_since: float | None = None
        self.retired_at: float | None = None
        self.grace = 0.0
        self.kill_at = 0.0
        self._state: ReplicaState | None = None  # what `state` and `observe` have returned, until something changes
        self._observed: Replica | None = None
        self._report = report
        self.set_load(load_of(report), now)

    @property
    def id(self) -> str:
        return self._report.id

    @property
    def report(self) -> ReplicaReport:
        return self._report

    @report.setter
    def report(self, report: ReplicaReport) -> None:
        self._report = report
        self._state = self._observed = None

    def set_load(self, load: ReplicaLoad, now: float) -> None:
        self.running, self.waiting = load.running, load.waiting
        self._idle_since = now - load.idle_seconds if load.idle_seconds and not (load.running or load.waiting) else None
        self._observed = None

    def retire(self, now: float, grace: float, kill_at: float) -> None:
        """Note that it is asked to end."""
        self.retired_at, self.grace, self.kill_at = now, grace, kill_at
        self._state = self._observed = None

    @property
    def phase(self) -> ReplicaPhase:
        return "draining" if self.retired_at is not None else self._report.phase

    @property
    def usable(self) -> bool:
        """Whether it serves requests or is about to."""
        return self.phase != "draining"

    @property
    def progress(self) -> LoadProgress:
        """How far it is in being loaded."""
        if self.phase == "fetching":
            return LoadProgress("fetching")
        return (self._report.loading or STARTING) if self.phase == "loading" else QUEUED

    def idle_seconds(self, now: float) -> float:
        """Return the time since its last request; 0 while it is in use or does not serve."""
        return now - self._idle_since if self._idle_since is not None and self.phase == "ready" else 0.0

    def state(self) -> ReplicaState:
        if self._state is None:
            report, phase = self._report, self.phase
            serving = report.phase in SERVING and bool(report.address)
            grace = self.grace if self.retired_at is not None else report.grace
            self._state = ReplicaState(
                report.id,
                phase,
                address=report.address if serving else "",
                node=report.node,
                fingerprint=report.fingerprint if serving else "",
                reason=report.reason,
                grace=grace if phase == "draining" else 0.0,
            )
        return self._state

    def observe(self, now: float) -> Replica:
        idle = self.idle_seconds(now)
        if self._observed is None or self._observed.idle_seconds != idle:
            report = self._report
            self._observed = Replica(
                id=report.id,
                model=report.model,
                node=report.node,
                condition=_CONDITIONS[self.phase],
                running=self.running,
                waiting=self.waiting,
                idle_seconds=idle,
                started_at=report.started_at,
                address=report.address,
                fingerprint=report.fingerprint,
                reason=report.reason,
            )
        return self._observed
