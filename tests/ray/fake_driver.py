"""A driver without Ray: nodes and actors that tests control."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from syringa.fleet.bridge_protocol import LaunchReplica, ReplicaReport, initial_report
from syringa.fleet.provider import OwnerLoad
from syringa.ray.driver import ActorGone, CallFailed
from syringa.ray.internals import RayNode
from syringa.ray.observation import NodeObservation

MEMORY = 8 << 30


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class FakeActor:
    """Answers while it `responds`. `answer`: an exception is raised."""

    answer: bytes | Exception
    node: str = ""
    responds: bool = True
    killed: bool = False
    calls: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(eq=False)
class FakeCall:
    actor: FakeActor
    method: str


class FakeDriver:
    def __init__(self) -> None:
        self.rows: dict[str, RayNode] = {}
        self.deadlines: dict[str, float] = {}
        self.agents: list[FakeActor] = []
        self.actors: dict[tuple[str, str], FakeActor] = {}
        self.drained: list[tuple[str, float]] = []
        self.load = OwnerLoad(cpu_pct=1.0)

    def add(self, name: str, *, id: str = "", labels: Mapping[str, str] | None = None) -> RayNode:
        resources = {"CPU": 2.0, "memory": float(MEMORY)}
        row = RayNode(
            id or f"id-{name}", name, f"10.0.0.{len(self.rows)}", True, labels=labels or {}, resources=resources
        )
        self.rows[row.id] = row
        return row

    def end(self, id: str, *, drained: bool = False) -> None:
        """A node dies, and its actors with it."""
        row = self.rows[id]
        self.rows[id] = RayNode(id, row.name, row.address, False, drained, row.labels, row.resources)
        for actor in [*self.agents, *self.actors.values()]:
            if actor.node == id:
                actor.answer = ActorGone("the node has died")

    def replica(self, id: str) -> FakeActor:
        return next(actor for (each, _), actor in self.actors.items() if each == id)

    def set_report(self, report: ReplicaReport) -> None:
        self.replica(report.id).answer = msgspec.msgpack.encode(report)

    # The interface

    def nodes(self) -> Sequence[RayNode]:
        return list(self.rows.values())

    def draining(self) -> Mapping[str, float]:
        return self.deadlines

    def drain(self, node_id: str, grace: float) -> None:
        self.drained.append((node_id, grace))

    def replicas(self, known: Collection[str] = ()) -> Mapping[tuple[str, str], FakeActor]:
        return {key: actor for key, actor in self.actors.items() if not actor.killed and key[0] not in known}

    def start_replica(self, launch: LaunchReplica, node: RayNode) -> FakeActor:
        report = msgspec.structs.replace(initial_report(launch), phase="loading")
        actor = FakeActor(msgspec.msgpack.encode(report), node.id)
        self.actors[launch.id, launch.model] = actor
        return actor

    def start_agent(self, node: RayNode) -> FakeActor:
        actor = FakeActor(msgspec.msgpack.encode(NodeObservation(self.load)), node.id)
        self.agents.append(actor)
        return actor

    def call(self, actor: FakeActor, method: str, *arguments: object) -> FakeCall:
        actor.calls.append((method, *arguments))
        return FakeCall(actor, method)

    def finished(self, calls: Sequence[FakeCall]) -> Sequence[FakeCall]:
        return [call for call in calls if call.actor.responds or isinstance(call.actor.answer, (ActorGone, CallFailed))]

    def result(self, call: FakeCall) -> bytes:
        if isinstance(call.actor.answer, (ActorGone, CallFailed)):
            raise call.actor.answer
        assert isinstance(call.actor.answer, bytes)
        return call.actor.answer

    def kill(self, actor: FakeActor) -> None:
        actor.killed = True
