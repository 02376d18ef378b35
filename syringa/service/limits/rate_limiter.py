"""Rate limits of organizations and keys: requests and tokens per minute, and concurrent requests.

A request is counted for its organization and for its key, or for neither if one of them refuses it. Tokens are known
only when a request has ended, so the token limit may be exceeded by what was running when it was reached.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from syringa.errors import RateLimited
from syringa.service.auth.keys import Caller, RateLimits
from syringa.service.limits.rate_slot import RateSlot, SlidingWindow
from syringa.service.limits.shared_table import SharedRateTable

Headers = list[tuple[bytes, bytes]]

CONCURRENCY_RETRY_SECONDS = 1.0  # the end of a running request cannot be predicted


class Admission:
    """Permission for one request to run. Its holder must `release` it when the request has ended."""

    __slots__ = ("_release", "headers")

    def __init__(self, headers: Headers, release: Callable[[], None] | None) -> None:
        self.headers = headers
        self._release = release

    def release(self) -> None:
        """Stop counting the request as running. Later calls do nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


class RateLimiter:
    """The rate limiter of one API process."""

    def __init__(self, path: str | None = None, *, index: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """`path`: a file made by `create`, over which limits are shared. Each process that shares it has its own
        `index`, from 0, and the same `clock`."""
        self._table = SharedRateTable(path, index=index, clock=clock)

    @staticmethod
    def create(path: str) -> None:
        """Create the file that processes share, before they start. Raises `OSError`."""
        SharedRateTable.create(path)

    def acquire(self, caller: Caller) -> Admission:
        """Count a request. Raises `RateLimited`, with the time after which it would be admitted if no other came."""
        scopes = _scopes(caller)
        if not scopes:
            return Admission([], None)
        with self._table:
            limited = [_LimitedScope(scope, slot) for scope in scopes if (slot := self._table.find(scope.name))]
            wait, limit = max((each for one in limited for each in one.waits()), default=(0.0, ""))
            if not wait:
                for one in limited:
                    one.count()
            headers = _headers(limited)
        if wait:
            message = f"The {limit} is reached. Try again in {math.ceil(wait)} s."
            raise RateLimited(message, retry_after=wait, headers=headers)
        concurrent = [one.scope.name for one in limited if one.scope.rates.concurrent > 0]
        return Admission(headers, functools.partial(self._release, concurrent) if concurrent else None)

    def charge(self, caller: Caller, tokens: int) -> None:
        """Count the tokens of a request that has ended."""
        scopes = [scope for scope in _scopes(caller) if scope.rates.tokens_per_minute > 0]
        if not scopes or tokens <= 0 or self._table.closed:
            return
        with self._table:
            for scope in scopes:
                if slot := self._table.find(scope.name):
                    slot.tokens.add(tokens)

    def close(self) -> None:
        self._table.close()

    def _release(self, names: list[str]) -> None:
        if self._table.closed:  # closing released it
            return
        with self._table:
            for name in names:
                if slot := self._table.find(name, allocate=False):
                    slot.end()


class _Scope(NamedTuple):
    kind: str
    name: str
    rates: RateLimits


def _scopes(caller: Caller) -> list[_Scope]:
    """Return the scopes of a caller that have a limit."""
    scopes = []
    if _is_limited(caller.rates):
        scopes.append(_Scope("organization", f"organization:{caller.organization}", caller.rates))
    if _is_limited(caller.key_rates):
        scopes.append(_Scope("key", f"key:{caller.key}", caller.key_rates))
    return scopes


def _is_limited(rates: RateLimits) -> bool:
    return rates.requests_per_minute > 0 or rates.tokens_per_minute > 0 or rates.concurrent > 0


class _LimitedScope:
    """A scope and its slot, while the table is locked."""

    __slots__ = ("_slot", "requests", "scope", "tokens")

    def __init__(self, scope: _Scope, slot: RateSlot) -> None:
        self.scope = scope
        self._slot = slot
        self.requests = slot.requests if scope.rates.requests_per_minute > 0 else None
        self.tokens = slot.tokens if scope.rates.tokens_per_minute > 0 else None

    def waits(self) -> Iterator[tuple[float, str]]:
        """Yield the seconds to wait and the description of each limit that is reached."""
        kind, rates = self.scope.kind, self.scope.rates
        if self.requests and (wait := self.requests.wait(rates.requests_per_minute)):
            yield wait, f"{kind}'s limit of {rates.requests_per_minute} requests per minute"
        if self.tokens and (wait := self.tokens.wait(rates.tokens_per_minute)):
            yield wait, f"{kind}'s limit of {rates.tokens_per_minute} tokens per minute"
        if 0 < rates.concurrent <= self._slot.running():
            yield CONCURRENCY_RETRY_SECONDS, f"{kind}'s limit of {rates.concurrent} requests at the same time"

    def count(self) -> None:
        if self.requests:
            self.requests.add(1)
        if self.scope.rates.concurrent > 0:
            self._slot.begin()


def _headers(scopes: list[_LimitedScope]) -> Headers:
    """Return the headers of requests and of tokens, each for the scope that has the least left."""
    requests = [(one.scope.rates.requests_per_minute, one.requests) for one in scopes if one.requests]
    tokens = [(one.scope.rates.tokens_per_minute, one.tokens) for one in scopes if one.tokens]
    return [*_headers_of(b"requests", requests), *_headers_of(b"tokens", tokens)]


def _headers_of(unit: bytes, counts: list[tuple[int, SlidingWindow]]) -> Headers:
    if not counts:
        return []
    limit, window = min(counts, key=lambda count: count[0] - count[1].used)
    return [
        (b"x-ratelimit-limit-" + unit, b"%d" % limit),
        (b"x-ratelimit-remaining-" + unit, b"%d" % max(limit - window.used, 0)),
        (b"x-ratelimit-reset-" + unit, format_duration(window.reset()).encode()),
    ]


def format_duration(seconds: float) -> str:
    """Format a duration as in OpenAI's headers: `120ms`, `1s`, `7.66s`, `6m0s`. It is rounded up."""
    milliseconds = math.ceil(seconds * 1000)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
