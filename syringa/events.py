"""What an endpoint asks for, and the one vocabulary in which it is answered. No wire format appears here.

A generation is a stream of events: for each prompt a `PromptScored` if it was asked for, for each choice any number of
`TextDelta`, `ToolCallStart` and `ToolCallDelta` and then one `Finished`, and one `Usage` at the end. Choices are
numbered prompt-major.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from syringa.types import Sampling, Stopping, TokenLogprobs

EndReason = Literal["stop", "length", "tool_calls"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts × choices, and how to draw and end them."""

    id: str
    prompts: list[list[int]]
    sampling: Sampling
    stopping: Stopping
    choices: int = 1  # returned for each prompt
    candidates: int = 1  # drawn for each prompt; the best `choices` of them are returned
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tool_format: str | None = None  # how calls are written in the text (see `output.tools`); None: it is all text
    tenant: str = ""
    user: str | None = None


class ScoredToken(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A shown token's log-probabilities and where its text begins in the choice's text."""

    scores: TokenLogprobs
    offset: int


class TextDelta(msgspec.Struct, frozen=True):
    """More text of a choice, and the tokens whose text begins in it (only when log-probabilities were asked for)."""

    choice: int
    text: str
    tokens: list[ScoredToken] = []


class ToolCallStart(msgspec.Struct, frozen=True):
    """A choice calls a function. `call` numbers the calls of the choice from 0."""

    choice: int
    call: int
    id: str
    name: str


class ToolCallDelta(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    choice: int
    call: int
    arguments: str


class PromptScored(msgspec.Struct, frozen=True):
    """The log-probabilities of a prompt's own tokens; the first token has none. Comes before its choices' text."""

    prompt: int
    scores: list[TokenLogprobs | None]


class Finished(msgspec.Struct, frozen=True):
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


Event = TextDelta | ToolCallStart | ToolCallDelta | Finished | PromptScored | Usage
ChoiceEvent = TextDelta | ToolCallStart | ToolCallDelta | Finished
