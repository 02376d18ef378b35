"""Wire types and writer of OpenAI's `chat.completion` and `chat.completion.chunk`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.common import FingerprintField, UsageBody, usage_body
from syringa.api.fields.schema import doc
from syringa.api.fields.token_output import (
    PromptLogprobs,
    PromptLogprobsField,
    PromptOffsetsField,
    PromptTokenIdsField,
    StopReasonField,
    TokenCounter,
    TokenIdsField,
    TokenOutput,
)
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
    TokenIds,
    ToolCallDelta,
    ToolCallStart,
)
from syringa.output.collect import CollectedChoice, CollectedGeneration

_REASONS = ["stop", "length", "tool_calls"]
PromptTextField = Annotated[
    str | UnsetType, doc("The prompt that the chat template rendered, with `return_prompt_text`.")
]


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
    annotations: Annotated[list[dict[str, Any]], doc("Always empty: the server does not search the web.")] = []
    tool_calls: Annotated[list[ToolCall], doc("Empty if the model made no calls.")]
    reasoning: Annotated[str | UnsetType, doc("Reasoning of the model, if there is any.")] = UNSET
    reasoning_content: Annotated[str | UnsetType, doc("Same as `reasoning`, under the name that others read.")] = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: Annotated[ChatLogprobs | None, doc("Log-probabilities of the tokens of `content`, if requested.")]
    finish_reason: Annotated[
        str, doc("Why the output ended; `stop` also after a call that `tool_choice` named.", enum=_REASONS)
    ]
    stop_reason: StopReasonField = None
    token_ids: TokenIdsField = UNSET


class ChatCompletion(msgspec.Struct):
    """The body of a response that is not streamed."""

    id: str
    object: Annotated[str, doc("`chat.completion`.", const="chat.completion")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: str
    system_fingerprint: FingerprintField
    choices: list[ChatChoice]
    usage: UsageBody
    metadata: Annotated[dict[str, str] | UnsetType, doc("Metadata of the request.")] = UNSET
    prompt_token_ids: PromptTokenIdsField = UNSET
    prompt_token_offsets: PromptOffsetsField = UNSET
    prompt_logprobs: PromptLogprobsField = UNSET
    prompt_text: PromptTextField = UNSET


class ChatDelta(msgspec.Struct, kw_only=True, gc=False):
    """What a chunk adds to a message. The first of a choice has the role, the last one is empty."""

    role: Annotated[str | UnsetType, doc("`assistant`.", const="assistant")] = UNSET
    content: Annotated[str | UnsetType | None, doc("Null in a first chunk with a tool call.")] = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: Annotated[str | UnsetType, doc("Same as `reasoning`, under the name that others read.")] = UNSET
    tool_calls: Annotated[list[ToolCall] | UnsetType, doc("Parts of tool calls, to be joined by `index`.")] = UNSET


class ChunkChoice(msgspec.Struct, gc=False):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Annotated[str | None, doc("Null before the last chunk of the choice.", enum=[*_REASONS, None])] = (
        None
    )
    stop_reason: StopReasonField | UnsetType = UNSET
    token_ids: TokenIdsField = UNSET


class ChatChunk(msgspec.Struct, gc=False):
    """A chunk of a stream."""

    id: str
    object: Annotated[str, doc("`chat.completion.chunk`.", const="chat.completion.chunk")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: str
    system_fingerprint: FingerprintField
    choices: Annotated[list[ChunkChoice], doc("Empty in the chunk with the usage.")]
    usage: Annotated[
        UsageBody | UnsetType | None, doc("Only with `include_usage`: set in the last chunk, null before.")
    ] = UNSET
    # In the first chunk:
    prompt_token_ids: PromptTokenIdsField = UNSET
    prompt_token_offsets: PromptOffsetsField = UNSET
    prompt_logprobs: PromptLogprobsField = UNSET
    prompt_text: PromptTextField = UNSET


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
        include_reasoning: bool = True,
        echo: str = "",
        tokens: TokenOutput | None = None,
        prompt_text: str | None = None,
        counter: TokenCounter | None = None,
    ) -> None:
        """`echo` is repeated before the content. With `counter`, every chunk has the token counts so far."""
        self._id, self._created, self._model = id, created, model
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._named_tool = named_tool
        self._metadata = metadata
        shown = model.reasoning_fields if include_reasoning else "none"
        self._shows_reasoning = shown in ("both", "reasoning")
        self._shows_reasoning_content = shown in ("both", "reasoning_content")
        self._echo = echo
        self._tokens = tokens or TokenOutput()
        self._prompt_text: str | UnsetType = UNSET if prompt_text is None else prompt_text
        self._prompt_scores: PromptLogprobs | UnsetType = UNSET
        self._counter = counter
        self._plain = counter is None and not self._tokens.token_ids
        self._token_ids: dict[int, list[int]] = {}  # of tokens without a chunk, by choice
        self._started: set[int] = set()
        self._plain_started: set[int] = set()  # choices whose next text is a chunk with nothing else
        self._text_chunk = TextChunkEncoder(
            lambda choice, text: self._chunk([ChunkChoice(choice, ChatDelta(content=text))], self._no_usage)
        )

    def write(self, event: Event) -> Sequence[ChatChunk | msgspec.Raw]:
        """Return the chunks for one event."""
        if isinstance(event, TextDelta):
            if not event.tokens and event.choice in self._plain_started:
                return (self._text_chunk(event.choice, event.text),)
            logprobs = self._logprobs_of(event.tokens) if event.tokens else None
            # The tokens of a tool call have log-probabilities, but no text.
            return self._chunks(ChunkChoice(event.choice, ChatDelta(content=event.text or UNSET), logprobs))
        if isinstance(event, ReasoningDelta):
            if not (self._shows_reasoning or self._shows_reasoning_content):
                return []
            delta = ChatDelta(
                reasoning=event.text if self._shows_reasoning else UNSET,
                reasoning_content=event.text if self._shows_reasoning_content else UNSET,
            )
            return self._chunks(ChunkChoice(event.choice, delta))
        if isinstance(event, ToolCallStart | ToolCallDelta):
            return self._chunks(ChunkChoice(event.choice, ChatDelta(tool_calls=[call_chunk(event)])))
        if isinstance(event, Finished):
            reason = finish_reason(event.reason, named=self._named_tool)
            return self._chunks(ChunkChoice(event.choice, ChatDelta(), None, reason, event.stop))
        if isinstance(event, TokenIds):
            self._add_tokens(event)
            return []
        if isinstance(event, PromptScored):
            self._prompt_scores = self._tokens.prompt_scores(event.scores, self._model)
            return []
        return [self._chunk([], usage_body(event))] if self._include_usage else []

    def render(self, generation: CollectedGeneration) -> ChatCompletion:
        """Return the full body."""
        choices = [self._choice(collected) for collected in generation.choices]
        usage = usage_body(generation.usage)
        metadata = UNSET if self._metadata is None else self._metadata
        body = ChatCompletion(
            self._id,
            "chat.completion",
            self._created,
            self._model.id,
            self._model.system_fingerprint,
            choices,
            usage,
            metadata,
        )
        for scored in generation.prompts:
            self._prompt_scores = self._tokens.prompt_scores(scored.scores, self._model)
        self._add_prompt_fields(body)
        return body

    def _choice(self, collected: CollectedChoice) -> ChatChoice:
        text = self._echo + collected.text
        message = ChatMessage(
            content=None if collected.calls and not text else text,
            tool_calls=[call_body(call) for call in collected.calls],
            reasoning=(collected.reasoning or UNSET) if self._shows_reasoning else UNSET,
            reasoning_content=(collected.reasoning or UNSET) if self._shows_reasoning_content else UNSET,
        )
        logprobs = self._logprobs_of(collected.tokens) if self._logprobs else None
        reason = finish_reason(collected.reason, named=self._named_tool)
        ids = collected.token_ids if self._tokens.token_ids else UNSET
        return ChatChoice(collected.index, message, logprobs, reason, collected.stop, ids)

    def _add_tokens(self, event: TokenIds) -> None:
        """Keep the tokens for the next chunk of their choice, and count them."""
        if self._tokens.token_ids:
            self._token_ids.setdefault(event.choice, []).extend(event.tokens)
        if self._counter is not None:
            self._counter.completion_tokens += len(event.tokens)

    def _add_prompt_fields(self, body: ChatCompletion | ChatChunk) -> None:
        body.prompt_token_ids = self._tokens.prompt_token_ids(0)
        body.prompt_token_offsets = self._tokens.prompt_offsets(0)
        body.prompt_logprobs = self._prompt_scores
        body.prompt_text = self._prompt_text

    def _chunks(self, choice: ChunkChoice) -> list[ChatChunk]:
        choice.token_ids = self._token_ids.pop(choice.index, []) if self._tokens.token_ids else UNSET
        chunks = [] if choice.index in self._started else self._opening_chunks(choice)
        chunks.append(self._chunk([choice], self._usage_so_far()))
        if not self._started:
            self._add_prompt_fields(chunks[0])
        if choice.index not in self._started:
            self._started.add(choice.index)
            if self._plain:
                self._plain_started.add(choice.index)
        return chunks

    def _opening_chunks(self, first: ChunkChoice) -> list[ChatChunk]:
        """Return the chunks before the first one of a choice.

        Like OpenAI, text begins with a chunk that has the role and an empty content, while a tool call carries the role
        itself: a client that saw content would expect text. So does reasoning, which a call may follow.
        """
        if not (self._echo or first.delta.content or first.finish_reason is not None):
            first.delta.role = "assistant"
            if first.delta.tool_calls is not UNSET:
                first.delta.content = None
            return []
        opening = [ChunkChoice(first.index, ChatDelta(role="assistant", content=""))]
        if self._echo:
            opening.append(ChunkChoice(first.index, ChatDelta(content=self._echo)))
        return [self._chunk([each], self._usage_so_far()) for each in opening]

    def _usage_so_far(self) -> UsageBody | UnsetType | None:
        return self._no_usage if self._counter is None else self._counter.usage

    def _chunk(self, choices: list[ChunkChoice], usage: UsageBody | UnsetType | None) -> ChatChunk:
        fingerprint = self._model.system_fingerprint
        return ChatChunk(self._id, "chat.completion.chunk", self._created, self._model.id, fingerprint, choices, usage)

    def _logprobs_of(self, tokens: Iterable[ScoredToken]) -> ChatLogprobs:
        raw = self._bytes
        content = []

        def text(token: int) -> str:
            return self._tokens.token_text(token, self._model)

        for scores in (each.scores for each in tokens):
            top = [TopLogprob(text(token), logprob, raw(token)) for token, logprob in scores.top]
            content.append(TokenLogprob(text(scores.token), scores.logprob, raw(scores.token), top))
        return ChatLogprobs(content)

    def _bytes(self, token: int) -> list[int] | None:
        tokenizer = self._model.tokenizer
        # Joined bytes have to be the text, and the end token, which is scored too, is not part of it.
        return None if token in tokenizer.special_ids else list(tokenizer.token_bytes(token))
