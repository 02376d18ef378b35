"""How much an organisation and a key may ask for: requests and tokens a minute, and requests at the same time.

A request is counted in both scopes or in neither, and a refused one in neither. Tokens are known only when a request
has ended, so the limit on them refuses who has used it up, and is exceeded by at most what was running by then.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from syringa.errors import RateLimited
from syringa.service.auth.caller import Caller, Rates
from syringa.service.limits.shared_table import Windows
from syringa.service.limits.slot import Series, Slot

Headers = list[tuple[bytes, bytes]]

BUSY_SECONDS = 1.0  # nobody knows when a request that runs will end


class Admission:
    """Leave for one request to run. Whoever has it must `leave` when the request has ended, however it ended."""

    __slots__ = ("_release", "headers")

    def __init__(self, headers: Headers, release: Callable[[], None] | None) -> None:
        self.headers = headers
        self._release = release

    def leave(self) -> None:
        """Frees the place. Doing it again does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


class Limiter:
    """One for each API process."""

    def __init__(self, path: str | None = None, *, index: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        """With the `path` of a file that `create` made, limits hold over all processes that share it, each with an
        `index` of its own, from 0. `clock` must be the same one for all of them."""
        self._windows = Windows(path, index=index, clock=clock)

    @staticmethod
    def create(path: str) -> None:
        """Makes the file that processes share, before they start. Raises `OSError`."""
        Windows.create(path)

    def enter(self, caller: Caller) -> Admission:
        """Raises `RateLimited`, which says when this request would have been admitted if no other came."""
        scopes = _scopes(caller)
        if not scopes:
            return Admission([], None)
        with self._windows:
            held = [_Held(scope, slot) for scope in scopes if (slot := self._windows.find(scope.name)) is not None]
            wait, limit = max((each for one in held for each in one.waits()), default=(0.0, ""))
            if not wait:
                for one in held:
                    one.count()
            headers = _headers(held)
        if wait:
            said = f"The {limit} is reached. Try again in {math.ceil(wait)} s."
            raise RateLimited(said, retry_after=wait, headers=headers)
        busy = [one.scope.name for one in held if one.scope.rates.concurrent > 0]
        return Admission(headers, functools.partial(self._leave, busy) if busy else None)

    def charge(self, caller: Caller, tokens: int) -> None:
        """Counts the tokens of a request that has ended."""
        scopes = [scope for scope in _scopes(caller) if scope.rates.tokens_per_minute > 0]
        if not scopes or tokens <= 0 or self._windows.closed:
            return
        with self._windows:
            for scope in scopes:
                if slot := self._windows.find(scope.name):
                    slot.tokens.add(tokens)

    def close(self) -> None:
        self._windows.close()

    def _leave(self, names: list[str]) -> None:
        if self._windows.closed:  # which freed it
            return
        with self._windows:
            for name in names:
                if slot := self._windows.find(name, take=False):
                    slot.end()


class _Scope(NamedTuple):
    kind: str
    name: str
    rates: Rates


def _scopes(caller: Caller) -> list[_Scope]:
    """Those that have a limit."""
    scopes = []
    if _is_limited(caller.rates):
        scopes.append(_Scope("organisation", f"organisation:{caller.organisation}", caller.rates))
    if _is_limited(caller.key_rates):
        scopes.append(_Scope("key", f"key:{caller.key}", caller.key_rates))
    return scopes


def _is_limited(rates: Rates) -> bool:
    return rates.requests_per_minute > 0 or rates.tokens_per_minute > 0 or rates.concurrent > 0


class _Held:
    """A scope while the table is locked."""

    __slots__ = ("_slot", "requests", "scope", "tokens")

    def __init__(self, scope: _Scope, slot: Slot) -> None:
        self.scope = scope
        self._slot = slot
        self.requests = slot.requests if scope.rates.requests_per_minute > 0 else None
        self.tokens = slot.tokens if scope.rates.tokens_per_minute > 0 else None

    def waits(self) -> Iterator[tuple[float, str]]:
        """For each limit that is reached, for how many seconds, and which it is."""
        kind, rates = self.scope.kind, self.scope.rates
        if self.requests and (wait := self.requests.wait(rates.requests_per_minute)):
            yield wait, f"{kind}'s limit of {rates.requests_per_minute} requests per minute"
        if self.tokens and (wait := self.tokens.wait(rates.tokens_per_minute)):
            yield wait, f"{kind}'s limit of {rates.tokens_per_minute} tokens per minute"
        if 0 < rates.concurrent <= self._slot.running():
            yield BUSY_SECONDS, f"{kind}'s limit of {rates.concurrent} requests at the same time"

    def count(self) -> None:
        if self.requests:
            self.requests.add(1)
        if self.scope.rates.concurrent > 0:
            self._slot.begin()


def _headers(held: list[_Held]) -> Headers:
    """Of requests and of tokens, what the scope with the least left has left."""
    requests = [(one.scope.rates.requests_per_minute, one.requests) for one in held if one.requests]
    tokens = [(one.scope.rates.tokens_per_minute, one.tokens) for one in held if one.tokens]
    return [*_headers_of(b"requests", requests), *_headers_of(b"tokens", tokens)]


def _headers_of(what: bytes, counts: list[tuple[int, Series]]) -> Headers:
    if not counts:
        return []
    limit, series = min(counts, key=lambda count: count[0] - count[1].used)
    return [
        (b"x-ratelimit-limit-" + what, b"%d" % limit),
        (b"x-ratelimit-remaining-" + what, b"%d" % max(limit - series.used, 0)),
        (b"x-ratelimit-reset-" + what, duration(series.reset()).encode()),
    ]


def duration(seconds: float) -> str:
    """As OpenAI writes it in headers: `120ms`, `1s`, `7.66s`, `6m0s`. Rounded up, or it would promise too much."""
    thousandths = math.ceil(seconds * 1000)
    if 0 < thousandths < 1000:
        return f"{thousandths}ms"
    minutes, rest = divmod(thousandths, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
