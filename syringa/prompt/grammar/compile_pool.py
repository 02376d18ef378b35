"""Thread pool for compiling grammars.

The time to compile a grammar depends on the client's input, and llguidance cannot be interrupted. Compilation therefore
has threads of its own, a bounded queue and a timeout.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from syringa.errors import EngineOverloaded, InvalidRequest

T = TypeVar("T")

THREADS = 2
MAX_QUEUED = 64
TIMEOUT_SECONDS = 10.0


class CompilePool:
    """A pool of daemon threads, which do not keep the process from exiting."""

    def __init__(
        self, threads: int = THREADS, max_queued: int = MAX_QUEUED, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self._jobs: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue(max_queued)
        self._threads = threads
        self._timeout_seconds = timeout_seconds
        self._started = False

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job in a thread of the pool and return its result.

        Raises `EngineOverloaded` if the queue is full or the job did not start in time, and `InvalidRequest` if it did
        not finish in time; its thread then continues, and the result is dropped.
        """
        self._start()
        future: Future[T] = Future()
        try:
            self._jobs.put_nowait((future, job))
        except queue.Full:
            raise _overloaded() from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._timeout_seconds)
        except TimeoutError:
            if future.cancelled():  # before it started
                raise _overloaded() from None
            raise InvalidRequest("The grammar takes too long to compile.", code="invalid_grammar") from None

    def _start(self) -> None:
        # Threads start with the first job, in the process that runs it.
        if not self._started:
            self._started = True
            for index in range(self._threads):
                threading.Thread(target=self._work, name=f"compile-{index}", daemon=True).start()

    def _work(self) -> None:
        while True:
            _run(*self._jobs.get())


def _run(future: Future[Any], job: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(job())
        except BaseException as error:  # reported to the waiting caller
            future.set_exception(error)


def _overloaded() -> EngineOverloaded:
    return EngineOverloaded("Too many grammars are being compiled: try again shortly.")


_pool = CompilePool()


async def run_in_compile_pool(job: Callable[[], T], param: str | None = None) -> T:
    """Run a job that compiles grammars in the pool of this process.

    `param` is the request field of the grammar, for the error if it takes too long.
    """
    try:
        return await _pool.run(job)
    except InvalidRequest as error:
        if error.param is None and param is not None:
            raise InvalidRequest(error.message, param=param, code=error.code) from None
        raise
