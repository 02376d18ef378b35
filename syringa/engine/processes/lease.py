"""The lease by which one of several servers decides on the replicas of a cluster, renewed by a thread."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger("syringa.supervisor")

LEASE_SECONDS = 15.0  # after which another server takes the place of one that is gone without a word
RENEW_SECONDS = 4.0
STOP_SECONDS = 5.0  # for a call to the database that has begun


class Lease(Protocol):
    """Where the lease is kept: a database, which the engine does not know. Its methods may block, and may raise."""

    def take(self, seconds: float) -> bool:
        """Take the lease if it is free, or renew it. Return whether this server has it now."""
        ...

    def release(self) -> None:
        """Give the lease back and close what was opened."""
        ...


class LeaseKeeper:
    """Takes and renews a lease. All calls of it are made by one thread, so that the supervisor never waits."""

    def __init__(self, lease: Lease, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease, self._clock = lease, clock
        self._held_until = -math.inf
        self.reason = "the lease on the cluster is being taken"  # why it is not held
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="lease")

    @property
    def held(self) -> bool:
        """Whether this server may decide now."""
        return self._clock() < self._held_until

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Give the lease back, so that another server need not wait until it expires."""
        self._held_until = -math.inf
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def renew(self) -> None:
        """Take or renew the lease now. The time of the call counts as held, not that of the answer."""
        asked_at, held = self._clock(), self.held
        try:
            taken = self._lease.take(LEASE_SECONDS)
        except Exception as error:
            logger.warning("lease: cannot be renewed: error=%s", error)
            self.reason = "the database, which has the lease on the cluster, does not answer"
            return
        self.reason = "another server decides on the replicas of this cluster, and has none of this model"
        if self._stopping.is_set():
            return
        self._held_until = asked_at + LEASE_SECONDS if taken else -math.inf
        if taken and not held:
            logger.info("lease: this server decides on the replicas of the cluster")
        elif held and not taken:
            logger.warning("lease: another server decides on the replicas of the cluster")

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.renew()
            self._stopping.wait(RENEW_SECONDS)
        try:
            self._lease.release()
        except Exception as error:
            logger.warning("lease: cannot be released: error=%s", error)
