"""What the rest of Syringa knows of an engine: submit, abort, stats, close. Nobody may assume which one it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from syringa.types import EngineDelta, EngineRequest, EngineStats, ModelInfo

Take = Callable[[EngineDelta], bool]
"""Takes a delta the moment it is there, and says whether it was the last one that is wanted. What it raises ends the
request. It is called from the event loop, outside of any task: a task that wakes for each token of each stream would
cost more than what is done with the token.

It may have an attribute `hear`, which takes the `only_token` of a delta instead, and says whether it did: if not, the
delta has to be told. It is to be looked up again after each delta; None: not now."""

Hear = Callable[[int], bool]


Status = Literal["loaded", "loading", "cold", "failed"]
"""Whether a model is in memory. A cold one is loaded when somebody waits for it."""


class Engine(Protocol):
    """Turns token ids into token ids. Knows no text, no roles, no endpoints."""

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would run."""
        ...

    async def wait_ready(self) -> ModelInfo:
        """Returns once the model can answer. Raises `EngineUnavailable` if it never will."""
        ...

    async def submit(self, request: EngineRequest, take: Take) -> None:
        """Runs `request`, its choices interleaved. Returns when each has finished, or `take` wants no more.

        Being cancelled aborts what is still running, and so does an error. Raises `EngineOverloaded` when the queue is
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


class Fleet(Protocol):
    """The engines of a server's models."""

    def engine(self, model: str) -> Engine:
        """The engine of a configured model, by its id. It may not be `ready`: `wait_ready` then loads the model.
        Raises `EngineUnavailable` for a model that is no longer configured."""
        ...

    def status(self, model: str) -> Status:
        """How that model is, without waiting for anything."""
        ...


class Sole:
    """The fleet of a server with one engine, whatever its model is called."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def engine(self, model: str) -> Engine:
        return self._engine

    def status(self, model: str) -> Status:
        return "loaded" if self._engine.ready else "loading"
