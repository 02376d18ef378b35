"""The generation request of an endpoint, and the events that answer it. Independent of any wire format.

A generation is a stream of events: for each prompt a `PromptScored` if requested; for each choice any number of
`ReasoningDelta`, `TextDelta`, `ToolCallStart` and `ToolCallDelta`, then one `Finished`; and one `Usage` at the end.
If requested, `TokenIds` come before the text of the tokens, and a `Usage` of the prompt before everything else.
Choices are numbered prompt-major.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from syringa.output_formats import ReasoningFormat, ToolCallFormat
from syringa.types import Image, SamplingParams, StopConditions, TokenLogprobs

ChoiceFinishReason = Literal["stop", "length", "tool_calls"]


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the text of a choice is parsed. By default all of it is the answer."""

    reasoning: ReasoningFormat | None = None
    reasoning_open: bool = False  # the prompt ends inside the reasoning section
    tool_calls: ToolCallFormat | None = None
    tool_calls_only: bool = False  # under `required`: text around the calls is dropped
    # The JSON schema of the arguments of each function that may be called; some formats leave types to it.
    tool_schemas: dict[str, dict[str, Any]] = {}


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts × choices, and how to sample and stop them."""

    id: str
    prompts: list[list[int]]
    sampling: SamplingParams
    stopping: StopConditions
    choices: int = 1  # returned for each prompt
    candidates: int = 1  # sampled for each prompt; the best `choices` of them are returned
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # return the stop string, or the text of the token that ended a choice
    show_special: bool = False  # return the text of special tokens
    space_special: bool = False  # with a space between two in a row
    report_tokens: bool = False  # emit `TokenIds`
    report_start: bool = False  # with one prompt: emit `Usage`, without output tokens, before the first token's events
    logprobs: int | None = None
    logprob_tokens: tuple[int, ...] = ()  # whose log-probabilities are returned instead of the most likely tokens'
    prompt_logprobs: int | None = None
    # Beam search with `choices` beams and this length penalty, instead of sampling.
    beam_length_penalty: float | None = None
    images: tuple[Image, ...] = ()  # in the order of their placeholders in the prompt
    output: OutputFormat = OutputFormat()
    grammar_param: str = "grammar"  # request field the grammar came from, named in errors
    tenant: str = ""
    cache_salt: str | None = None  # separates its cached prefixes from those of the tenant's other requests
    use_cache: bool = True  # whether the prefix cache may be used for it
    stream_interval: int = 1  # tokens of a choice between two of its events
    user: str | None = None
    priority: int = 0  # among the waiting requests of the tenant; lower comes first
    background: bool = False  # runs only when nothing else waits
    waited: float = 0.0  # seconds for which it has waited for a worker


class ScoredToken(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The log-probabilities of a token, and the offset of its text in the choice's text."""

    scores: TokenLogprobs
    offset: int


class TextDelta(msgspec.Struct, frozen=True, gc=False):
    """New text of a choice, and if log-probabilities were requested, the tokens whose text starts in it."""

    choice: int
    text: str
    tokens: list[ScoredToken] = []


class TokenIds(msgspec.Struct, frozen=True, gc=False):
    """Tokens of a choice, if requested, before the events of their text. Each token is in exactly one such event."""

    choice: int
    tokens: list[int]


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """New reasoning text of a choice."""

    choice: int
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """The start of a function call. `call` is the index of the call within the choice."""

    choice: int
    call: int
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """New JSON text of a call's arguments."""

    choice: int
    call: int
    arguments: str


class PromptScored(msgspec.Struct, frozen=True):
    """The log-probabilities of a prompt's tokens, without the first token's. Precedes the text of its choices."""

    prompt: int
    scores: list[TokenLogprobs | None]


class Finished(msgspec.Struct, frozen=True, gc=False):
    """The end of a choice. `stop` is the request's stop string or stop token that ended it.

    A choice with function calls that was not truncated has the reason `tool_calls`.
    """

    choice: int
    reason: ChoiceFinishReason
    stop: str | int | None = None


class Usage(msgspec.Struct, frozen=True):
    """The token counts of the whole generation; the last event. With `report_start`, those of the prompt come first."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class GenerationStats:
    """Counts and times of a generation for usage accounting, valid however it ends."""

    __slots__ = (
        "cached_tokens", "completion_tokens", "first_token_at", "longest_choice", "prompt_tokens", "queue_seconds",
        "reasoning_tokens", "truncated",
    )  # fmt: skip

    def __init__(self) -> None:
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = self.reasoning_tokens = 0
        self.longest_choice = 0  # output tokens of the longest choice
        self.queue_seconds = 0.0  # in the engine's queue
        self.first_token_at: float | None = None  # by `time.perf_counter`
        self.truncated = False  # whether a choice ended at its token limit

    @property
    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.reasoning_tokens)


ChoiceEvent = TextDelta | ReasoningDelta | ToolCallStart | ToolCallDelta | TokenIds | Finished
Event = ChoiceEvent | PromptScored | Usage
