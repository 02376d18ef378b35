"""What the servers of a cluster agree on through a database: which of them decides on replicas, and which is the last.

They also share the pools that operators have opened and closed.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from syringa.fleet.cluster_records import ClusterRecords
from syringa.fleet.overrides import PoolOverrides

logger = logging.getLogger("syringa.supervisor")

LEASE_SECONDS = 15.0  # after which another server takes the place of one that is gone without a word
RENEW_SECONDS = 4.0
LEAVE_SECONDS = 10.0  # for the database, when the server is stopped
STOP_SECONDS = 5.0  # for a call to the database that has begun


class ClusterCoordinator:
    """Keeps the records of a server. All calls are made by one thread, so that the supervisor never waits."""

    def __init__(self, records: ClusterRecords, clock: Callable[[], float] = time.monotonic) -> None:
        self._records, self._clock = records, clock
        self.overrides = PoolOverrides(self._wake_up)
        self.reason = "the lease on the cluster is being taken"  # why this server does not decide
        self._held_until = -math.inf
        self._last = False  # whether no other server was left when this one has left
        self._wake, self._leaving, self._left, self._stopping = (threading.Event() for _ in range(4))
        self._thread = threading.Thread(target=self._run, daemon=True, name="coordinator")

    @property
    def decides(self) -> bool:
        """Whether this server has the lease, and decides on the replicas of the cluster."""
        return self._clock() < self._held_until

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> bool:
        """Stop deciding, wait for the database, and return whether this was the last server of the cluster.

        False if the database does not answer. Of servers that leave at the same time, at least one is the last.
        """
        self._leaving.set()
        self._wake_up()
        return self._thread.is_alive() and self._left.wait(LEAVE_SECONDS) and self._last

    def stop(self) -> None:
        """Leave, and give the lease back, so that another server need not wait until it expires."""
        self._held_until = -math.inf
        self._leaving.set()
        self._stopping.set()
        self._wake_up()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def renew(self) -> None:
        """Renew the records now. The time of the call counts as held, not that of the answer."""
        asked_at, decided = self._clock(), self.decides
        changes = self.overrides.changes()
        try:
            renewal = self._records.renew(LEASE_SECONDS, changes)
        except Exception as error:
            logger.warning("lease: cannot be renewed: error=%s", error)
            self.reason = "the database, which has the lease on the cluster, does not answer"
            return
        self.overrides.update(changes, renewal.overrides)  # before this server decides anything
        self.reason = "another server decides on the replicas of this cluster, and has none of this model"
        if self._leaving.is_set():
            return
        self._held_until = asked_at + LEASE_SECONDS if renewal.decides else -math.inf
        if renewal.decides and not decided:
            logger.info("lease: this server decides on the replicas of the cluster")
        elif decided and not renewal.decides:
            logger.warning("lease: another server decides on the replicas of the cluster")

    def _wake_up(self) -> None:
        self._wake.set()

    def _run(self) -> None:
        while not self._leaving.is_set():
            self.renew()
            self._wake.wait(RENEW_SECONDS)
            self._wake.clear()
        self._held_until = -math.inf
        try:
            self._last = not self._records.leave(LEASE_SECONDS)
        except Exception as error:
            logger.warning("lease: other servers of the cluster are unknown: error=%s", error)
        self._left.set()
        self._stopping.wait()
        try:
            self._records.close()
        except Exception as error:
            logger.warning("lease: cannot be released: error=%s", error)
