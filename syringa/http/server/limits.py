"""What a process can bear: how many connections, and for how long a client that does not read."""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import time
from collections.abc import Collection
from typing import Any

logger = logging.getLogger("syringa.http")

UNREAD_SECONDS = 60.0
SPARE = 64  # connections too many that are still answered
_OTHER_FILES = 200  # open files that are no clients: the store, models, images that are fetched


def room() -> int:
    """The connections that this process has room for, after it was given all the files that it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16  # some systems have no limit at all
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    allowed = most if soft == resource.RLIM_INFINITY else min(soft, most)
    return max(allowed - _OTHER_FILES - SPARE, allowed // 2)


class Shared:
    """What the connections of a process have in common."""

    def __init__(self, read_timeout: float, limit: int) -> None:
        self.read_timeout = read_timeout or math.inf
        self.limit = limit
        self.draining = False
        self._swept = self._complained = -math.inf

    def make_room(self, connections: Collection[Any]) -> None:
        """Called with each connection too many: those that nobody uses are closed, at most once a second."""
        now = time.monotonic()
        if now - self._complained >= 60:
            self._complained = now
            logger.error(
                "%d connections are open, and there is room for %d: idle ones are closed, new ones refused",
                len(connections), self.limit,
            )  # fmt: skip
        if now - self._swept >= 1:
            self._swept = now
            for each in [each for each in connections if getattr(each, "unused", False)]:
                each.transport.close()


class Watched(asyncio.Protocol):
    """Drops a client that does not read. Comes before one of uvicorn's protocols."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    _unread: asyncio.TimerHandle | None = None
    _left = 0

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._relax()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relax()
        super().connection_lost(exc)

    def _watch(self) -> None:
        self._left = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self._look)

    def _relax(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _look(self) -> None:
        if self.transport.get_write_buffer_size() < self._left:
            self._watch()  # slow, but alive
        else:
            self.transport.abort()
