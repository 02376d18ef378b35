"""Function calls in the text of a model, as events. One file per family of formats; all of them are stages like the
rest of the pipeline, with `feed` and `flush`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from syringa.events import ToolCallDelta, ToolCallStart
from syringa.output.detokenizer import Piece
from syringa.output.tools.hermes import HermesCalls

Output = Piece | ToolCallStart | ToolCallDelta


class CallParser(Protocol):
    """Takes pieces and gives back those that are text, with the calls between them.

    Tokens that wrote a call, and none of the text, come back as pieces without text, so that every token is still
    counted once and in its place.
    """

    calls: int
    """How many calls have begun."""

    def feed(self, pieces: Sequence[Piece]) -> list[Output]: ...

    def flush(self) -> list[Output]: ...


_PARSERS = {"hermes": HermesCalls}


def call_parser(name: str, choice: int) -> CallParser:
    """A new parser for one choice, by the name of its format."""
    return _PARSERS[name](choice)
