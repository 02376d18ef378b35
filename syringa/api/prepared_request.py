"""The result of preparing a request: the generation to run, and the writer of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from syringa.api.models.served_model import ServedModel
from syringa.events import Event, GenerationRequest
from syringa.output.collect import CollectedGeneration


class OutputWriter(Protocol):
    """Writes the output of one request in the wire format of its endpoint."""

    def write(self, event: Event) -> Sequence[msgspec.Struct | msgspec.Raw]:
        """Return the chunks of a stream for one event; a `Raw` chunk is JSON already."""
        ...

    def render(self, generation: CollectedGeneration) -> msgspec.Struct:
        """Return the full body, which is the fold of the same events."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreparedRequest:
    """A validated request: what to generate, and how to write it."""

    request: GenerationRequest
    writer: OutputWriter
    model: ServedModel
    stream: bool = False
