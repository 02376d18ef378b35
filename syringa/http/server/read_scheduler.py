"""Bounds how long received data is parsed in one turn of the event loop.

A few megabytes can hold a million frames or chunks, which take seconds to parse. Connections therefore parse what they
receive in slices. Each turn has room for a number of slices, which all connections share; a connection with more data
stops reading from its socket and waits, first come, first served.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections import deque

logger = logging.getLogger("syringa.http")

SLICE_BYTES = 4096  # parsed at once: no more than 700 of the smallest frames or chunks
WORK_PER_TURN = 512  # a few milliseconds; in parser events, such as headers, chunks and frames
_SLICE_WORK = 8  # of a slice itself: a turn parses up to 256 KiB of large frames or chunks
_SMALL_WORK = 64  # not counted: that of an ordinary request


class ReadScheduler:
    """Decides which connection parses next. One for all connections of a process."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[SlicedReader] = deque()
        self._work = 0  # in this turn
        self._scheduled = False

    @property
    def available(self) -> bool:
        """Whether data that arrives now may be parsed at once."""
        return self._work < WORK_PER_TURN and not self._waiting

    def charge(self, work: int) -> None:
        """Count the work of a slice that was parsed as soon as it was received."""
        if work > _SMALL_WORK:
            self._work += work
            self._schedule_turn()

    def submit(self, reader: SlicedReader) -> None:
        """Let a connection parse its data, as far as this turn has room for, and the rest in later turns."""
        if self.available:
            while reader.has_unparsed_data and self._work < WORK_PER_TURN:
                self._parse_slice(reader)
        if reader.has_unparsed_data and not reader.is_waiting:
            reader.is_waiting = True
            self._waiting.append(reader)
        self._schedule_turn()  # to begin with new work, even if nothing waits

    def _schedule_turn(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._scheduled, self._work = False, 0
        while self._waiting and self._work < WORK_PER_TURN:
            reader = self._waiting.popleft()
            self._parse_slice(reader)
            if reader.has_unparsed_data:
                self._waiting.append(reader)
            else:
                reader.is_waiting = False
                reader.resume_socket()
        if self._work:
            self._schedule_turn()

    def _parse_slice(self, reader: SlicedReader) -> None:
        try:
            self._work += _SLICE_WORK + reader.parse_next_slice()
        except Exception:  # other connections go on
            logger.exception("connection failed while parsing")
            reader.discard_unparsed_data()
            reader.transport.abort()


class SlicedReader(asyncio.Protocol):
    """Parses received data in slices. A mixin in front of one of uvicorn's protocols."""

    transport: asyncio.Transport
    loop: asyncio.AbstractEventLoop
    is_waiting = False  # maintained by the scheduler
    _reads: ReadScheduler
    _unparsed: bytes | memoryview = b""
    _discarding = False

    @abstractmethod
    def parse_slice(self, data: bytes | memoryview) -> int:
        """Parse some data, and return the number of parser events."""

    @abstractmethod
    def is_read_paused(self) -> bool:
        """Return whether the app has stopped reading."""

    @property
    def has_unparsed_data(self) -> bool:
        return len(self._unparsed) > 0

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            # One read in each turn: otherwise uvloop would read on while there is more.
            self.transport.pause_reading()
            self.loop.call_soon(self.resume_socket)
        elif len(data) <= SLICE_BYTES and self._reads.available:
            self._reads.charge(self.parse_slice(data))
        else:
            self._unparsed = memoryview(bytes(self._unparsed) + data if self._unparsed else data)
            self._reads.submit(self)
            if self.has_unparsed_data:
                self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.discard_unparsed_data()
        super().connection_lost(exc)

    def parse_next_slice(self) -> int:
        data, self._unparsed = self._unparsed[:SLICE_BYTES], self._unparsed[SLICE_BYTES:]
        return self.parse_slice(data) if data else 0

    def resume_socket(self) -> None:
        """Read from the socket again, unless there is a reason not to."""
        if not self.has_unparsed_data and not self.is_read_paused() and not self.transport.is_closing():
            self.transport.resume_reading()

    def discard_unparsed_data(self) -> None:
        self._unparsed = b""

    def discard_input(self) -> None:
        """Read and ignore everything from now on."""
        self._discarding = True
        self.discard_unparsed_data()
