"""A thread pool whose threads go from tenant to tenant, so that one with many images does not keep the rest waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

Result = TypeVar("Result")


class FairPool:
    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = Lock()
        self._lines: dict[str, deque[Callable[[], None]]] = {}  # whose turn it is comes first

    def submit(self, tenant: str, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:  # whoever waits must hear of it, whatever it is
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            self._lines.setdefault(tenant, deque()).append(run)
        self._pool.submit(self._next)
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        with self._lock:
            tenant = next(iter(self._lines))
            line = self._lines.pop(tenant)
            run = line.popleft()
            if line:
                self._lines[tenant] = line
        run()
