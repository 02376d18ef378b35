"""Threads for grammars alone. What a client sends decides how long compiling takes, and llguidance cannot be stopped:
so nothing else waits behind it, few wait for it, and none for long."""

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
MOST_WAITING = 64
SECONDS = 10.0


class CompilePool:
    """Runs functions in threads that do not keep the process from ending."""

    def __init__(self, threads: int = THREADS, waiting: int = MOST_WAITING, seconds: float = SECONDS) -> None:
        self._jobs: queue.Queue[tuple[Future[Any], Callable[[], Any]]] = queue.Queue(waiting)
        self._threads = threads
        self._seconds = seconds
        self._started = False

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises `EngineOverloaded` if there is no room for it, or its turn did not come
        in time, and `InvalidRequest` if it takes too long itself; it may go on then, and nobody hears of it."""
        self._start()
        future: Future[T] = Future()
        try:
            self._jobs.put_nowait((future, work))
        except queue.Full:
            raise _overloaded() from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._seconds)
        except TimeoutError:
            if future.cancelled():  # before it began
                raise _overloaded() from None
            raise InvalidRequest("The grammar takes too long to compile.", code="invalid_grammar") from None

    def _start(self) -> None:
        # With the first job, in the process that runs it.
        if not self._started:
            self._started = True
            for index in range(self._threads):
                threading.Thread(target=self._work, name=f"compiling-{index}", daemon=True).start()

    def _work(self) -> None:
        while True:
            _run(*self._jobs.get())


def _run(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:  # whoever waits has to hear of it
            future.set_exception(error)


def _overloaded() -> EngineOverloaded:
    return EngineOverloaded("Too many grammars are being compiled: try again shortly.")


_pool = CompilePool()


async def run_in_compile_pool(work: Callable[[], T], param: str | None = None) -> T:
    """Runs what compiles grammars beside everything else. `param`: the field that a grammar too slow came from."""
    try:
        return await _pool.run(work)
    except InvalidRequest as error:
        if error.param is None and param is not None:
            raise InvalidRequest(error.message, param=param, code=error.code) from None
        raise
