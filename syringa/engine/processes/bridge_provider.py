"""The replicas of a cluster, as the controller sees them: what the bridge reports, and what was asked of it since.

Only what a message changes is looked at: a large cluster sends one many times a second.

The bridge is a process of its own, which may end at any time. While it is away the last report stands: the replicas do
not depend on it, and API servers go on using them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from syringa.engine.client import protocol
from syringa.engine.processes.cluster_replica import SERVING, ClusterReplica
from syringa.engine.processes.control import Acceptor, MessageConnection
from syringa.engine.processes.worker_process import DRAIN_MARGIN_SECONDS, UNLOAD_SECONDS
from syringa.fleet.bridge_protocol import (
    STARTING,
    FleetReport,
    FleetUpdate,
    FromBridge,
    KillReplica,
    LaunchReplica,
    ReleaseNode,
    ReplicaReport,
    RetireReplica,
    initial_report,
    load_of,
)
from syringa.fleet.provider import EventKind, Node, Replica, ReplicaEvent

logger = logging.getLogger("syringa.supervisor")

LAUNCH_SECONDS = 15.0  # after which a replica that is in no report was not started
MISSING_SECONDS = 2.0  # after which a replica that is no longer in a report has ended
# What a draining replica may take beyond its grace period before it is killed.
RETIRE_MARGIN_SECONDS = DRAIN_MARGIN_SECONDS + UNLOAD_SECONDS + 10.0
KILL_SECONDS = 10.0  # after which it is asked for again
RELEASE_SECONDS = 5.0  # after which the release of a node is asked for again
NOT_CONNECTED = "the bridge to the cluster is being started"


class EndedReplica(NamedTuple):
    """The last report of a replica."""

    report: ReplicaReport
    known: bool  # whether this process knew it when it was running
    was_ready: bool
    lost: bool  # with its node, or in an unknown way


class _Drain(NamedTuple):
    """How an operator drains a node."""

    grace: float | None  # as asked for; None: that of the node's pool
    release: float  # for the cluster: the same, in seconds
    asked_at: float


class BridgeProvider:
    """A `ReplicaProvider` over the bridge. Call `tick` often."""

    def __init__(
        self,
        folder: str,
        selector: selectors.BaseSelector,
        launch: Callable[[str, str], LaunchReplica],
        adopts: Callable[[ReplicaReport], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`launch` describes a new replica of a model on a node; `adopts` says whether an unknown one is taken over."""
        self.connected = False  # whether the last report is that of now
        self.reason = NOT_CONNECTED  # why not
        self.running: dict[str, ClusterReplica] = {}
        self.revision = 0  # changes with every report, unless it is on loads only, and with what is started or stopped
        self.unknown: dict[str, tuple[ReplicaReport, float]] = {}  # that are not taken over, and since when
        self._launch, self._adopts, self._clock, self._selector = launch, adopts, clock, selector
        self._listener = protocol.listen(str(Path(folder) / "bridge.sock"))
        self._acceptor = Acceptor(self._listener)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._connection: MessageConnection[FromBridge] | None = None
        self._by_model: dict[str, dict[str, ClusterReplica]] = {}  # those of `running`
        self._reports: dict[str, ReplicaReport] = {}  # all that the bridge knows, by id
        self._nodes: dict[str, Node] = {}
        self._listed: list[Node] | None = None  # what `nodes` returns, until something changes
        self._draining: dict[str, _Drain] = {}  # nodes that an operator drains
        self._gone: set[str] = set()  # replicas in the report whose end was noticed
        self._events: list[ReplicaEvent] = []
        self._ended: list[EndedReplica] = []
        self._hung: list[str] = []

    @property
    def path(self) -> str:
        """The socket to which the bridge connects."""
        return str(self._listener.getsockname())

    def tick(self) -> None:
        """Read what the bridge has reported, and kill what does not end."""
        now = self._clock()
        self._accept()
        connection = self._connection
        if connection is not None:
            connection.flush()
            for message in connection.receive():
                if isinstance(message, FleetUpdate):
                    self._update_all(message, now)
                else:
                    self._replace_all(message, now)
            if not connection.open:
                logger.warning("bridge to the cluster is gone: replicas go on serving")
                self._connection, self.connected, self.reason = None, False, NOT_CONNECTED
                self.revision += 1
        for replica in self.running.values():
            if replica.retired_at is not None and now > replica.kill_at:
                replica.kill_at = now + KILL_SECONDS
                self._send(KillReplica(replica.id))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.flush()
            self._connection.close()
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._listener)
        self._listener.close()

    # The interface of the controller

    def nodes(self) -> Sequence[Node]:
        """Return the nodes, in the same list as long as nothing has changed."""
        drains = self._draining
        if self._listed is None:
            self._listed = [
                dataclasses.replace(node, condition="draining", drain_grace=drains[name].grace)
                if name in drains and node.condition != "lost"
                else node
                for name, node in self._nodes.items()
            ]
        return self._listed

    def replicas(self) -> Sequence[Replica]:
        now = self._clock()
        return [each.observe(now) for each in self.running.values()]

    def start(self, model: str, node: str) -> str:
        launch = self._launch(model, node)
        self._add(ClusterReplica(initial_report(launch), self._clock(), launch))
        self._send(launch)
        return launch.id

    def stop(self, replica: str, grace: float) -> None:
        found = self.running.get(replica)
        if found is None:
            return
        now = self._clock()
        if found.retired_at is not None and found.kill_at <= now + grace + RETIRE_MARGIN_SECONDS:
            return
        found.retire(now, grace, now + grace + RETIRE_MARGIN_SECONDS)
        self.revision += 1
        self._send(RetireReplica(replica, grace))

    def events(self) -> Sequence[ReplicaEvent]:
        events, self._events = self._events, []
        return events

    # What the manager needs

    def of_model(self, key: str) -> list[ClusterReplica]:
        return list(self._by_model.get(key, {}).values())

    def node(self, name: str) -> Node | None:
        return self._nodes.get(name)

    def take_ended(self) -> list[EndedReplica]:
        """Return the replicas that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_hung(self) -> list[str]:
        """Return the keys of models of which a replica has begun to hang since the last call."""
        hung, self._hung = self._hung, []
        return hung

    def drain_node(self, name: str, grace: float | None, default: float) -> None:
        """Take a node out of use: the controller ends its replicas, and the cluster places nothing on it.

        `default`: the grace period of its pool, which applies where `grace` is None.
        """
        if self.node(name) is not None:
            self._draining[name] = _Drain(grace, default if grace is None else grace, self._clock())
            self._listed = None
            self._send(ReleaseNode(name, self._draining[name].release))

    def retire_unknown(self, since: float, grace: float) -> None:
        """End the replicas that no model has taken over since then."""
        for id, (report, seen_at) in list(self.unknown.items()):
            if seen_at <= since and report.phase != "draining":
                logger.info("replica of no known model is stopped: replica=%s node=%s", id, report.node)
                self.unknown[id] = (report, self._clock())  # asked for again if it does not end
                self._send(RetireReplica(id, grace))

    def kill_all(self) -> None:
        for id in (*self.running, *self.unknown):
            self._send(KillReplica(id))

    # Reports

    def _accept(self) -> None:
        while (accepted := self._acceptor.accept()) is not None:
            if self._connection is not None:
                self._connection.close()
            decoder: protocol.FrameDecoder[FromBridge] = protocol.FrameDecoder(msgspec.msgpack.Decoder(FromBridge))
            self._connection = MessageConnection(accepted, decoder, self._selector)
            self.connected = False  # until it has reported
            self._repeat()

    def _repeat(self) -> None:
        """Ask a new bridge for what the last one may not have done."""
        for replica in self.running.values():
            if replica.launch is not None:
                replica.launched_at = self._clock()
                self._send(replica.launch)
            if replica.retired_at is not None:
                left = replica.retired_at + replica.grace - self._clock()
                self._send(RetireReplica(replica.id, max(0.0, left)))
        for name in self._draining:
            self._release(name)

    def _release(self, name: str) -> None:
        drain = self._draining[name] = self._draining[name]._replace(asked_at=self._clock())
        self._send(ReleaseNode(name, drain.release))

    def _send(self, message: msgspec.Struct) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def _add(self, replica: ClusterReplica) -> None:
        self.running[replica.id] = replica
        self._by_model.setdefault(replica.report.model, {})[replica.id] = replica
        self.revision += 1

    def _replace_all(self, report: FleetReport, now: float) -> None:
        """Apply a complete report."""
        self.revision += 1
        if not report.connected:
            if self.connected or self.reason != report.reason:
                level = logging.INFO if report.reason == STARTING else logging.WARNING
                logger.log(level, "cluster cannot be reached: reason=%r", report.reason)
            self.connected, self.reason = False, report.reason
            return
        self.connected, self.reason = True, ""
        self._nodes = {node.name: node for node in report.nodes}
        self._listed = None
        self._reports = {each.id: each for each in report.replicas}
        self._look_at(report.replicas, now)

    def _update_all(self, update: FleetUpdate, now: float) -> None:
        """Apply what has changed since the last message."""
        changed = {node.name: node for node in update.nodes}
        affected = {  # nodes that have come, gone, or are lost
            name
            for name in (*changed, *update.gone_nodes)
            if self._is_present(name) != (name in changed and changed[name].condition != "lost")
        }
        if changed or update.gone_nodes:
            self._nodes.update(changed)
            for name in update.gone_nodes:
                self._nodes.pop(name, None)
            self._listed = None
        for id in update.gone_replicas:
            self._reports.pop(id, None)
        look_at = {each.id: each for each in update.replicas}
        self._reports.update(look_at)
        if affected:
            look_at.update((id, each) for id, each in self._reports.items() if each.node in affected)
        look_at.update((id, self._reports[id]) for id in self.unknown if id in self._reports)  # a model may be new
        if look_at or changed or update.gone_nodes or update.gone_replicas:
            self.revision += 1
        self._look_at(look_at.values(), now)
        for load in update.loads:
            if (replica := self.running.get(load.id)) is not None:
                replica.set_load(load, now)

    def _is_present(self, name: str) -> bool:
        node = self._nodes.get(name)
        return node is not None and node.condition != "lost"

    def _look_at(self, replicas: Iterable[ReplicaReport], now: float) -> None:
        """Find out what has happened to these replicas, and to those that are no longer reported."""
        if self._draining:
            self._draining = {name: drain for name, drain in self._draining.items() if self._is_present(name)}
            self._listed = None
        for name, drain in list(self._draining.items()):
            if self._nodes[name].condition == "ready" and now >= drain.asked_at + RELEASE_SECONDS:
                self._release(name)
        reported = self._reports.keys()
        self._gone &= reported
        self.unknown = {id: each for id, each in self.unknown.items() if id in reported}
        for each in replicas:
            present = self._is_present(each.node)
            if each.phase == "ended":
                self._end(each, lost=not present)
            elif not each.node:
                self._notice_silent(each)
            elif not present:
                self._end(_lost(each, f"its node {each.node} is lost"), lost=True)
            else:
                self._update(each, now)
        for id in self.running.keys() - reported:
            self._notice_missing(self.running[id], now)

    def _update(self, report: ReplicaReport, now: float) -> None:
        replica = self.running.get(report.id)
        if replica is None:
            self._gone.discard(report.id)  # its node is there again
            if not self._adopts(report):
                self.unknown[report.id] = (report, self.unknown.get(report.id, (report, now))[1])
                return
            logger.info("replica is taken over: model=%s replica=%s node=%s", report.name, report.id, report.node)
            self.unknown.pop(report.id, None)
            self._add(ClusterReplica(report, now))
            return
        before, replica.report = replica.report, report
        replica.set_load(load_of(report), now)
        replica.launch = replica.missing_since = None
        if report.hangs > before.hangs:
            self._hung += [report.model] * (report.hangs - before.hangs)
        if report.phase == "ready" and before.phase not in SERVING:
            self._events.append(ReplicaEvent("ready", report.id, report.model, node=report.node))

    def _notice_silent(self, report: ReplicaReport) -> None:
        """A replica that has not answered a new bridge: where it is, is known from the last one, or not yet."""
        replica = self.running.get(report.id)
        if replica is not None:
            replica.launch = replica.missing_since = None
            if replica.report.phase == "ready":
                replica.report = msgspec.structs.replace(replica.report, phase="hanging", reason=report.reason)

    def _notice_missing(self, replica: ClusterReplica, now: float) -> None:
        if replica.launch is not None:
            if now - replica.launched_at > LAUNCH_SECONDS:
                self._send(KillReplica(replica.id))
                self._end(_lost(replica.report, "the cluster has not started it"), lost=True)
            return
        replica.missing_since = now if replica.missing_since is None else replica.missing_since
        if now - replica.missing_since >= MISSING_SECONDS:
            self._end(_lost(replica.report, "the cluster no longer knows it"), lost=True)

    def _end(self, report: ReplicaReport, *, lost: bool) -> None:
        if report.id in self._gone:
            return
        self._gone.add(report.id)
        self.unknown.pop(report.id, None)
        replica = self.running.pop(report.id, None)
        was_ready = replica is not None and replica.report.phase in SERVING
        if replica is not None:
            del self._by_model[report.model][report.id]
            failed = report.failed and replica.retired_at is None
            report = msgspec.structs.replace(report, failed=failed)
            kind: EventKind = "failed" if failed else "ended"
            self._events.append(ReplicaEvent(kind, report.id, report.model, reason=report.reason, node=report.node))
        self._ended.append(EndedReplica(report, replica is not None, was_ready or report.crashed, lost))


def _lost(report: ReplicaReport, reason: str) -> ReplicaReport:
    """Return the last report of a replica that has not reported its end."""
    return msgspec.structs.replace(report, phase="ended", failed=True, reason=reason, stats=None, address="")
