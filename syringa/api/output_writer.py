"""Writers of an endpoint's output, and the prepared request that combines a generation with its writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from syringa.api.models.served_model import ServedModel
from syringa.events import Event, GenerationRequest
from syringa.ids import random_id
from syringa.output.collect import CollectedGeneration

_encode = msgspec.json.Encoder().encode

_PLACEHOLDER = random_id()  # random, so that it does not occur elsewhere in a chunk
_QUOTED = _encode(_PLACEHOLDER)


class OutputWriter(Protocol):
    """Writes the output of one request in the wire format of its endpoint."""

    def write(self, event: Event) -> Sequence[msgspec.Struct | msgspec.Raw]:
        """Return the chunks of a stream for one event; a `Raw` chunk is JSON already."""
        ...

    def render(self, generation: CollectedGeneration) -> msgspec.Struct:
        """Return the full body, which is the fold of the same events."""
        ...


class ToolRounds(Protocol):
    """The generations of a request, between which the server executes tools itself."""

    async def begin(self, emit: Callable[[Sequence[Event]], None]) -> GenerationRequest | None:
        """Return the first request, or None if there is nothing to generate."""
        ...

    async def next(self, emit: Callable[[Sequence[Event]], None], output_tokens: int) -> GenerationRequest | None:
        """Execute the calls of the last generation. Return the next request, or None if there is none.

        `output_tokens`: the number of output tokens so far.
        """
        ...

    def close(self) -> None:
        """Cancel what still runs."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A validated request: what to generate, and how to write it.

    With `rounds`, which feed the writer too, there may be several generations.
    """

    request: GenerationRequest
    writer: OutputWriter
    model: ServedModel
    stream: bool = False
    rounds: ToolRounds | None = None


class TextChunkEncoder:
    """Encodes the chunk that `make(choice, text)` returns. Everything around the text is encoded once per choice."""

    def __init__(self, make: Callable[[int, str], msgspec.Struct]) -> None:
        self._make = make
        self._templates: dict[int, tuple[bytes, bytes]] = {}

    def __call__(self, choice: int, text: str) -> msgspec.Raw:
        template = self._templates.get(choice)
        if template is None:
            before, after = _encode(self._make(choice, _PLACEHOLDER)).split(_QUOTED)
            template = self._templates[choice] = before, after
        return msgspec.Raw(template[0] + _encode(text) + template[1])
