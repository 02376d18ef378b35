"""A response's head and the first of its body, in one write."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_LARGE = 1 << 16  # from here on, joining costs more than it saves


class Gathering:
    """Stands in for a connection's transport until a response's head is out. The head waits for what follows it in the
    same turn of the event loop, if anything does. After that, the response writes straight to the transport."""

    __slots__ = ("_cycle", "_head", "_keep_alive", "_loop", "_transport")

    def __init__(self, cycle: RequestResponseCycle, loop: asyncio.AbstractEventLoop) -> None:
        self._cycle, self._transport, self._loop = cycle, cycle.transport, loop
        self._head: bytes | None = None
        self._keep_alive = cycle.keep_alive
        if cycle.waiting_for_100_continue:
            # Until it is told to go on, nobody knows whether a client will send its body: if the answer comes first,
            # what comes next may be the body or another request.
            cycle.keep_alive = False

    def write(self, data: bytes) -> None:
        head = self._head
        if head is not None:
            self._head = None
            self._cycle.transport = self._transport
            if len(data) > _LARGE:
                self._transport.write(head)
                self._transport.write(data)
            else:
                self._transport.write(head + data)
        elif self._cycle.response_started:
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._cycle.keep_alive = self._keep_alive  # 100 Continue
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        head, self._head = self._head, None
        if head is not None:
            self._cycle.transport = self._transport
            if not self._transport.is_closing():
                self._transport.write(head)
