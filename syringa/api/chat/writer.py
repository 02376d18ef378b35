"""A generation in the shape of OpenAI's `chat.completion`: chunk by chunk, or whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.annotations import says
from syringa.api.fields.tools import ToolCall, call_body, call_chunk, finish_reason
from syringa.api.fields.usage import UsageBody, usage_body
from syringa.api.models.served_model import ServedModel
from syringa.api.text_chunks import TextChunks
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
from syringa.output.collect import CollectedChoice, Generation

_REASONS = ["stop", "length", "tool_calls"]


class TopLogprob(msgspec.Struct):
    token: Annotated[str, says("Its text; bytes that are no whole character are spelt out.")]
    logprob: float
    bytes: Annotated[list[int] | None, says("Null for a token that marks structure and has no text.")]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, says("`assistant`.", const="assistant")] = "assistant"
    content: Annotated[str | None, says("Null where there are only calls.")]
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], says("Empty where there is none.")]
    reasoning: Annotated[str | UnsetType, says("What the model thought, if it did.")] = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: Annotated[ChatLogprobs | None, says("Of the tokens of `content`, where they were asked for.")]
    finish_reason: Annotated[str, says("`stop` also where the client named the function.", enum=_REASONS)]


class ChatCompletion(msgspec.Struct):
    """The whole body."""

    id: str
    object: Annotated[str, says("`chat.completion`.", const="chat.completion")]
    created: Annotated[int, says("Unix time, in seconds.")]
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    metadata: Annotated[dict[str, str] | UnsetType, says("The request's own.")] = UNSET


class ChatDelta(msgspec.Struct, kw_only=True, gc=False):
    """What is new in a message. The first of a choice has the role, the last has nothing."""

    role: Annotated[str | UnsetType, says("`assistant`.", const="assistant")] = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: Annotated[list[ToolCall] | UnsetType, says("Parts of calls, to be joined by `index`.")] = UNSET


class ChunkChoice(msgspec.Struct, gc=False):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Annotated[str | None, says("Null before the choice's last chunk.", enum=[*_REASONS, None])] = None


class ChatChunk(msgspec.Struct, gc=False):
    """A part of a stream."""

    id: str
    object: Annotated[str, says("`chat.completion.chunk`.", const="chat.completion.chunk")]
    created: Annotated[int, says("Unix time, in seconds.")]
    model: str
    choices: Annotated[list[ChunkChoice], says("Empty in the chunk that carries the usage.")]
    usage: Annotated[
        UsageBody | UnsetType | None, says("Only with `include_usage`: in the last chunk, null before.")
    ] = UNSET


class ChatWriter:
    """Holds what the answer repeats of the request, and which choices have begun."""

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
        self._begun: set[int] = set()
        self._text = TextChunks(
            lambda choice, text: self._chunk([ChunkChoice(choice, ChatDelta(content=text))], self._no_usage)
        )

    def write(self, event: Event) -> Sequence[ChatChunk | msgspec.Raw]:
        """The chunks that one event becomes."""
        if isinstance(event, TextDelta):
            if not event.tokens and event.choice in self._begun:
                return (self._text(event.choice, event.text),)
            logprobs = self._scores(event.tokens) if event.tokens else None
            return self._chunks(ChunkChoice(event.choice, ChatDelta(content=event.text), logprobs))
        if isinstance(event, ReasoningDelta):
            return self._chunks(ChunkChoice(event.choice, ChatDelta(reasoning=event.text)))
        if isinstance(event, ToolCallStart | ToolCallDelta):
            return self._chunks(ChunkChoice(event.choice, ChatDelta(tool_calls=[call_chunk(event)])))
        if isinstance(event, Finished):
            reason = finish_reason(event.reason, named=self._named_tool)
            return self._chunks(ChunkChoice(event.choice, ChatDelta(), None, reason))
        if isinstance(event, PromptScored):
            return []  # chat scores no prompts
        return [self._chunk([], usage_body(event))] if self._include_usage else []

    def around_text(self) -> tuple[bytes, bytes] | None:
        return self._text.around(0) if 0 in self._begun and not self._logprobs else None

    def render(self, generation: Generation) -> ChatCompletion:
        """The whole body. The same pieces as in `write`, joined."""
        choices = [self._choice(whole) for whole in generation.choices]
        usage = usage_body(generation.usage)
        metadata = UNSET if self._metadata is None else self._metadata
        return ChatCompletion(self._id, "chat.completion", self._created, self._model.id, choices, usage, metadata)

    def _choice(self, whole: CollectedChoice) -> ChatChoice:
        message = ChatMessage(
            content=None if whole.calls and not whole.text else whole.text,
            tool_calls=[call_body(call) for call in whole.calls],
            reasoning=whole.reasoning or UNSET,
        )
        logprobs = self._scores(whole.tokens) if self._logprobs else None
        return ChatChoice(whole.index, message, logprobs, finish_reason(whole.reason, named=self._named_tool))

    def _chunks(self, choice: ChunkChoice) -> list[ChatChunk]:
        chunk = self._chunk([choice], self._no_usage)
        if choice.index in self._begun:
            return [chunk]
        self._begun.add(choice.index)
        opening = ChunkChoice(choice.index, ChatDelta(role="assistant", content=""))
        return [self._chunk([opening], self._no_usage), chunk]

    def _chunk(self, choices: list[ChunkChoice], usage: UsageBody | UnsetType | None) -> ChatChunk:
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model.id, choices, usage)

    def _scores(self, tokens: Iterable[ScoredToken]) -> ChatLogprobs:
        text, raw = self._model.token_text, self._bytes
        content = []
        for scores in (each.scores for each in tokens):
            top = [TopLogprob(text(token), logprob, raw(token)) for token, logprob in scores.top]
            content.append(TokenLogprob(text(scores.token), scores.logprob, raw(scores.token), top))
        return ChatLogprobs(content)

    def _bytes(self, token: int) -> list[int] | None:
        tokenizer = self._model.tokenizer
        # Who joins the bytes wants the text: the end token, which is scored too, is no part of it.
        return None if token in tokenizer.special_ids else list(tokenizer.token_bytes(token))
