"""The tables of a bridge over a driver without Ray, and a clock that the test moves."""

from __future__ import annotations

import msgspec

from syringa.fleet.bridge_protocol import FleetReport, LaunchReplica, ReplicaReport
from syringa.fleet.provider import Node
from syringa.ray.bridge import RayFleet
from syringa.ray.processes import MEMBER_LABEL
from tests.ray.fake_driver import Clock, FakeDriver

NOW = 1_800_000_000.0


class Fleet:
    """A fleet with the nodes a and b."""

    def __init__(self, driver: FakeDriver | None = None) -> None:
        self.driver = driver or FakeDriver()
        if driver is None:
            self.driver.add("a", labels={"pool": "x", MEMBER_LABEL: "1"})
            self.driver.add("b")
        self.clock, self.wall_clock = Clock(), Clock(NOW)
        self.fleet = RayFleet(self.driver, self.clock, self.wall_clock)
        self.tick()

    def tick(self, seconds: float = 1.0, step: float = 0.5) -> None:
        """Let time pass. What was called is answered in the tick after."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += step
            self.wall_clock.now += step
            self.fleet.tick()

    def report(self) -> FleetReport:
        report = self.fleet.report()
        assert report is not None
        return report

    def node(self, name: str) -> Node | None:
        return next((each for each in self.report().nodes if each.name == name), None)

    def condition(self, name: str) -> str | None:
        node = self.node(name)
        return node.condition if node is not None else None

    def replica(self, id: str = "m-1") -> ReplicaReport:
        return next(each for each in self.report().replicas if each.id == id)

    def launch(self, id: str = "m-1", node: str = "a") -> None:
        self.fleet.handle(LaunchReplica(id, "key", node, b"{}", name="m"))

    def make_ready(self, id: str = "m-1") -> None:
        self.tick()
        report = msgspec.structs.replace(self.replica(id), phase="ready", address="tcp:10.0.0.0:1")
        self.driver.set_report(report)
        self.tick()
        assert self.replica(id).phase == "ready"
