"""The threads of `asyncio.to_thread` in an API process, where requests are parsed, tokenized and validated."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from syringa.fair_thread_pool import FairThreadPool
from syringa.types import in_background

THREADS = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio has by default


class RequestThreads(ThreadPoolExecutor):
    """A default executor for the event loop, in which the work for lines of batches begins after all other."""

    def __init__(self, threads: int = THREADS) -> None:
        super().__init__(threads)  # which starts none: the event loop asks for this class
        self._pool = FairThreadPool(threads, "request")

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit("", partial(work, *args, **kwargs), background=in_background.get())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel what has not begun. What runs ends by itself."""
        self._pool.close()
        super().shutdown(wait, cancel_futures=cancel_futures)
