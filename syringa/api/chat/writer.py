"""Wire types and writer of OpenAI's `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.common import UsageBody, usage_body
from syringa.api.fields.schema import doc
from syringa.api.fields.tools import ToolCall, call_body, call_chunk, finish_reason
from syringa.api.models.served_model import ServedModel
from syringa.api.output_writer import TextChunkEncoder
from syringa.events import (
    Event,
    Finished,
    PromptScored,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
)
from syringa.output.collect import CollectedChoice, CollectedGeneration

_REASONS = ["stop", "length", "tool_calls"]


class TopLogprob(msgspec.Struct):
    token: Annotated[str, doc("Text of the token; incomplete UTF-8 is written as `bytes:\\x…`.")]
    logprob: float
    bytes: Annotated[list[int] | None, doc("UTF-8 bytes of the token; null for a special token.")]


class TokenLogprob(TopLogprob):
    """An output token with its log-probability."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, doc("`assistant`.", const="assistant")] = "assistant"
    content: Annotated[str | None, doc("Null if there are only tool calls.")]
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], doc("Empty if the model made no calls.")]
    reasoning: Annotated[str | UnsetType, doc("Reasoning of the model, if there is any.")] = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: Annotated[ChatLogprobs | None, doc("Log-probabilities of the tokens of `content`, if requested.")]
    finish_reason: Annotated[
        str, doc("Why the output ended; `stop` also after a call that `tool_choice` named.", enum=_REASONS)
    ]


class ChatCompletion(msgspec.Struct):
    """The body of a response that is not streamed."""

    id: str
    object: Annotated[str, doc("`chat.completion`.", const="chat.completion")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    metadata: Annotated[dict[str, str] | UnsetType, doc("Metadata of the request.")] = UNSET


class ChatDelta(msgspec.Struct, kw_only=True, gc=False):
    """What a chunk adds to a message. The first of a choice has the role, the last one is empty."""

    role: Annotated[str | UnsetType, doc("`assistant`.", const="assistant")] = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: Annotated[list[ToolCall] | UnsetType, doc("Parts of tool calls, to be joined by `index`.")] = UNSET


class ChunkChoice(msgspec.Struct, gc=False):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Annotated[str | None, doc("Null before the last chunk of the choice.", enum=[*_REASONS, None])] = (
        None
    )


class ChatChunk(msgspec.Struct, gc=False):
    """A chunk of a stream."""

    id: str
    object: Annotated[str, doc("`chat.completion.chunk`.", const="chat.completion.chunk")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: str
    choices: Annotated[list[ChunkChoice], doc("Empty in the chunk with the usage.")]
    usage: Annotated[
        UsageBody | UnsetType | None, doc("Only with `include_usage`: set in the last chunk, null before.")
    ] = UNSET


class ChatWriter:
    """Writes a generation as chat chunks or as one chat completion."""

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: ServedModel,
        logprobs: bool = False,
        include_usage: bool = False,
        named_tool: bool = False,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._id, self._created, self._model = id, created, model
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._named_tool = named_tool
        self._metadata = metadata
        self._started: set[int] = set()
        self._text_chunk = TextChunkEncoder(
            lambda choice, text: self._chunk([ChunkChoice(choice, ChatDelta(content=text))], self._no_usage)
        )

    def write(self, event: Event) -> Sequence[ChatChunk | msgspec.Raw]:
        """Return the chunks for one event."""
        if isinstance(event, TextDelta):
            if not event.tokens and event.choice in self._started:
                return (self._text_chunk(event.choice, event.text),)
            logprobs = self._logprobs_of(event.tokens) if event.tokens else None
            return self._chunks(ChunkChoice(event.choice, ChatDelta(content=event.text), logprobs))
        if isinstance(event, ReasoningDelta):
            return self._chunks(ChunkChoice(event.choice, ChatDelta(reasoning=event.text)))
        if isinstance(event, ToolCallStart | ToolCallDelta):
            return self._chunks(ChunkChoice(event.choice, ChatDelta(tool_calls=[call_chunk(event)])))
        if isinstance(event, Finished):
            reason = finish_reason(event.reason, named=self._named_tool)
            return self._chunks(ChunkChoice(event.choice, ChatDelta(), None, reason))
        if isinstance(event, PromptScored):
            return []  # chat does not return prompt log-probabilities
        return [self._chunk([], usage_body(event))] if self._include_usage else []

    def render(self, generation: CollectedGeneration) -> ChatCompletion:
        """Return the full body."""
        choices = [self._choice(collected) for collected in generation.choices]
        usage = usage_body(generation.usage)
        metadata = UNSET if self._metadata is None else self._metadata
        return ChatCompletion(self._id, "chat.completion", self._created, self._model.id, choices, usage, metadata)

    def _choice(self, collected: CollectedChoice) -> ChatChoice:
        message = ChatMessage(
            content=None if collected.calls and not collected.text else collected.text,
            tool_calls=[call_body(call) for call in collected.calls],
            reasoning=collected.reasoning or UNSET,
        )
        logprobs = self._logprobs_of(collected.tokens) if self._logprobs else None
        return ChatChoice(collected.index, message, logprobs, finish_reason(collected.reason, named=self._named_tool))

    def _chunks(self, choice: ChunkChoice) -> list[ChatChunk]:
        chunk = self._chunk([choice], self._no_usage)
        if choice.index in self._started:
            return [chunk]
        self._started.add(choice.index)
        opening = ChunkChoice(choice.index, ChatDelta(role="assistant", content=""))
        return [self._chunk([opening], self._no_usage), chunk]

    def _chunk(self, choices: list[ChunkChoice], usage: UsageBody | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model.id, choices, usage)

    def _logprobs_of(self, tokens: Iterable[ScoredToken]) -> ChatLogprobs:
        text, raw = self._model.token_text, self._bytes
        content = []
        for scores in (each.scores for each in tokens):
            top = [TopLogprob(text(token), logprob, raw(token)) for token, logprob in scores.top]
            content.append(TokenLogprob(text(scores.token), scores.logprob, raw(scores.token), top))
        return ChatLogprobs(content)

    def _bytes(self, token: int) -> list[int] | None:
        tokenizer = self._model.tokenizer
        # Joined bytes have to be the text, and the end token, which is scored too, is not part of it.
        return None if token in tokenizer.special_ids else list(tokenizer.token_bytes(token))
