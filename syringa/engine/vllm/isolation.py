"""Requests that are computed alone, because they were running when a worker crashed: see `engine/scheduling/isolation`.

vLLM cannot pause requests, so one that is to be alone waits until those before it have ended, except those that were
computed alone themselves and go on; and those after it wait for it. Neither waits for longer than `MAX_SECONDS`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

from syringa.types import EngineRequest

MAX_SECONDS = 10.0


class Run(Protocol):
    """A request that vLLM computes, or will compute."""

    request: EngineRequest

    @property
    def begun(self) -> bool:
        """Whether every choice has had its first token, or has ended."""
        ...

    @property
    def ended(self) -> bool: ...


R = TypeVar("R", bound=Run)


class IsolationGate(Generic[R]):
    """Decides which requests may start."""

    def __init__(self, start: Callable[[R], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self._start, self._clock = start, clock
        self._alone: deque[R] = deque()  # to be computed alone
        self._others: deque[R] = deque()  # that arrived meanwhile
        self._current: R | None = None
        self._released: list[R] = []  # that were computed alone and go on: none waits for them
        self._until = 0.0  # when the current one, or the first of those that wait, has had its time

    @property
    def active(self) -> bool:
        return self._current is not None or bool(self._alone)

    @property
    def computes_alone(self) -> bool:
        """Whether a request is computed alone now."""
        return self._current is not None

    @property
    def waiting(self) -> Iterable[R]:
        """The requests that have not been started."""
        return (*self._alone, *self._others)

    def add(self, run: R) -> None:
        """Start a request now, or when its turn comes."""
        if run.request.isolation != "none":
            if not self.active:
                self._until = self._clock() + MAX_SECONDS
            self._alone.append(run)
        elif self.active:
            self._others.append(run)
        else:
            self._start(run)

    def advance(self, running: Iterable[R]) -> None:
        """Start what may start. `running`: the requests that were started and have not ended."""
        current, now = self._current, self._clock()
        if current is not None:
            released = current.ended or (current.begun and current.request.isolation == "start")
            if not released and now < self._until:
                return
            self._current, self._until = None, now + MAX_SECONDS
            self._released.append(current)
        self._released = [each for each in self._released if not each.ended]
        others = any(each not in self._released for each in running)
        while self._alone and self._current is None:
            if self._alone[0].ended:
                self._alone.popleft()
            elif others and now < self._until:
                return
            else:
                self._current = self._alone.popleft()
                self._until = now + MAX_SECONDS
                self._start(self._current)
        while self._others and not self.active:
            run = self._others.popleft()
            if not run.ended:
                self._start(run)
