"""Function calls in the text of a model, as events. One file per family of formats; all of them are stages like the
rest of the pipeline, with `feed` and `flush`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from syringa.output.detokenizer import Piece
from syringa.output.stages import Part
from syringa.output.tools.deepseek import DeepseekCalls, DeepseekV31Calls
from syringa.output.tools.gemma import GemmaCalls
from syringa.output.tools.hermes import HermesCalls
from syringa.output.tools.kimi import KimiCalls
from syringa.output.tools.llama3 import Llama3Calls
from syringa.output.tools.mistral import MistralArgsCalls, MistralCalls
from syringa.output.tools.tagged import TaggedCalls
from syringa.output_formats import CALL_TAGS, GEMMA_MARKS, CallFormat

Parameters = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's arguments."""


class CallParser(Protocol):
    """Takes pieces and gives back those that are text, with the calls between them.

    Tokens that wrote a call, and none of the text, come back as pieces without text, so that every token is still
    counted once and in its place.
    """

    calls: int
    """How many calls have begun."""

    def feed(self, pieces: list[Piece]) -> list[Part]: ...

    def flush(self) -> list[Part]: ...


_PARSERS: dict[CallFormat, Callable[[int, Parameters], CallParser]] = {
    "plain": HermesCalls,
    "hermes": HermesCalls,
    "llama3": Llama3Calls,
    "mistral": MistralCalls,
    "mistral-args": MistralArgsCalls,
    "deepseek": DeepseekCalls,
    "deepseek-v3.1": DeepseekV31Calls,
    "kimi": KimiCalls,
    **{name: partial(TaggedCalls, tags) for name, tags in CALL_TAGS.items()},
    **{name: partial(GemmaCalls, marks) for name, marks in GEMMA_MARKS.items()},
}


def call_parser(format: CallFormat, choice: int, parameters: Parameters) -> CallParser:
    """A new parser for one choice."""
    return _PARSERS[format](choice, parameters)
