"""Connection limits: how many connections a process accepts, and how long a client may not read."""

from __future__ import annotations

import asyncio
import math
import resource

from syringa.http.server.connection_pool import OVERFLOW_CONNECTIONS, ConnectionPool

WRITE_TIMEOUT_SECONDS = 60.0
_OTHER_FILES = 200  # open files that are not client connections: the store, models, downloads
_MAX_FILES = 1 << 16  # where the system has no limit


def max_connections() -> int:
    """Raise the limit of open files as far as permitted, and return the number of connections that it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        soft = target
    allowed = _MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, _MAX_FILES)
    return max(allowed - _OTHER_FILES - OVERFLOW_CONNECTIONS, allowed // 2)


class ConnectionLimits:
    """The limits that all connections of a process share."""

    def __init__(self, read_timeout: float, max_connections: int) -> None:
        """`read_timeout`: seconds; 0: unlimited."""
        self.read_timeout = read_timeout or math.inf
        self.pool = ConnectionPool(max_connections)
        self.draining = False


class WriteTimeout(asyncio.Protocol):
    """Aborts the connection of a client that does not read. A mixin in front of one of uvicorn's protocols."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _write_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_write_timer()
        super().connection_lost(exc)

    def _start_write_timer(self) -> None:
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(WRITE_TIMEOUT_SECONDS, self._check_progress)

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_progress(self) -> None:
        if self.transport.get_write_buffer_size() < self._unread_bytes:
            self._start_write_timer()  # slow, but alive
        else:
            self.transport.abort()
