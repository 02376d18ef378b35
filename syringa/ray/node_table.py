"""The nodes of a cluster: which there are, whether they respond, and what their agents observe."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from syringa.fleet.provider import Node, NodeCondition, OwnerLoad
from syringa.ray.driver import Actor, ActorGone, Call, CallFailed, ClusterDriver
from syringa.ray.internals import RayNode
from syringa.ray.observation import NodeObservation
from syringa.ray.processes import HEAD_LABEL, MEMBER_LABEL

logger = logging.getLogger("syringa.bridge")

LIST_SECONDS = 0.5  # between two looks at Ray's table
OBSERVE_SECONDS = 1.0  # between two calls of an agent
SILENT_SECONDS = 10.0  # after which a node that does not answer is lost; Ray itself takes up to a minute
PAUSE_SECONDS = 2.0  # between two ticks: this process was stopped or waited for Ray, and agents may have answered
AGENT_RETRY_SECONDS = 5.0
LOST_SECONDS = 600.0  # for which a node that is gone is shown


@dataclass
class _Entry:
    """A node of Ray's table, and its agent."""

    row: RayNode
    name: str
    joined_at: float  # Unix time
    alive: bool = True
    lost_at: float = 0.0  # when it died
    drain_deadline: float | None = None  # Unix time; 0: none
    agent: Actor | None = None
    agent_at: float = -AGENT_RETRY_SECONDS  # when an agent was started last
    call: Call | None = None
    called_at: float = 0.0
    heard_at: float = 0.0  # the last answer of the agent
    answered: bool = False  # whether this agent has answered
    silent: bool = False
    load: OwnerLoad | None = None


class NodeTable:
    def __init__(
        self,
        driver: ClusterDriver,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver, self._clock, self._wall_clock = driver, clock, wall_clock
        self._entries: dict[str, _Entry] = {}  # by Ray's id
        self._by_name: dict[str, _Entry] = {}  # those that are alive
        self._listed_at = -LIST_SECONDS
        self._ticked_at = clock()

    def tick(self, occupied: Collection[str]) -> None:
        """Look at Ray's table and at the answers of agents. `occupied`: the names of nodes on which replicas are."""
        now = self._clock()
        paused, self._ticked_at = now - self._ticked_at > PAUSE_SECONDS, now
        if now >= self._listed_at + LIST_SECONDS:
            self._listed_at = now
            self._list(now)
        calls = [entry.call for entry in self._entries.values() if entry.call is not None]
        finished = set(self._driver.finished(calls))
        for entry in self._entries.values():
            if paused:
                entry.heard_at = now
            if entry.alive:
                self._tick_agent(entry, finished, entry.name in occupied, now)

    def nodes(self) -> list[Node]:
        return [self._node(entry) for entry in self._entries.values()]

    def find(self, name: str) -> RayNode | None:
        """Return the node of a name, if it is alive."""
        entry = self._by_name.get(self.resolve(name))
        return entry.row if entry is not None else None

    def resolve(self, name: str) -> str:
        """Return what this bridge calls a node that another one, or the one before it, calls `name`.

        Which of two nodes of the same name has a suffix depends on when they were seen.
        """
        if name in self._by_name:
            return name
        alive = self._by_name.values()
        found = [each for each in alive if name in (each.row.name, _long_name(each.row))]
        return found[0].name if len(found) == 1 else name

    def alive(self) -> Collection[str]:
        """Return the names of the nodes that are in the cluster, whether they respond or not."""
        return self._by_name.keys()

    def silent(self) -> set[str]:
        """Return the names of the nodes that do not respond."""
        return {entry.name for entry in self._entries.values() if entry.alive and entry.silent}

    def _list(self, now: float) -> None:
        draining = self._driver.draining()
        for row in self._driver.nodes():
            if HEAD_LABEL in row.labels:
                continue
            entry = self._entries.get(row.id)
            if entry is None:
                if not row.alive:
                    continue
                entry = self._entries[row.id] = _Entry(row, self._unique(row), self._wall_clock())
                logger.info("node has joined: node=%s address=%s", entry.name, row.address)
            if entry.alive and not row.alive:
                self._leave(entry, row, now)
            entry.drain_deadline = draining.get(row.id)
        for id, entry in list(self._entries.items()):
            if not entry.alive and now > entry.lost_at + LOST_SECONDS:
                del self._entries[id]
        self._by_name = {entry.name: entry for entry in self._entries.values() if entry.alive}

    def _leave(self, entry: _Entry, row: RayNode, now: float) -> None:
        entry.alive, entry.lost_at, entry.agent, entry.call = False, now, None, None
        if row.drained or entry.drain_deadline is not None:
            logger.info("node has left: node=%s", entry.name)
            del self._entries[row.id]
        else:
            logger.warning("node is lost: node=%s address=%s", entry.name, row.address)

    def _unique(self, row: RayNode) -> str:
        """Return a name that no other node has, and that a lost node of the same name gives up."""
        for id, entry in list(self._entries.items()):
            if entry.name == row.name and not entry.alive:
                del self._entries[id]
        taken = {entry.name for entry in self._entries.values()}
        return row.name if row.name and row.name not in taken else _long_name(row)

    def _tick_agent(self, entry: _Entry, finished: Collection[Call], occupied: bool, now: float) -> None:
        if entry.drain_deadline is not None and not occupied:
            if entry.agent is not None:  # a node leaves when nothing runs on it any more
                self._driver.kill(entry.agent)
                entry.agent = entry.call = None
            return
        if entry.agent is None:
            if entry.drain_deadline is None and now >= entry.agent_at + AGENT_RETRY_SECONDS:
                entry.agent, entry.agent_at = self._driver.start_agent(entry.row), now
                self._observe(entry, now)
            return
        if entry.call is not None and entry.call in finished:
            call, entry.call = entry.call, None
            try:
                answer = msgspec.msgpack.decode(self._driver.result(call), type=NodeObservation)
            except ActorGone as error:
                logger.warning("agent of a node has ended: node=%s reason=%s", entry.name, error)
                entry.agent, entry.load, entry.answered = None, None, False
                return
            except CallFailed as error:
                logger.warning("agent of a node has failed: node=%s reason=%s", entry.name, error)
                entry.load = None
            else:
                self._hear(entry, answer, now)
        if entry.call is None and now >= entry.called_at + OBSERVE_SECONDS:
            self._observe(entry, now)
        if entry.answered and not entry.silent and now > entry.heard_at + OBSERVE_SECONDS + SILENT_SECONDS:
            logger.warning("node does not respond: node=%s", entry.name)
            entry.silent = True

    @staticmethod
    def _hear(entry: _Entry, answer: NodeObservation, now: float) -> None:
        entry.load, entry.answered, entry.heard_at = answer.owner_load, True, now
        if entry.silent:
            logger.info("node responds again: node=%s", entry.name)
            entry.silent = False

    def _observe(self, entry: _Entry, now: float) -> None:
        assert entry.agent is not None
        entry.call, entry.called_at = self._driver.call(entry.agent, "observe"), now

    def _node(self, entry: _Entry) -> Node:
        condition: NodeCondition = "ready"
        grace = None
        if not entry.alive or entry.silent:
            condition = "lost"
        elif entry.drain_deadline is not None:
            condition = "draining"
            grace = max(0.0, entry.drain_deadline - self._wall_clock()) if entry.drain_deadline else None
        resources = entry.row.resources
        return Node(
            name=entry.name,
            condition=condition,
            labels={name: value for name, value in entry.row.labels.items() if name != MEMBER_LABEL},
            gpus=int(resources.get("GPU", 0)),
            cpus=int(resources.get("CPU", 0)),
            memory=int(resources.get("memory", 0)),
            joined_at=entry.joined_at,
            owner_load=entry.load,
            drain_grace=grace,
        )


def _long_name(row: RayNode) -> str:
    """Return the name of a node whose own name another one has, or that has none."""
    return f"{row.name or row.address}-{row.id[:6]}"
