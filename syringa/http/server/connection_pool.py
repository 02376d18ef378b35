"""The places for connections of a process, shared fairly by organizations.

The number of connections is limited by the open files of the process. When places run out, the connection of another
organization gives way only if that organization holds more of them: first the one that has been idle for longest, and
for an authenticated client, if none is idle, the one whose response began last. An organization that holds the most
makes room among its own idle connections, or gets a 503.

Before its first request is authenticated, a connection has no organization: all of these share one bucket, whose idle
connections give way first. Addresses of peers would tell nothing behind a proxy, and a client has many of them under
IPv6. Clients leave the bucket with their first request, so that what stays there is idle, slow or without a key.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from typing import Protocol

from syringa.errors import EngineOverloaded

logger = logging.getLogger("syringa.http")

OVERFLOW_CONNECTIONS = 64  # over the limit, that still get a response
PATIENCE_SECONDS = 1.0  # for the next request of a connection, before it may give way
_LOG_SECONDS = 60.0
_MAX_EXAMINED = 64  # connections, when one that is idle is searched


class PooledConnection(Protocol):
    @property
    def idle(self) -> bool:
        """Whether it is only kept open for another request."""
        ...

    def evict(self) -> None:
        """Close it to make room for another connection."""
        ...


class _Holder:
    """The connections of an organization, or the unauthenticated ones."""

    __slots__ = ("busy", "name", "waiting")

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.waiting: dict[PooledConnection, float] = {}  # for a request, since when; the idlest first
        self.busy: dict[PooledConnection, None] = {}  # responding; the latest last

    def __len__(self) -> int:
        return len(self.waiting) + len(self.busy)

    def idlest(self, now: float) -> PooledConnection | None:
        for connection, since in itertools.islice(self.waiting.items(), _MAX_EXAMINED):
            if connection.idle or now - since > PATIENCE_SECONDS:
                return connection
        return None

    def latest(self) -> PooledConnection:
        return next(reversed(self.busy)) if self.busy else next(iter(self.waiting))


class ConnectionPool:
    """All connections of a process. Methods ignore a connection that was evicted."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._holders: dict[str | None, _Holder] = {}
        self._members: dict[PooledConnection, _Holder] = {}
        self._over: set[PooledConnection] = set()  # accepted above the limit
        self._logged_at = -math.inf

    def add(self, connection: PooledConnection) -> bool:
        """Add a new connection, and make room for it. Return False if it has to be closed at once."""
        holder = self._holder(None)
        holder.waiting[connection] = self._clock()
        self._members[connection] = holder
        if self._excess > 0:
            self._log()
            if not self._evict_for(None):
                self._over.add(connection)
        return self._excess <= OVERFLOW_CONNECTIONS

    def remove(self, connection: PooledConnection) -> None:
        holder = self._members.pop(connection, None)
        self._over.discard(connection)
        if holder is not None:
            holder.waiting.pop(connection, None)
            holder.busy.pop(connection, None)
            if not len(holder):
                self._holders.pop(holder.name, None)

    def replace(self, old: PooledConnection, new: PooledConnection) -> None:
        """Give the place of a connection to the one that continues it with another protocol."""
        holder, is_over = self._members.get(old), old in self._over
        if holder is None:
            return
        holder.waiting[new] = self._clock()
        self._members[new] = holder
        self.remove(old)
        if is_over:
            self._over.add(new)

    def is_over(self, connection: PooledConnection) -> bool:
        """Return whether the connection was accepted above the limit, and has no place yet."""
        return connection in self._over

    def claim(self, connection: PooledConnection, organization: str | None) -> None:
        """Assign a connection to the organization of its request, None if it needs none.

        Raises `EngineOverloaded` if the connection has no place, and none can be made.
        """
        holder = self._members.get(connection)
        if holder is None:
            return
        if organization is not None and holder.name != organization:
            holder = self._move(connection, holder, organization)
        if connection in self._over:
            if self._excess > 0 and not self._evict_for(None if organization is None else holder):
                raise too_many_connections()
            self._over.discard(connection)

    def begin(self, connection: PooledConnection) -> None:
        """Record that the connection is responding."""
        holder = self._members.get(connection)
        if holder is not None and holder.waiting.pop(connection, None) is not None:
            holder.busy[connection] = None

    def end(self, connection: PooledConnection) -> None:
        """Record that the connection waits for its next request."""
        holder = self._members.get(connection)
        if holder is not None and connection in holder.busy:
            del holder.busy[connection]
            holder.waiting[connection] = self._clock()

    @property
    def _excess(self) -> int:
        return len(self._members) - self._limit

    def _holder(self, name: str | None) -> _Holder:
        return self._holders.setdefault(name, _Holder(name))

    def _move(self, connection: PooledConnection, holder: _Holder, organization: str) -> _Holder:
        is_over, is_busy = connection in self._over, connection in holder.busy
        self.remove(connection)
        holder = self._members[connection] = self._holder(organization)
        if is_busy:
            holder.busy[connection] = None
        else:
            holder.waiting[connection] = self._clock()
        if is_over:
            self._over.add(connection)
        return holder

    def _evict_for(self, newcomer: _Holder | None) -> bool:
        """Evict a connection in favor of one of an organization, None if that is not known. Return whether there was
        one to evict."""
        by_size = sorted(self._holders.values(), key=len, reverse=True)
        if newcomer is None:
            larger = by_size[:1]
        else:
            larger = [each for each in by_size if len(each) > len(newcomer)]
        candidates = [self._holders.get(None), *larger, newcomer]
        now = self._clock()
        idle = (each.idlest(now) for each in candidates if each is not None)
        victim = next((each for each in idle if each is not None), None)
        if victim is None and newcomer is not None and larger:
            victim = larger[0].latest()
        if victim is None:
            return False
        self.remove(victim)
        victim.evict()
        return True

    def _log(self) -> None:
        now = self._clock()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            largest = max(self._holders.values(), key=len)
            logger.error(
                "connection limit exceeded: connections of the largest holder are closed, or new ones rejected: open=%d"
                " limit=%d largest_holder=%s holds=%d",
                len(self._members), self._limit, largest.name or "unauthenticated", len(largest),
            )  # fmt: skip


def too_many_connections() -> EngineOverloaded:
    return EngineOverloaded("Too many connections are open; try again shortly.", code="too_many_connections")
