"""Wire types and writers of `/api/chat` and `/api/generate`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.schema import doc
from syringa.api.models.served_model import ServedModel
from syringa.api.ollama.common import timestamp
from syringa.events import (
    Event,
    Finished,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    TokenIds,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)
from syringa.ids import random_id
from syringa.output.collect import CollectedGeneration, CollectedToolCall

_encode = msgspec.json.Encoder().encode
_TIME, _TEXT = random_id(), random_id()  # random, so that they do not occur elsewhere in a chunk

NanosecondsField = Annotated[int | UnsetType, doc("In nanoseconds; in the last line only.")]
CountField = Annotated[int | UnsetType, doc("Tokens; in the last line only.")]
DoneReasonField = Annotated[str | UnsetType, doc("In the last line only.", enum=["stop", "length", "load", "unload"])]
CreatedField = Annotated[str, doc("When the line was written, in RFC 3339.")]


class Durations(msgspec.Struct, frozen=True):
    """The durations of a request in nanoseconds: in all, waiting for the model, of the prompt and of the output."""

    total: int = 0
    load: int = 0
    prompt: int = 0
    output: int = 0


class OllamaTopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: Annotated[list[int] | UnsetType, doc("Absent for a special token.")] = UNSET


class OllamaLogprob(OllamaTopLogprob):
    top_logprobs: Annotated[list[OllamaTopLogprob] | UnsetType, doc("With `top_logprobs` only.")] = UNSET


LogprobsField = Annotated[list[OllamaLogprob] | UnsetType, doc("With `logprobs` only.")]


class OllamaFunctionCall(msgspec.Struct):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(msgspec.Struct):
    id: str
    function: OllamaFunctionCall


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, doc("`assistant`.", const="assistant")] = "assistant"
    content: str = ""
    thinking: Annotated[str | UnsetType, doc("Reasoning of the model, if there is any.")] = UNSET
    tool_calls: Annotated[list[OllamaToolCall] | UnsetType, doc("Complete calls, each in one line.")] = UNSET


class OllamaResponse(msgspec.Struct, kw_only=True):
    """What the lines of both endpoints have in common. Without streaming, there is one line."""

    model: Annotated[str, doc("The name in the request.")]
    created_at: CreatedField
    done: Annotated[bool, doc("Whether this is the last line.")] = False
    done_reason: DoneReasonField = UNSET
    logprobs: LogprobsField = UNSET
    total_duration: NanosecondsField = UNSET
    load_duration: NanosecondsField = UNSET
    prompt_eval_count: CountField = UNSET
    prompt_eval_duration: NanosecondsField = UNSET
    eval_count: CountField = UNSET
    eval_duration: NanosecondsField = UNSET


class OllamaChatResponse(OllamaResponse, kw_only=True):
    message: OllamaMessage


class OllamaGenerateResponse(OllamaResponse, kw_only=True):
    response: str = ""
    thinking: Annotated[str | UnsetType, doc("Reasoning of the model, if there is any.")] = UNSET
    context: Annotated[
        list[int] | UnsetType, doc("Tokens of the prompt and the output, for the next request; in the last line only.")
    ] = UNSET


class OllamaWriter(ABC):
    """Writes a generation as lines of JSON, or as one object."""

    def __init__(self, *, name: str, model: ServedModel) -> None:
        """`name`: of the model, in the request."""
        self.durations: Callable[[], Durations] = Durations  # set by the route, which has the clocks
        self._name, self._model = name, model
        self._reason = "stop"
        self._context: list[int] | None = None  # tokens of the prompt and the output, where they are returned
        self._call: CollectedToolCall | None = None  # which is not complete yet
        self._calls = 0
        # Everything around the time and the text is encoded once.
        head, tail = _encode(self._chunk(_TIME, _TEXT)).split(_encode(_TIME))
        self._head, self._tail = head + b'"', tail.split(_encode(_TEXT))

    @abstractmethod
    def _chunk(
        self,
        created_at: str,
        text: str = "",
        thinking: str | UnsetType = UNSET,
        calls: list[OllamaToolCall] | UnsetType = UNSET,
    ) -> OllamaResponse:
        """Return a line with new text, reasoning or calls."""

    def write(self, event: Event) -> Sequence[OllamaResponse | msgspec.Raw]:
        """Return the lines for one event."""
        if isinstance(event, TextDelta):
            if not event.tokens:
                return (self.text_chunk(event.text),)
            chunk = self._chunk(timestamp(), event.text)
            chunk.logprobs = self._logprobs(event.tokens)
            return [chunk]
        if isinstance(event, ReasoningDelta):
            return [self._chunk(timestamp(), thinking=event.text)]
        if isinstance(event, ToolCallStart):
            complete = self._take_call()
            self._call = CollectedToolCall(event.id, event.name)
            return complete
        if isinstance(event, ToolCallDelta):
            if self._call is not None:
                self._call.arguments += event.arguments
            return []
        if isinstance(event, Finished):
            self._reason = event.reason
            return self._take_call()
        if isinstance(event, Usage):
            chunk = self._chunk(timestamp())
            self._finish(chunk, event)
            return [chunk]
        if isinstance(event, TokenIds):
            self._add_tokens(event.tokens)
        return []

    def text_chunk(self, text: str) -> msgspec.Raw:
        """Return a line with a text, also an empty one."""
        before, after = self._tail
        return msgspec.Raw(b"".join((self._head, timestamp().encode(), b'"', before, _encode(text), after)))

    def render(self, generation: CollectedGeneration) -> OllamaResponse:
        """Return the whole answer in one object."""
        (choice,) = generation.choices
        self._reason = choice.reason
        self._add_tokens(choice.token_ids)
        calls = [call for each in choice.calls if (call := self._complete(each)) is not None]
        body = self._chunk(timestamp(), choice.text, choice.reasoning or UNSET, calls or UNSET)
        if choice.tokens:
            body.logprobs = self._logprobs(choice.tokens)
        self._finish(body, generation.usage)
        return body

    def _add_tokens(self, tokens: list[int]) -> None:
        if self._context is not None:
            self._context += tokens

    def _finish(self, chunk: OllamaResponse, usage: Usage) -> None:
        """Add what the last line has."""
        durations = self.durations()
        chunk.done, chunk.done_reason = True, "length" if self._reason == "length" else "stop"
        chunk.total_duration, chunk.load_duration = durations.total, durations.load
        chunk.prompt_eval_count, chunk.prompt_eval_duration = usage.prompt_tokens, durations.prompt
        chunk.eval_count, chunk.eval_duration = usage.completion_tokens, durations.output

    def _take_call(self) -> list[OllamaResponse]:
        """Return the line with the call that has just become complete, if there is one."""
        call = self._complete(self._call) if self._call is not None else None
        self._call = None
        return [] if call is None else [self._chunk(timestamp(), calls=[call])]

    def _complete(self, call: CollectedToolCall) -> OllamaToolCall | None:
        """Return a call with its arguments as an object; None if they are none, as where the output ended within."""
        try:
            arguments = msgspec.json.decode(call.arguments or "{}", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return None
        self._calls += 1
        return OllamaToolCall(call.id, OllamaFunctionCall(self._calls - 1, call.name, arguments))

    def _logprobs(self, tokens: Iterable[ScoredToken]) -> list[OllamaLogprob]:
        model = self._model
        found = []
        for scores in (each.scores for each in tokens):
            top = [OllamaTopLogprob(model.token_text(each), value, self._bytes(each)) for each, value in scores.top]
            token, value = scores.token, scores.logprob
            found.append(OllamaLogprob(model.token_text(token), value, self._bytes(token), top or UNSET))
        return found

    def _bytes(self, token: int) -> list[int] | UnsetType:
        tokenizer = self._model.tokenizer
        return UNSET if token in tokenizer.special_ids else list(tokenizer.token_bytes(token))


class OllamaChatWriter(OllamaWriter):
    def _chunk(
        self,
        created_at: str,
        text: str = "",
        thinking: str | UnsetType = UNSET,
        calls: list[OllamaToolCall] | UnsetType = UNSET,
    ) -> OllamaChatResponse:
        message = OllamaMessage(content=text, thinking=thinking, tool_calls=calls)
        return OllamaChatResponse(model=self._name, created_at=created_at, message=message)


class OllamaGenerateWriter(OllamaWriter):
    def __init__(self, *, name: str, model: ServedModel, context: list[int] | None = None) -> None:
        """`context`: the tokens of the prompt, if those of the prompt and the output are returned."""
        super().__init__(name=name, model=model)
        self._context = None if context is None else [*context]

    def _chunk(
        self,
        created_at: str,
        text: str = "",
        thinking: str | UnsetType = UNSET,
        calls: list[OllamaToolCall] | UnsetType = UNSET,
    ) -> OllamaGenerateResponse:
        return OllamaGenerateResponse(model=self._name, created_at=created_at, response=text, thinking=thinking)

    def _finish(self, chunk: OllamaResponse, usage: Usage) -> None:
        super()._finish(chunk, usage)
        assert isinstance(chunk, OllamaGenerateResponse)
        if self._context is not None:
            chunk.context = self._context
