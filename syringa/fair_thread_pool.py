"""Thread pool that serves tenants round-robin, so that one tenant's queue does not delay the others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import TypeVar

Result = TypeVar("Result")


class FairThreadPool:
    """A pool in which a tenant has at most `per_tenant` threads at a time; None: all of them."""

    def __init__(self, threads: int, name: str, *, per_tenant: int | None = None) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._per_tenant = threads if per_tenant is None else per_tenant
        self._lock = Lock()
        self._queues: dict[str, deque[Callable[[], None]]] = {}  # by tenant, the next one to serve first
        self._running: Counter[str] = Counter()

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
        with self._lock:
            self._queues.clear()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_next(self) -> None:
        """Run the next piece of work that may start; without one, a thread that finishes runs it later."""
        while True:
            with self._lock:
                tenant = next((each for each in self._queues if self._running[each] < self._per_tenant), None)
                if tenant is None:
                    return
                queue = self._queues.pop(tenant)
                run = queue.popleft()
                if queue:
                    self._queues[tenant] = queue
                self._running[tenant] += 1
            run()
            with self._lock:
                self._running[tenant] -= 1
                if not self._running[tenant]:
                    del self._running[tenant]
