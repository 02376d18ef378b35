"""Moving a request to another replica: what the client has received of it, and when it should move."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from syringa.engine.interface import DeltaHandler, MoveReason
from syringa.types import EngineDelta, EngineRequest, Isolation, ResumedChoice


class Moved(Exception):
    """A request was taken from its replica, to go on at another one."""

    def __init__(self, reason: MoveReason) -> None:
        super().__init__(reason)
        self.reason = reason


class RequestProgress:
    """A request and the tokens that its handler has received, from which another replica resumes it."""

    __slots__ = ("_clock", "_finished", "_first_at", "_on_delta", "_request", "_scored", "_start_length", "_tokens")

    def __init__(
        self, request: EngineRequest, on_delta: DeltaHandler, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request, self._on_delta, self._clock = request, on_delta, clock
        self._tokens: list[list[int]] = [[] for _ in range(request.choices)]
        self._finished: set[int] = set()
        self._scored = False  # whether the prompt's log-probabilities have arrived
        self._first_at: float | None = None  # of the first delta of the current replica
        self._start_length = 0  # tokens of the longest choice before that

    @property
    def begun(self) -> bool:
        """Whether any delta has arrived."""
        return bool(self._finished) or any(self._tokens)

    @property
    def resumes(self) -> bool:
        """Whether the next replica would have to continue a choice that has tokens already."""
        return any(tokens and choice not in self._finished for choice, tokens in enumerate(self._tokens))

    def handle(self, delta: EngineDelta) -> bool:
        """Record a delta and pass it to the handler."""
        if self._first_at is None:
            self._first_at = self._clock()
        self._tokens[delta.choice].extend(delta.tokens)
        if delta.finish is not None:
            self._finished.add(delta.choice)
        if delta.prompt_logprobs is not None:
            self._scored = True
        return self._on_delta(delta)

    def abort(self, choice: int | None) -> None:
        """Record that a choice, or all of them, will not be continued."""
        self._finished.update(range(self._request.choices) if choice is None else (choice,))

    def next_request(self, isolation: Isolation = "none") -> EngineRequest:
        """Return the request for the next replica, which resumes it if it has begun."""
        self._first_at, self._start_length = None, self._longest
        if not self.begun:
            return msgspec.structs.replace(self._request, isolation=isolation)
        resumed = tuple(
            ResumedChoice(list(tokens), choice in self._finished) for choice, tokens in enumerate(self._tokens)
        )
        prompt_logprobs = None if self._scored else self._request.prompt_logprobs
        return msgspec.structs.replace(
            self._request, isolation=isolation, resumed=resumed, prompt_logprobs=prompt_logprobs
        )

    def fits(self, seconds: float) -> bool:
        """Return whether the request will end within that time at its present pace, however long its output gets."""
        computed = self._longest - self._start_length
        if self._first_at is None or computed < 2:  # its pace is not known yet
            return False
        lengths = [len(tokens) for choice, tokens in enumerate(self._tokens) if choice not in self._finished]
        left = self._request.stopping.max_tokens - min(lengths, default=self._request.stopping.max_tokens)
        return left * (self._clock() - self._first_at) / (computed - 1) <= seconds

    @property
    def _longest(self) -> int:
        return max(map(len, self._tokens), default=0)
