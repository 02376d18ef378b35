"""Return freed memory to the operating system after large requests.

The C library keeps the memory that a large body took, in the heap of the thread that decoded it: requests of 30 MB left
200 MB behind in an API process of 90 MB.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from syringa.heap import trim_heap

_DELAY = 5.0  # seconds, within which a large request has been refused or its prompt is ready
_timers: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.TimerHandle] = WeakKeyDictionary()


def release_memory_soon(delay: float = _DELAY) -> None:
    """Release freed memory in a thread, `delay` seconds after the last call."""
    loop = asyncio.get_running_loop()
    if (timer := _timers.pop(loop, None)) is not None:
        timer.cancel()
    _timers[loop] = loop.call_later(delay, loop.run_in_executor, None, trim_heap)
