"""What the rest of Syringa knows of an engine: submit, abort, stats, close. Nobody may assume which one it is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from syringa.types import EngineDelta, EngineRequest, EngineStats, ModelInfo


class Deltas(Protocol):
    """A request's deltas as they come. An async generator is one."""

    def __aiter__(self) -> AsyncIterator[EngineDelta]: ...

    async def __anext__(self) -> EngineDelta: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """Turns token ids into token ids. Knows no text, no roles, no endpoints."""

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would run."""
        ...

    async def wait_ready(self) -> ModelInfo:
        """Returns once the model can answer. Raises `EngineUnavailable` if it never will."""
        ...

    def submit(self, request: EngineRequest) -> Deltas:
        """The choices of `request`, interleaved, until each has finished.

        Leaving the iterator early (`aclose`) aborts what is still running. Raises `EngineOverloaded` when the queue is
        full, and `EngineUnavailable` when the engine dies: at once or in the middle.
        """
        ...

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Frees the sequence of one choice, or of all, at the next step; the others' deltas go on.

        Unknown ids are ignored: they may just have finished.
        """
        ...

    async def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Ends the engine and frees its memory."""
        ...
