"""Thread pool that serves tenants round-robin, so that one tenant's queue does not delay the others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from threading import Lock
from typing import TypeVar

Result = TypeVar("Result")


class FairThreadPool:
    """A pool in which a tenant has at most `per_tenant` threads at a time; None: all of them.

    Background work begins when no other work can, and has half of the threads at most: other work waits for no more
    than what is being executed.
    """

    def __init__(
        self, threads: int, name: str, *, per_tenant: int | None = None, initializer: Callable[[], object] | None = None
    ) -> None:
        """`initializer` is called by each thread at its start."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=initializer)
        self._per_tenant = threads if per_tenant is None else per_tenant
        self._most_background = max(1, threads // 2)
        self._lock = Lock()
        # By class (whether background) and tenant, the next one of a class to serve first.
        self._queues: dict[tuple[bool, str], deque[tuple[Future, Callable[[], None]]]] = {}
        self._running: Counter[tuple[bool, str]] = Counter()

    def submit(self, tenant: str, work: Callable[[], Result], *, background: bool = False) -> Future[Result]:
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
            self._queues.setdefault((background, tenant), deque()).append((future, run))
        self._pool.submit(self._run_next)
        return future

    def close(self) -> None:
        """Cancel what has not begun."""
        with self._lock:
            queues, self._queues = self._queues, {}
        self._pool.shutdown(wait=False, cancel_futures=True)
        for queue in queues.values():
            for future, _ in queue:
                future.cancel()

    def _run_next(self) -> None:
        """Run the next piece of work that may start; without one, a thread that finishes runs it later."""
        while True:
            with self._lock:
                key = next(filter(self._may_run, sorted(self._queues, key=itemgetter(0))), None)
                if key is None:
                    return
                queue = self._queues.pop(key)
                _, run = queue.popleft()
                if queue:
                    self._queues[key] = queue
                self._running[key] += 1
            run()
            with self._lock:
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]

    def _may_run(self, key: tuple[bool, str]) -> bool:
        """Return whether the next work of a class and tenant may begin."""
        background, tenant = key
        if background and sum(count for each, count in self._running.items() if each[0]) >= self._most_background:
            return False
        return self._running[False, tenant] + self._running[True, tenant] < self._per_tenant
