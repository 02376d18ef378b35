"""The bridge between a server's supervisor and Ray: the only process of the server that imports Ray.

The supervisor sends wishes and gets reports (`syringa.fleet.bridge_protocol`). The main thread makes Ray's calls, which
may block while Ray's head does not respond; another one holds the connection to the supervisor and goes on reporting.
Ray may end this process when its head is gone. The supervisor starts it again; it finds the replicas that run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from syringa import logs
from syringa.cluster.folder import ClusterFolder
from syringa.engine.client import protocol
from syringa.engine.processes import managed_process
from syringa.errors import StartupError
from syringa.fleet.bridge_protocol import (
    REPORT_SECONDS,
    STARTING,
    BridgeOptions,
    FleetReport,
    FromBridge,
    KillReplica,
    LaunchReplica,
    ReleaseNode,
    RetireReplica,
    ToBridge,
    changes,
)
from syringa.ray import internals
from syringa.ray.driver import NAMESPACE, ClusterDriver, RayDriver
from syringa.ray.installed import check_installed
from syringa.ray.internals import HeadUnavailable
from syringa.ray.node_table import NodeTable
from syringa.ray.processes import environment
from syringa.ray.replica_table import ReplicaTable

logger = logging.getLogger("syringa.bridge")

TICK_SECONDS = 0.1
RETRY_SECONDS = 2.0  # between two attempts to reach Ray's head
STUCK_SECONDS = 10.0  # a call to Ray that takes longer means that its head does not respond
GIVE_UP_SECONDS = 30.0  # after which this process is started again: Ray's own time-outs are those of nodes
READ_SIZE = 1 << 16


class RayFleet:
    """All nodes and replicas of a cluster, seen through a driver."""

    def __init__(
        self,
        driver: ClusterDriver,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._driver = driver
        self._nodes = NodeTable(driver, clock, wall_clock)
        self._replicas = ReplicaTable(driver, clock, self._nodes.resolve)
        self._replicas.adopt()

    def handle(self, message: ToBridge) -> None:
        match message:
            case LaunchReplica():
                self._replicas.launch(message, self._nodes.find(message.node))
            case RetireReplica(id, grace):
                self._replicas.retire(id, grace)
            case KillReplica(id):
                self._replicas.kill(id)
            case ReleaseNode(node, grace):
                if (found := self._nodes.find(node)) is not None:
                    self._driver.drain(found.id, grace)

    def tick(self) -> None:
        self._nodes.tick(self._replicas.nodes())
        self._replicas.tick(self._nodes.alive(), self._nodes.silent())

    @property
    def adopting(self) -> bool:
        """Whether replicas that were taken over have not answered: what becomes of wishes depends on them."""
        return self._replicas.adopting

    def report(self) -> FleetReport | None:
        """Return what there is; None while replicas that were taken over have not answered."""
        if self.adopting:
            return None
        return FleetReport(self._nodes.nodes(), self._replicas.reports())


def state_of(report: FleetReport) -> object:
    """Return what is reported at once when it changes; loads, statistics and progress wait for the next report."""
    nodes = [(each.name, each.condition) for each in report.nodes]
    replicas = [(each.id, each.phase, each.node, each.address, each.hangs) for each in report.replicas]
    return report.connected, report.reason, nodes, replicas


class SupervisorLink:
    """The connection to the supervisor, in a thread of its own. When it ends, so does this process."""

    def __init__(self, path: str) -> None:
        self.messages: queue.SimpleQueue[ToBridge] = queue.SimpleQueue()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._decoder: protocol.FrameDecoder[ToBridge] = protocol.FrameDecoder(msgspec.msgpack.Decoder(ToBridge))
        self._lock = threading.Lock()
        self._report = FleetReport(connected=False, reason=STARTING)
        self._sent = self._report  # with which the supervisor has been told all
        self._updated_at = time.monotonic()
        self._changed = False
        self._wake, self._wakened = socket.socketpair()
        threading.Thread(target=self._run, daemon=True, name="supervisor-link").start()

    def update(self, report: FleetReport) -> None:
        """Replace the report that is sent."""
        with self._lock:
            changed, self._report = state_of(report) != state_of(self._report), report
            self._changed = self._changed or changed
            self._updated_at = time.monotonic()
        if changed:
            self._wake.send(b"\0")

    def keep(self) -> None:
        """Say that the last report is still the current one."""
        self._updated_at = time.monotonic()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector, contextlib.suppress(OSError, msgspec.MsgspecError):
            selector.register(self._socket, selectors.EVENT_READ)
            selector.register(self._wakened, selectors.EVENT_READ)
            send_at = 0.0
            # Before it is connected, Ray's own time-outs apply, and a slow machine takes its time.
            while not self._report.connected or time.monotonic() < self._updated_at + GIVE_UP_SECONDS:
                if self._changed or time.monotonic() >= send_at:
                    send_at = time.monotonic() + REPORT_SECONDS
                    self._socket.sendall(protocol.frame(self._message()))
                for key, _ in selector.select(max(0.0, send_at - time.monotonic())):
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(READ_SIZE)
                    if key.fileobj is self._wakened:
                        continue
                    if not data:
                        os._exit(0)
                    for message in self._decoder.feed(data):
                        self.messages.put(message)
        os._exit(1)

    def _message(self) -> FromBridge:
        """Return what the supervisor has not been told: all of it, or what has changed."""
        before, self._sent = self._sent, self._current()
        return changes(before, self._sent) if before.connected and self._sent.connected else self._sent

    def _current(self) -> FleetReport:
        with self._lock:
            self._changed = False
            if self._report.connected and time.monotonic() > self._updated_at + STUCK_SECONDS:
                return FleetReport(connected=False, reason="Ray's head does not respond")
            return self._report


class Bridge:
    def __init__(self, options: BridgeOptions, link: SupervisorLink) -> None:
        host = options.address.rpartition(":")[0] or "127.0.0.1"
        self._address = f"{host}:{options.ray_port}"
        self._files = ClusterFolder(Path(options.cluster_dir)).ray_files()
        self._link = link

    def run(self) -> None:
        """Go on until Ray ends this process, or the supervisor is gone."""
        self._connect()
        logger.info("connected to Ray: address=%s", self._address)
        fleet = RayFleet(RayDriver(self._address))
        while True:
            self.step(fleet)
            time.sleep(TICK_SECONDS)

    def step(self, fleet: RayFleet) -> None:
        """Look at the cluster, then do what the supervisor wants; it repeats its wishes to a bridge that connects."""
        fleet.tick()
        if not fleet.adopting:
            with contextlib.suppress(queue.Empty):
                while True:
                    self._handle(fleet, self._link.messages.get_nowait())
        report = fleet.report()
        if report is not None:
            self._link.update(report)
        else:
            self._link.keep()

    def _handle(self, fleet: RayFleet, message: ToBridge) -> None:
        try:
            fleet.handle(message)
        except HeadUnavailable as error:
            logger.error("a wish of the supervisor failed: %s reason=%s", type(message).__name__, error)

    def _connect(self) -> None:
        said = ""
        while True:
            try:
                internals.check_head(self._address, self._files)
                internals.connect(self._address, NAMESPACE)
                return
            except HeadUnavailable as error:
                if (reason := str(error)) != said:
                    logger.error("%s", reason)
                said = reason
                self._link.update(FleetReport(connected=False, reason=reason))
                time.sleep(RETRY_SECONDS)


def main() -> None:
    options = managed_process.attach_to_parent(BridgeOptions)
    logs.configure(options.log_level, options.log_format)
    folder = ClusterFolder(Path(options.cluster_dir))
    try:
        check_installed()
        folder.check_ray()
    except StartupError as error:
        print(f"syringa: {error.message}", file=sys.stderr)
        sys.exit(managed_process.EXIT_CANNOT_START)
    os.environ.update(environment(folder))  # before Ray is imported
    os.chdir("/")  # Ray adds the working directory to the module path of actors
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # on which Ray prints pages when a node is lost
    try:
        Bridge(options, SupervisorLink(options.socket)).run()
    except HeadUnavailable as error:
        logger.error("the bridge is started again: reason=%s", error)
    except Exception:
        logger.exception("the bridge to Ray has failed")
    os._exit(1)  # Ray's own exit handlers may wait for a head that is gone


if __name__ == "__main__":
    main()
