"""What an endpoint asks for, and the one vocabulary in which it is answered. No wire format appears here.

A generation is a stream of events: for each prompt a `PromptScored` if it was asked for, for each choice any number of
`ReasoningDelta`, `TextDelta`, `ToolCallStart` and `ToolCallDelta` and then one `Finished`, and one `Usage` at the end.
Choices are numbered prompt-major.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syringa.output_formats import ReasoningFormat, ToolCallFormat
from syringa.types import Image, SamplingParams, StopConditions, TokenLogprobs

EndReason = Literal["stop", "length", "tool_calls"]


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of a choice is to be taken apart. By default it is all answer."""

    reasoning: ReasoningFormat | None = None
    reasoning_open: bool = False  # the prompt ends inside the reasoning section
    tool_calls: ToolCallFormat | None = None
    tool_calls_only: bool = False  # under `required`: text around the calls is dropped
    tool_schemas: dict[str, dict[str, Any]] = {}  # JSON schema of each function; some formats take argument types from it


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts × choices, and how to draw and end them."""

    id: str
    prompts: list[list[int]]
    sampling: SamplingParams
    stopping: StopConditions
    choices: int = 1  # returned for each prompt
    candidates: int = 1  # drawn for each prompt; the best `choices` of them are returned
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    images: tuple[Image, ...] = ()  # in the order of their places in the one prompt
    output: OutputFormat = OutputFormat()
    grammar_param: str = "grammar"  # request field the grammar came from, named in errors
    tenant: str = ""
    user: str | None = None


class ScoredToken(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A shown token's log-probabilities and where its text begins in the choice's text."""

    scores: TokenLogprobs
    offset: int


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """More text of a choice, and the tokens whose text begins in it (only when log-probabilities were asked for)."""

    choice: int
    text: str
    tokens: list[ScoredToken] = []


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of what a choice thinks before it answers."""

    choice: int
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A choice calls a function. `call` numbers the calls of the choice from 0."""

    choice: int
    call: int
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of a call's arguments."""

    choice: int
    call: int
    arguments: str


class PromptScored(msgspec.Struct, frozen=True):
    """The log-probabilities of a prompt's own tokens; the first token has none. Comes before its choices' text."""

    prompt: int
    scores: list[TokenLogprobs | None]


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The end of a choice. `stop` is the stop string or the token that ended it. A choice that called functions and was
    not cut ends for the reason `tool_calls`."""

    choice: int
    reason: EndReason
    stop: str | int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The tokens of the whole generation. The last event."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class GenerationStats:
    """What a generation leaves behind for the books, however it ends."""

    __slots__ = (
        "cached_tokens", "completion_tokens", "cut", "first_at", "prompt_tokens", "queued", "reasoning_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = self.reasoning_tokens = 0
        self.queued = 0.0  # seconds in the engine's queue
        self.first_at: float | None = None  # when the first token came, by `time.perf_counter`
        self.cut = False  # whether a choice ended because it had as many tokens as it may

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.reasoning_tokens)


ChoiceEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | Finished
Event = ChoiceEvent | PromptScored | Usage
