"""The replicas of a cluster: started as actors on nodes, asked for their state, and taken over after a restart."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from syringa.fleet.bridge_protocol import ENDED_SECONDS, LaunchReplica, ReplicaReport, initial_report
from syringa.ray.driver import Actor, ActorGone, Call, CallFailed, ClusterDriver
from syringa.ray.internals import HeadUnavailable, RayNode

logger = logging.getLogger("syringa.bridge")

STATUS_SECONDS = 0.25  # between two calls of a replica
STATUS_CALLS_PER_SECOND = 1000  # of all replicas; with more of them, each is called less often
SILENT_SECONDS = 10.0  # after which a replica whose host does not answer hangs
SILENT_KILL_SECONDS = 40.0  # after which such a host is killed, if its node responds
QUEUED_SECONDS = 60.0  # after which a replica whose host has never answered is given up
LIST_SECONDS = 5.0  # between two looks for replicas that other servers have started
PAUSE_SECONDS = 2.0  # between two ticks: this process was stopped or waited for Ray, and hosts may have answered
ADOPT_SECONDS = 15.0  # for replicas that were found to answer
REAP_SECONDS = 2.0  # for the bridges of other servers to read how a replica has ended, before its host is killed
KILL_SECONDS = 3.0  # for a host to end its worker, before the host is killed


@dataclass
class _Entry:
    report: ReplicaReport
    actor: Actor | None = None
    call: Call | None = None
    called_at: float = 0.0
    heard_at: float = 0.0  # its last answer, or when it was started or found
    answered: bool = False
    silent: bool = False
    grace: float | None = None  # with which it was drained
    kill_at: float | None = None
    ended_at: float | None = None
    shared: bool = False  # it was found: other bridges may watch it too
    reap: Actor | None = None  # its host, which has reported the end


class ReplicaTable:
    def __init__(
        self,
        driver: ClusterDriver,
        clock: Callable[[], float] = time.monotonic,
        resolve: Callable[[str], str] = lambda node: node,
    ) -> None:
        """`resolve`: see `NodeTable.resolve`, for replicas that another bridge has started."""
        self._driver, self._clock, self._resolve = driver, clock, resolve
        self._entries: dict[str, _Entry] = {}  # by the id of the replica
        self._adopt_until = clock()
        self._listed_at = self._ticked_at = clock()

    def adopt(self) -> None:
        """Take over the replicas that run in the cluster, before the first report."""
        self._adopt_until = self._clock() + ADOPT_SECONDS
        self._list(self._clock())

    def _list(self, now: float) -> None:
        """Add the replicas that this bridge has not started. Their nodes are known when they answer."""
        self._listed_at = now
        for (id, model), actor in self._driver.replicas(self._entries.keys()).items():
            logger.info("replica is found: replica=%s", id)
            report = ReplicaReport(id, model, "", "hanging", reason="its node does not respond")
            self._entries[id] = _Entry(report, actor, heard_at=now, shared=True)

    @property
    def adopting(self) -> bool:
        """Whether replicas that were taken over have not answered yet: a report would be incomplete."""
        if self._clock() >= self._adopt_until:
            return False
        return any(not entry.answered and not entry.report.node for entry in self._live())

    def launch(self, launch: LaunchReplica, node: RayNode | None) -> None:
        if launch.id in self._entries:
            return
        entry = self._entries[launch.id] = _Entry(initial_report(launch), heard_at=self._clock())
        if node is None:
            self._end(entry, f"the node {launch.node} is not there", failed=True)
            return
        logger.info("replica is started: model=%s replica=%s node=%s", launch.name, launch.id, launch.node)
        try:
            entry.actor = self._driver.start_replica(launch, node)
        except (HeadUnavailable, ActorGone, ValueError) as error:
            self._end(entry, f"it could not be placed: {error}", failed=True)

    def retire(self, id: str, grace: float) -> None:
        entry = self._entries.get(id)
        if entry is None or entry.actor is None or (entry.grace is not None and grace >= entry.grace):
            return
        entry.grace = grace
        if entry.answered or not entry.report.node:  # one that was found may serve, also if it has not answered yet
            self._driver.call(entry.actor, "drain", grace)
        else:  # it was not placed yet
            self._driver.kill(entry.actor)
            self._end(entry, "it was drained")

    def kill(self, id: str) -> None:
        entry = self._entries.get(id)
        if entry is not None and entry.actor is not None and entry.kill_at is None:
            self._driver.call(entry.actor, "stop")
            entry.kill_at = self._clock() + (KILL_SECONDS if entry.answered and not entry.silent else 0.0)

    def nodes(self) -> set[str]:
        """Return the names of the nodes with replicas."""
        return {entry.report.node for entry in self._live()}

    def tick(self, nodes: Collection[str], silent: Collection[str]) -> None:
        """Look at the answers of replicas. `nodes`: those that are alive; `silent`: those that do not respond."""
        now = self._clock()
        paused, self._ticked_at = now - self._ticked_at > PAUSE_SECONDS, now
        if now >= self._listed_at + LIST_SECONDS:
            self._list(now)
        finished = set(self._driver.finished([entry.call for entry in self._live() if entry.call is not None]))
        interval = max(STATUS_SECONDS, len(self._entries) / STATUS_CALLS_PER_SECOND)
        for entry in list(self._live()):
            node = entry.report.node
            if paused:
                entry.heard_at = now
            if entry.answered and node not in nodes:
                self._lose(entry)
                continue
            if entry.kill_at is not None and now >= entry.kill_at:
                self._driver.kill(entry.actor)
                self._end(entry, "it was killed")
                continue
            if entry.call is not None and entry.call in finished:
                self._read(entry)
            if entry.actor is None:
                continue
            if entry.call is None and now >= entry.called_at + interval:
                entry.call, entry.called_at = self._driver.call(entry.actor, "status"), now
            unheard = now - entry.heard_at - interval
            if entry.answered and not entry.silent and (unheard > SILENT_SECONDS or node in silent):
                logger.warning("host of a replica does not respond: replica=%s node=%s", entry.report.id, node)
                entry.silent = True
            if node not in silent and unheard > (SILENT_KILL_SECONDS if entry.answered else QUEUED_SECONDS):
                self._lose(entry, _silence(entry))
        for id, entry in list(self._entries.items()):
            if entry.ended_at is None:
                continue
            watched = entry.shared or entry.report.crashed  # the suspects of a crash concern all servers
            if entry.reap is not None and now >= entry.ended_at + (REAP_SECONDS if watched else 0.0):
                self._driver.kill(entry.reap)
                entry.reap = None
            if now > entry.ended_at + ENDED_SECONDS:
                del self._entries[id]

    def reports(self) -> list[ReplicaReport]:
        return [self._report(entry) for entry in self._entries.values()]

    def _live(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.actor is not None]

    def _read(self, entry: _Entry) -> None:
        call, entry.call = entry.call, None
        try:
            report = msgspec.msgpack.decode(self._driver.result(call), type=ReplicaReport)
        except CallFailed:
            return
        except ActorGone as error:
            logger.warning("host of a replica has died: replica=%s reason=%s", entry.report.id, error)
            self._lose(entry, f"its host process on {entry.report.node} has died" if entry.answered else str(error))
            return
        if (node := self._resolve(report.node)) != report.node:
            report = msgspec.structs.replace(report, node=node)
        entry.report, entry.answered, entry.silent, entry.heard_at = report, True, False, self._clock()
        if report.phase == "ended":
            entry.reap, entry.actor, entry.ended_at = entry.actor, None, self._clock()

    def _lose(self, entry: _Entry, reason: str = "its node is lost") -> None:
        """Its actor has died, or is given up."""
        self._driver.kill(entry.actor)  # it may live on a node that is cut off, and must not keep its GPUs
        # Another server may have drained it, and have ended its host before this one was told.
        wanted = entry.grace is not None or entry.kill_at is not None or entry.report.phase == "draining"
        self._end(entry, reason, failed=not wanted)

    def _end(self, entry: _Entry, reason: str, *, failed: bool = False) -> None:
        id, node = entry.report.id, entry.report.node
        logger.log(
            logging.WARNING if failed else logging.INFO,
            "replica has ended: replica=%s node=%s reason=%r",
            id,
            node,
            reason,
        )
        entry.report = msgspec.structs.replace(
            entry.report, phase="ended", address="", stats=None, reason=reason, failed=failed
        )
        entry.actor, entry.call, entry.ended_at = None, None, self._clock()

    @staticmethod
    def _report(entry: _Entry) -> ReplicaReport:
        if entry.silent and entry.report.phase == "ready":
            return msgspec.structs.replace(entry.report, phase="hanging", reason="its node does not respond")
        return entry.report


def _silence(entry: _Entry) -> str:
    """Return why a replica is given up whose host has not answered."""
    if entry.answered or not entry.report.node:
        return "its host process does not respond"
    return f"it found no room on {entry.report.node} within {QUEUED_SECONDS:.0f} s"
