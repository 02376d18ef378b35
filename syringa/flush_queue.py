"""Output batching: collect flushes during one iteration of the event loop and run them together at its end.

A step of the engine produces tokens for many streams at once. Formatting all of them before the first socket write
keeps the work in the processor's caches and lets the worker start its next step undisturbed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

Flush = Callable[[], None]


class FlushQueue:
    """The flushes that are due at the end of the current event loop iteration.

    Inside `with queue:` they run when the block ends: the reader of an engine step knows that nothing more will come
    of it, so the event loop does not have to go round once more.
    """

    __slots__ = ("_flushes", "batching", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.batching = False
        self._flushes: list[Flush] = []

    def schedule(self, flush: Flush) -> None:
        """Call `flush` once, at the end of the iteration or of the enclosing `with` block."""
        self._flushes.append(flush)
        if len(self._flushes) == 1 and not self.batching:
            self.loop.call_soon(self.run)

    def run(self) -> None:
        """Run what is due. A flush that fails is reported to the event loop and does not stop the others."""
        flushes, self._flushes = self._flushes, []
        for flush in flushes:
            try:
                flush()
            except Exception as error:
                self.loop.call_exception_handler({"message": "a scheduled flush failed", "exception": error})

    def __enter__(self) -> None:
        self.batching = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.batching = False
        if self._flushes:
            self.run()


_current: FlushQueue | None = None  # of the running event loop; a process has one


def flush_queue() -> FlushQueue:
    """Return the queue of the running event loop."""
    global _current
    loop = asyncio.get_running_loop()
    if _current is None or _current.loop is not loop:
        _current = FlushQueue(loop)
    return _current
