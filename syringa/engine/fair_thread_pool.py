"""Thread pool that serves tenants round-robin, so that one tenant's queue does not delay the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

Result = TypeVar("Result")


class FairThreadPool:
    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._lock = Lock()
        self._queues: dict[str, deque[Callable[[], None]]] = {}  # by tenant, the next one to serve first

    def submit(self, tenant: str, work: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work()
            except BaseException as error:  # the future must complete in any case
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            self._queues.setdefault(tenant, deque()).append(run)
        self._pool.submit(self._run_next)
        return future

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        with self._lock:
            tenant = next(iter(self._queues))
            queue = self._queues.pop(tenant)
            run = queue.popleft()
            if queue:
                self._queues[tenant] = queue
        run()
