"""The end of a turn of the event loop: where to do at once what many have asked for, after their work is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

Do = Callable[[], None]

BROKEN = (OSError, RuntimeError)
"""What a write to a connection that is gone raises; uvloop has the latter for a transport that has closed."""


class Sweep:
    """What is done at the end of an event loop's turn.

    Inside `with sweep`, the end is where that ends: who takes a step of the engine from a socket knows that nothing
    more will come of it, and the loop need not go round once more.
    """

    __slots__ = ("_due", "_writes", "held", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.held = False  # whether we are inside of it
        self._due: list[Do] = []
        self._writes: list[tuple[Callable[[bytes], None], bytes]] = []

    def at_end(self, do: Do) -> None:
        self._due.append(do)
        if len(self._due) == 1 and not self.held:
            self.loop.call_soon(self.end)

    def write(self, write: Callable[[bytes], None], data: bytes) -> None:
        """Writes to a connection, before all else that is due; only inside of it. One that is broken says so itself."""
        self._writes.append((write, data))

    def end(self) -> None:
        due, self._due = self._due, []
        for do in due:
            try:
                do()
            except Exception as error:
                self._tell(error)

    def _tell(self, error: Exception) -> None:
        self.loop.call_exception_handler({"message": "the end of a turn failed", "exception": error})

    def __enter__(self) -> None:
        self.held = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.held = False
        if self._writes:
            writes, self._writes = self._writes, []
            for write, data in writes:
                try:
                    write(data)
                except BROKEN:
                    pass
                except Exception as error:
                    self._tell(error)
        if self._due:
            self.end()


_sweep: Sweep | None = None  # of the loop that runs; a process has one


def this_sweep() -> Sweep:
    """That of the running loop."""
    global _sweep
    loop = asyncio.get_running_loop()
    if _sweep is None or _sweep.loop is not loop:
        _sweep = Sweep(loop)
    return _sweep
