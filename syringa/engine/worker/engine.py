"""What a worker's server needs of the engine that it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from syringa.errors import InvalidRequest, SyringaError
from syringa.types import EmbeddingRequest, EmbeddingResult, EngineDelta, EngineRequest, EngineStats

RecordRunning = Callable[[Iterable[bytes]], None]
"""Receives the fingerprints of the requests that the engine computes, before it does."""


class WorkerEngine(Protocol):
    """An engine that advances in steps. All of it runs in the thread of the server."""

    @property
    def next_step_delay(self) -> float | None:
        """Seconds that may pass before the next step if nothing arrives; None: any number."""
        ...

    @property
    def preparing(self) -> Iterable[bytes]:
        """The fingerprints of the requests that are worked on while no step runs."""
        ...

    def attach(self, wake: Callable[[], None], record_running: RecordRunning) -> None:
        """Connect the engine to its server. `wake` lets the server call `step`; callable from any thread."""
        ...

    def submit(self, request: EngineRequest, client_id: int = 0) -> None:
        """Accept a request, whose deltas will carry `client_id`. Raises `EngineOverloaded` or `InvalidRequest`."""
        ...

    def embed(self, request: EmbeddingRequest, client_id: int = 0) -> None:
        """Accept a request, whose result will carry `client_id`. Raises `EngineOverloaded` or `InvalidRequest`."""
        ...

    def abort(self, request_id: str, choice: int | None = None, client_id: int = 0) -> None:
        """Drop a request, or one choice of it, which gets no further delta."""
        ...

    def abort_all(self, client_id: int) -> None:
        """Drop all requests of a client that has disconnected."""
        ...

    def step(self) -> list[tuple[int, EngineDelta]]:
        """Advance, and return the deltas to send, each with the id of its client."""
        ...

    def take_embedded(self) -> list[tuple[int, EmbeddingResult]]:
        """Return, once, the results of `embed` that are complete, each with the id of its client."""
        ...

    def take_refused(self) -> list[tuple[int, str, SyringaError]]:
        """Return, once, the requests that `submit` accepted and that will not run: (client id, request id, error)."""
        ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class InterruptibleEngine(Protocol):
    """An engine whose steps of background requests may be given up for a request that arrives."""

    def interrupt_when(self, is_interrupted: Callable[[], bool]) -> None:
        """Give such a step up if `is_interrupted`, which is called in the middle of it."""
        ...


class GeneratingEngine:
    """The part of a `WorkerEngine` that is the same in all that generate text: they embed nothing."""

    def embed(self, request: EmbeddingRequest, client_id: int = 0) -> None:
        raise InvalidRequest("This model generates text: it computes no embeddings and no scores.")

    def take_embedded(self) -> list[tuple[int, EmbeddingResult]]:
        return []
