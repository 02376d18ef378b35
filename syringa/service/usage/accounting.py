"""The accounting of one request: its caller, model, tokens, times and outcome, and the usage record made of them.

Observers (usage writer, rate limiter, metrics) are called once, when the request has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from syringa.config import Prices
from syringa.errors import SyringaError
from syringa.events import GenerationStats
from syringa.service.auth.keys import Caller
from syringa.service.limits.rate_limiter import Admission
from syringa.store.records import Outcome, UsageRecord

CANCELLED = 499  # the status, in logs and usage records, of a request whose client has disconnected
_MILLION = 1_000_000
_MAX_USER_LENGTH = 512  # longer ones are cut


class RequestAccounting:
    """The accounting of one generating request, from its arrival to its end."""

    __slots__ = (
        "_began", "_closed", "_observers", "_outcome", "admission", "background", "began_at", "caller", "choices",
        "detached", "endpoint", "first_token_seconds", "load_seconds", "max_tokens", "model", "request_id", "stats",
        "status", "timeout", "total_seconds", "user",
    )  # fmt: skip

    def __init__(self, observers: Sequence[Observer], caller: Caller, endpoint: str, request_id: str) -> None:
        self._observers = observers
        self._outcome: Outcome | None = None
        self._closed = False
        self.caller, self.endpoint, self.request_id = caller, endpoint, request_id
        self.began_at = time.time()
        self._began = time.perf_counter()
        self.stats = GenerationStats()
        self.model = ""  # not known yet
        self.user: str | None = None
        self.choices, self.max_tokens = 1, 0  # for each prompt; of each choice
        self.status = 200
        self.timeout: float | None = None  # seconds, given by the client
        self.load_seconds = 0.0  # waiting for the model to be loaded
        self.first_token_seconds: float | None = None
        self.total_seconds = 0.0
        self.admission: Admission | None = None  # released when the request has ended
        self.detached = False  # whether it continues in the background after its HTTP response
        self.background = False  # whether it runs only when nothing else waits: a line of a batch

    def elapsed(self) -> float:
        """Return the seconds since the request arrived."""
        return time.perf_counter() - self._began

    @property
    def outcome(self) -> Outcome:
        return self._outcome or "ok"

    def fail(self, error: BaseException) -> None:
        """Record an error. The first outcome that is recorded counts."""
        if self._outcome is not None:
            return
        if isinstance(error, SyringaError):
            self._outcome = "refused" if error.status < 500 else "failed"
            self.status = error.status
        else:
            self._outcome, self.status = "failed", 500

    def cancel(self) -> None:
        """Record that the client has disconnected or cancelled. The first outcome that is recorded counts."""
        if self._outcome is None:
            self._outcome, self.status = "cancelled", CANCELLED

    def close(self) -> None:
        """End the request: release its admission and call the observers. Later calls do nothing.

        Called before the last bytes of the response are sent: when the client has them, the usage record is in the
        journal.
        """
        if self._closed:
            return
        self._closed = True
        if self.admission is not None:
            self.admission.release()
        self._outcome = self.outcome  # not changed by what happens afterwards
        now = time.perf_counter()
        self.total_seconds = now - self._began
        if self.stats.first_token_at is not None:
            self.first_token_seconds = self.stats.first_token_at - self._began
        for observe in self._observers:
            observe(self)


Observer = Callable[[RequestAccounting], None]


def usage_record(accounting: RequestAccounting, prices: Prices) -> UsageRecord:
    """Return the usage record of a request that has ended."""
    stats = accounting.stats
    return UsageRecord(
        at=accounting.began_at,
        organization=accounting.caller.organization,
        key=accounting.caller.key,
        model=accounting.model,
        endpoint=accounting.endpoint,
        user=None if accounting.user is None else accounting.user[:_MAX_USER_LENGTH],
        request_id=accounting.request_id,
        outcome=accounting.outcome,
        status=accounting.status,
        input_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        output_tokens=stats.completion_tokens,
        reasoning_tokens=stats.reasoning_tokens,
        queue_seconds=stats.queue_seconds,
        load_seconds=accounting.load_seconds,
        first_token_seconds=accounting.first_token_seconds,
        total_seconds=accounting.total_seconds,
        cost=cost(prices, stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens),
    )


def cost(prices: Prices, input: int, cached: int, output: int) -> float:
    """Return the price of tokens. `cached` tokens are part of the `input` tokens."""
    cached_price = prices.input if prices.cached_input is None else prices.cached_input
    return ((input - cached) * prices.input + cached * cached_price + output * prices.output) / _MILLION
