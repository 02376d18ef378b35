"""A request's entry in the books, while it is being made.

Whatever becomes of a request is observed here and nowhere else: who asked, for which model, what it cost in tokens and
time, and how it ended. When it has ended, everybody who keeps count is told once: the meter, the limits, the metrics
and the log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from syringa.errors import SyringaError
from syringa.events import Trace
from syringa.service.auth.caller import Caller

Outcome = Literal["ok", "cancelled", "refused", "failed"]
CANCELLED = 499  # the status, in logs and tables alone, of an answer that its client did not wait for


class Account:
    """One request that generates something, from its arrival to its end."""

    __slots__ = (
        "_observers", "_outcome", "_started", "began", "caller", "endpoint", "first_token_seconds", "later",
        "load_seconds", "model", "request_id", "status", "timeout", "total_seconds", "trace", "user",
    )  # fmt: skip

    def __init__(self, observers: Sequence[Observer], caller: Caller, endpoint: str, request_id: str) -> None:
        self._observers = observers
        self._outcome: Outcome | None = None
        self.caller, self.endpoint, self.request_id = caller, endpoint, request_id
        self.began = time.time()
        self._started = time.perf_counter()
        self.trace = Trace()
        self.model = ""  # none was found yet
        self.user: str | None = None
        self.status = 200
        self.timeout: float | None = None  # seconds that the client gives it
        self.load_seconds = 0.0  # that it waited for its model to be loaded
        self.first_token_seconds: float | None = None
        self.total_seconds = 0.0
        self.later = False  # whether it goes on when its HTTP request has been answered

    @property
    def outcome(self) -> Outcome:
        return self._outcome or "ok"

    def fail(self, error: BaseException) -> None:
        """It ends with an error. The first thing that is said of an end counts."""
        if self._outcome is not None:
            return
        if isinstance(error, SyringaError):
            self._outcome = "refused" if error.status < 500 else "failed"
            self.status = error.status
        else:
            self._outcome, self.status = "failed", 500

    def cancel(self) -> None:
        """It ends because nobody waits for it any more."""
        if self._outcome is None:
            self._outcome, self.status = "cancelled", CANCELLED

    def close(self) -> None:
        """The request has ended, and everybody is told. Later calls do nothing."""
        observers, self._observers = self._observers, ()
        now = time.perf_counter()
        self.total_seconds = now - self._started
        if self.trace.first_at is not None:
            self.first_token_seconds = self.trace.first_at - self._started
        for observe in observers:
            observe(self)


Observer = Callable[[Account], None]


class Books:
    """Opens an account for each request, and knows who is told of its end."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []

    def open(self, caller: Caller, endpoint: str, request_id: str) -> Account:
        return Account(self.observers, caller, endpoint, request_id)
