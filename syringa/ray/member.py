"""The node of this machine in a cluster: a process of Ray, started again as long as this machine is a member."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from syringa.cluster.folder import ClusterFolder
from syringa.errors import StartupError
from syringa.ray import internals
from syringa.ray.internals import ConnectionRefused, HeadClient, HeadUnavailable, RayNode
from syringa.ray.processes import (
    MEMBER_LABEL,
    RAYLET,
    RayProcess,
    environment,
    new_member,
    node_arguments,
    wait_started,
)

logger = logging.getLogger("syringa.cluster")

LOOK_SECONDS = 2.0  # between two looks at Ray's table
DRAIN_POLL_SECONDS = 0.5
DRAIN_MARGIN_SECONDS = 15.0  # after the grace period, for the node to end
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 1.0, 30.0
WAIT_LOG_SECONDS = 60.0  # between two messages that the head is waited for
LISTED_SECONDS = 60.0  # for which a node waits until Ray has noticed that the one before it has ended

MemberState = Literal["running", "waiting", "left"]


@dataclass(frozen=True)
class MemberOptions:
    """What a node offers, and to which cluster."""

    head: str  # HOST:PORT
    folder: ClusterFolder
    name: str
    address: str  # of this machine
    labels: Mapping[str, str] = field(default_factory=dict)
    cpus: int | None = None  # None: all
    gpus: int | None = None


class ClusterMember:
    def __init__(self, options: MemberOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._clock = options, clock
        self._member = new_member()
        self._process: RayProcess | None = None
        self._client: HeadClient | None = None
        self._looked_at = clock()
        self._logged_at = -math.inf  # when it was last said that the head is waited for
        self._start_at = 0.0
        self._backoff = MIN_BACKOFF_SECONDS

    def start(self, is_cancelled: Callable[[], bool] = lambda: False, *, wait: bool = False) -> RayNode | None:
        """Join the cluster, and return the node as Ray lists it; None if cancelled. Raises `StartupError`.

        `wait`: until the head can be reached, for any time.
        """
        try:
            while not self._check_head(wait=wait):
                if is_cancelled():
                    return None
                time.sleep(LOOK_SECONDS)
        except HeadUnavailable as error:
            raise StartupError(str(error)) from None
        self._process = self._spawn()
        found: list[RayNode] = []

        def is_listed() -> bool:
            if is_cancelled():
                return True
            node = self._look()
            if node is not None and node.alive:
                found.append(node)
            return bool(found)

        try:
            wait_started(self._process, is_listed)
        except BaseException:
            self.stop()
            raise
        if not found:
            self.stop()
            return None
        return found[0]

    def _check_head(self, *, wait: bool) -> bool:
        """Return whether the head accepts this machine. Raises `HeadUnavailable`, with `wait` only if it refuses."""
        try:
            internals.check_head(self._options.head, self._options.folder.ray_files())
        except ConnectionRefused:
            raise
        except HeadUnavailable as error:
            if not wait:
                raise
            if (now := self._clock()) >= self._logged_at + WAIT_LOG_SECONDS:
                self._logged_at = now
                logger.warning("cluster: node waits for the head: %s", error)
            return False
        return True

    def poll(self) -> MemberState:
        """Start the node again if it has ended. Return "left" when it was drained and has ended."""
        now = self._clock()
        if self._process is None:
            if now >= self._start_at and not self._is_listed(now):
                logger.info("cluster: node is started again: head=%s", self._options.head)
                self._member = new_member()
                self._process = self._spawn()
            return "waiting"
        if not self._process.running:
            node = self._look()
            if node is not None and not node.alive and node.drained:
                return "left"
            logger.error("cluster: node has ended: reason=%s", self._process.failure())
            self.stop()
            self._start_at, self._backoff = now + self._backoff, min(2 * self._backoff, MAX_BACKOFF_SECONDS)
            return "waiting"
        if now >= self._looked_at + LOOK_SECONDS:
            node = self._look()
            self._looked_at = self._clock()
            if node is not None:
                self._backoff = MIN_BACKOFF_SECONDS
                if not node.alive and node.drained:
                    return "left"
        return "running"

    def drain(self, grace: float, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Let the replicas of this node end or move, for up to `grace` seconds.

        A head that cannot be reached is asked again until then: it may be busy, or be started again.
        """
        ends_at, deadline = time.time() + grace, self._clock() + grace + DRAIN_MARGIN_SECONDS
        announced, problem = False, "it does not list this node"
        while self._clock() < deadline and not is_cancelled() and self._process is not None and self._process.running:
            node = self._look()
            if node is not None and not node.alive:
                return
            if node is not None and self._client is not None and not announced:
                try:
                    self._client.drain(node.id, "the node leaves", ends_at)
                    announced = True
                except HeadUnavailable as error:
                    problem = str(error)
            time.sleep(DRAIN_POLL_SECONDS)
        if not announced:
            logger.error("cluster: node could not be drained: head=%s reason=%r", self._options.head, problem)

    def stop(self) -> None:
        """End all processes of the node at once."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _is_listed(self, now: float) -> bool:
        """Return whether Ray still takes the node that has ended for alive; a new one would get another name."""
        if now >= self._start_at + LISTED_SECONDS:
            return False
        node = self._look()
        return node is not None and node.alive

    def _spawn(self) -> RayProcess:
        options = self._options
        arguments = node_arguments(
            options.head,
            options.address,
            options.name,
            options.labels,
            member=self._member,
            cpus=options.cpus,
            gpus=options.gpus,
        )
        return RayProcess("the node", arguments, environment(options.folder), RAYLET)

    def _look(self) -> RayNode | None:
        """Return this node as Ray lists it; None if it does not, or if its head cannot be reached."""
        try:
            if self._client is None:
                internals.check_head(self._options.head, self._options.folder.ray_files())
                self._client = HeadClient(self._options.head)
            nodes = self._client.nodes()
        except HeadUnavailable:
            self._client = None
            return None
        return next((node for node in nodes if node.labels.get(MEMBER_LABEL) == self._member), None)
