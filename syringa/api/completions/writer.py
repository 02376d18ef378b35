"""A generation in the shape of OpenAI's `text_completion`: chunk by chunk, or whole."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
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
from syringa.output.collect import Generation
from syringa.types import TokenLogprobs


class Logprobs(msgspec.Struct):
    """Four lists of one length; the first token of an echoed prompt has no log-probability."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: Annotated[list[int], says("Where each token begins in `text`, in characters.")] = []


class Choice(msgspec.Struct, gc=False):
    index: Annotated[int, says("Prompt-major: the choices of the first prompt come first.")]
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Annotated[
        str | None, says("Null in a chunk that is not the choice's last.", enum=["stop", "length", "tool_calls", None])
    ] = None
    tool_calls: Annotated[
        list[ToolCall] | UnsetType,
        says("Only where `tools` were given. In a chunk: parts of calls, to be joined by `index`."),
    ] = UNSET


class Completion(msgspec.Struct, gc=False):
    """The whole body, and also each chunk of a stream."""

    id: str
    object: Annotated[str, says("`text_completion`.", const="text_completion")]
    created: Annotated[int, says("Unix time, in seconds.")]
    model: str
    choices: list[Choice]
    usage: Annotated[
        UsageBody | UnsetType | None, says("In a stream only with `include_usage`: in the last chunk, null before.")
    ] = UNSET


class CompletionWriter:
    """Holds what the answer repeats of the request: its echo, its suffix, and which fields were asked for."""

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: ServedModel,
        choices: int,
        echo: list[Echo] | None,
        suffix: str,
        logprobs: bool,
        include_usage: bool,
        tools: bool = False,
        named_tool: bool = False,
    ) -> None:
        self._id, self._created, self._model = id, created, model
        self._choices = choices
        self._echo = echo
        self._suffix = suffix
        self._logprobs = logprobs
        self._tools = tools
        self._named_tool = named_tool
        self._include_usage = include_usage
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._begun: set[int] = set()
        self._plain = not logprobs and echo is None
        self._text = TextChunks(lambda choice, text: self._chunk(Choice(choice, text)))

    def write(self, event: Event) -> Sequence[Completion | msgspec.Raw]:
        """The chunks that one event becomes."""
        if isinstance(event, TextDelta):
            if self._plain:
                return (self._text(event.choice, event.text),)
            chunks = self._opening(event.choice)
            chunks.append(self._chunk(self._choice(event.choice, event.text, event.tokens)))
            return chunks
        if isinstance(event, Finished):
            chunks = self._opening(event.choice)
            chunks.append(
                self._chunk(
                    self._choice(event.choice, self._suffix, [], finish_reason(event.reason, named=self._named_tool))
                )
            )
            return chunks
        if isinstance(event, ToolCallStart | ToolCallDelta):
            chunks = self._opening(event.choice)
            choice = self._choice(event.choice, "", [])
            choice.tool_calls = [call_chunk(event)]
            chunks.append(self._chunk(choice))
            return chunks
        if isinstance(event, PromptScored):
            self._score(event)
            return []
        if isinstance(event, ReasoningDelta):
            return []  # a raw prompt has no thought
        return [self._completion([], usage_body(event))] if self._include_usage else []

    def around_text(self) -> tuple[bytes, bytes] | None:
        return self._text.around(0) if self._plain else None

    def render(self, generation: Generation) -> Completion:
        """The whole body. The same pieces as in `write`, joined."""
        for scored in generation.prompts:
            self._score(scored)
        choices = []
        for whole in generation.choices:
            reason = finish_reason(whole.reason, named=self._named_tool)
            choice = self._choice(whole.index, whole.text + self._suffix, whole.tokens, reason)
            if self._tools:
                choice.tool_calls = [call_body(call) for call in whole.calls]
            for opening in self._opening(whole.index):
                choice = _join(opening.choices[0], choice)
            choices.append(choice)
        return self._completion(choices, usage_body(generation.usage))

    def _opening(self, index: int) -> list[Completion]:
        """With `echo`, the chunk that a choice's first chunk follows."""
        if self._echo is None or index in self._begun:
            return []
        self._begun.add(index)
        echo = self._echo[index // self._choices]
        return [self._chunk(Choice(index, echo.text, echo.logprobs() if self._logprobs else None))]

    def _choice(self, index: int, text: str, tokens: list[ScoredToken], reason: str | None = None) -> Choice:
        shift = len(self._echo[index // self._choices].text) if self._echo is not None else 0
        logprobs = None
        if self._logprobs:
            logprobs = Logprobs([], [], [], [])
            for token in tokens:
                _append(logprobs, self._model, token.scores.token, token.scores, token.offset + shift)
        return Choice(index, text, logprobs, reason)

    def _score(self, event: PromptScored) -> None:
        if self._echo is not None:
            self._echo[event.prompt].score(event.scores)

    def _chunk(self, choice: Choice) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model.id, [choice], self._no_usage)

    def _completion(self, choices: list[Choice], usage: UsageBody) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model.id, choices, usage)


class Echo:
    """A prompt as it stands before its completions. `before` tokens came before it that the client did not write."""

    def __init__(self, model: ServedModel, tokens: list[int], text: str | None, before: int = 0) -> None:
        self._scores: list[TokenLogprobs | None] = []
        self._model, self._tokens, self._before = model, tokens, before
        if text is None:
            first = 1 if len(tokens) > 1 and tokens[0] == model.bos_token else 0
            text = model.spell(tokens[first:])
        self.text = text

    def score(self, scores: list[TokenLogprobs | None]) -> None:
        """Takes the scores of all that the engine was given."""
        self._scores = scores[self._before : self._before + len(self._tokens)]

    def logprobs(self) -> Logprobs:
        """The prompt's tokens with their places in `text`."""
        ends, decoder = [0], codecs.getincrementaldecoder("utf-8")("replace")
        for token in self._tokens:
            ends.append(ends[-1] + len(decoder.decode(self._model.tokenizer.token_bytes(token))))
        # Tokens may spell more than the text has: a start token, or the space that some tokenizers put first.
        extra = max(0, ends[-1] - len(self.text))
        shown = Logprobs([], [], [], [])
        scores = self._scores or [None] * len(self._tokens)
        for token, score, offset in zip(self._tokens, scores, ends, strict=False):
            _append(shown, self._model, token, score, max(0, offset - extra))
        return shown


def _append(logprobs: Logprobs, model: ServedModel, token: int, scores: TokenLogprobs | None, offset: int) -> None:
    logprobs.tokens.append(model.token_text(token))
    logprobs.text_offset.append(offset)
    if scores is None:
        logprobs.token_logprobs.append(None)
        logprobs.top_logprobs.append(None)
        return
    top: dict[str, float] = {}
    for other, value in scores.top:
        top.setdefault(model.token_text(other), value)
    # OpenAI names the drawn token too, beside the best ones, whether or not it is among them.
    top.setdefault(model.token_text(token), scores.logprob)
    logprobs.token_logprobs.append(scores.logprob)
    logprobs.top_logprobs.append(top)


def _join(first: Choice, second: Choice) -> Choice:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = Logprobs(
            first.logprobs.tokens + second.logprobs.tokens,
            first.logprobs.token_logprobs + second.logprobs.token_logprobs,
            first.logprobs.top_logprobs + second.logprobs.top_logprobs,
            first.logprobs.text_offset + second.logprobs.text_offset,
        )
    return Choice(second.index, first.text + second.text, logprobs, second.finish_reason, second.tool_calls)
