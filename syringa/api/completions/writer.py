"""Wire types and writer of OpenAI's `text_completion`."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Annotated

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
from syringa.output.collect import CollectedGeneration
from syringa.types import TokenLogprobs


class Logprobs(msgspec.Struct):
    """Four lists of the same length. The first token of an echoed prompt has no log-probability."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: Annotated[list[int], doc("Offset of each token in `text`, in characters.")] = []


class Choice(msgspec.Struct, gc=False):
    index: Annotated[int, doc("Index of the choice; the choices of the first prompt come first.")]
    text: str
    logprobs: Logprobs | None = None
    finish_reason: Annotated[
        str | None, doc("Null before the last chunk of the choice.", enum=["stop", "length", "tool_calls", None])
    ] = None
    tool_calls: Annotated[
        list[ToolCall] | UnsetType,
        doc("Only if `tools` were given. In a chunk: parts of tool calls, to be joined by `index`."),
    ] = UNSET
    stop_reason: Annotated[StopReasonField | UnsetType, doc("Absent before the last chunk of the choice.")] = UNSET
    token_ids: TokenIdsField = UNSET
    # In a stream, in the first chunk of the choice:
    prompt_token_ids: PromptTokenIdsField = UNSET
    prompt_token_offsets: PromptOffsetsField = UNSET
    prompt_logprobs: PromptLogprobsField = UNSET


class Completion(msgspec.Struct, gc=False):
    """The full body, and each chunk of a stream."""

    id: str
    object: Annotated[str, doc("`text_completion`.", const="text_completion")]
    created: Annotated[int, doc("Unix time in seconds.")]
    model: str
    system_fingerprint: FingerprintField
    choices: list[Choice]
    usage: Annotated[
        UsageBody | UnsetType | None, doc("In a stream only with `include_usage`: set in the last chunk, null before.")
    ] = UNSET


class CompletionWriter:
    """Writes a generation as completion chunks or as one completion."""

    def __init__(
        self,
        *,
        id: str,
        created: int,
        model: ServedModel,
        choices: int,
        echo: list[PromptEcho] | None,
        suffix: str,
        logprobs: bool,
        include_usage: bool,
        tools: bool = False,
        named_tool: bool = False,
        tokens: TokenOutput | None = None,
        counter: TokenCounter | None = None,
    ) -> None:
        """With `counter`, every chunk has the token counts so far."""
        self._id, self._created, self._model = id, created, model
        self._choices = choices
        self._echo = echo
        self._suffix = suffix
        self._logprobs = logprobs
        self._tools = tools
        self._named_tool = named_tool
        self._include_usage = include_usage
        self._no_usage: UnsetType | None = None if include_usage else UNSET
        self._started: set[int] = set()
        self._tokens = tokens or TokenOutput()
        self._token_ids: dict[int, list[int]] = {}  # of tokens without a chunk, by choice
        self._prompt_scores: dict[int, PromptLogprobs] = {}  # by prompt
        self._counter = counter
        self._plain = not logprobs and echo is None and counter is None and self._tokens == TokenOutput()
        self._text_chunk = TextChunkEncoder(lambda choice, text: self._chunk(Choice(choice, text)))

    def write(self, event: Event) -> Sequence[Completion | msgspec.Raw]:
        """Return the chunks for one event."""
        if isinstance(event, TextDelta):
            if self._plain:
                return (self._text_chunk(event.choice, event.text),)
            chunks = self._echo_chunk(event.choice)
            chunks.append(self._chunk(self._choice(event.choice, event.text, event.tokens)))
            return chunks
        if isinstance(event, Finished):
            chunks = self._echo_chunk(event.choice)
            choice = self._choice(event.choice, self._suffix, [], finish_reason(event.reason, named=self._named_tool))
            choice.stop_reason = event.stop
            chunks.append(self._chunk(choice))
            return chunks
        if isinstance(event, ToolCallStart | ToolCallDelta):
            chunks = self._echo_chunk(event.choice)
            choice = self._choice(event.choice, "", [])
            choice.tool_calls = [call_chunk(event)]
            chunks.append(self._chunk(choice))
            return chunks
        if isinstance(event, PromptScored):
            self._score(event)
            return []
        if isinstance(event, ReasoningDelta):
            return []  # completions have no reasoning
        if isinstance(event, TokenIds):
            self._add_tokens(event)
            return []
        return [self._completion([], usage_body(event))] if self._include_usage else []

    def render(self, generation: CollectedGeneration) -> Completion:
        """Return the full body."""
        for scored in generation.prompts:
            self._score(scored)
        choices = []
        for collected in generation.choices:
            reason = finish_reason(collected.reason, named=self._named_tool)
            choice = self._choice(collected.index, collected.text + self._suffix, collected.tokens, reason)
            if self._tools:
                choice.tool_calls = [call_body(call) for call in collected.calls]
            for echoed in self._echo_chunk(collected.index):
                choice = _join_choices(echoed.choices[0], choice)
            choice.stop_reason = collected.stop
            if self._tokens.token_ids:
                choice.token_ids = collected.token_ids
            self._add_prompt_fields(choice)
            choices.append(choice)
        return self._completion(choices, usage_body(generation.usage))

    def _echo_chunk(self, index: int) -> list[Completion]:
        """Return the chunk with the echoed prompt, if it was requested and not sent yet."""
        if self._echo is None or index in self._started:
            return []
        echo = self._echo[index // self._choices]
        logprobs = echo.logprobs(self._token_text) if self._logprobs else None
        return [self._chunk(Choice(index, echo.text, logprobs))]

    def _choice(self, index: int, text: str, tokens: list[ScoredToken], reason: str | None = None) -> Choice:
        shift = len(self._echo[index // self._choices].text) if self._echo is not None else 0
        logprobs = None
        if self._logprobs:
            logprobs = Logprobs([], [], [], [])
            for token in tokens:
                _append(logprobs, self._token_text, token.scores.token, token.scores, token.offset + shift)
        return Choice(index, text, logprobs, reason)

    def _token_text(self, token: int) -> str:
        return self._tokens.token_text(token, self._model)

    def _score(self, event: PromptScored) -> None:
        if self._echo is not None:
            self._echo[event.prompt].score(event.scores)
        if self._tokens.prompt_logprobs is not None:
            self._prompt_scores[event.prompt] = self._tokens.prompt_scores(event.scores, self._model)

    def _add_tokens(self, event: TokenIds) -> None:
        """Keep the tokens for the next chunk of their choice, and count them."""
        if self._tokens.token_ids:
            self._token_ids.setdefault(event.choice, []).extend(event.tokens)
        if self._counter is not None:
            self._counter.completion_tokens += len(event.tokens)

    def _add_prompt_fields(self, choice: Choice) -> None:
        prompt = choice.index // self._choices
        choice.prompt_token_ids = self._tokens.prompt_token_ids(prompt)
        choice.prompt_token_offsets = self._tokens.prompt_offsets(prompt)
        choice.prompt_logprobs = self._prompt_scores.get(prompt, UNSET)

    def _chunk(self, choice: Choice) -> Completion:
        choice.token_ids = self._token_ids.pop(choice.index, []) if self._tokens.token_ids else UNSET
        if choice.index not in self._started:
            self._started.add(choice.index)
            self._add_prompt_fields(choice)
        usage = self._no_usage if self._counter is None else self._counter.usage
        return self._completion([choice], usage)

    def _completion(self, choices: list[Choice], usage: UsageBody | UnsetType | None) -> Completion:
        fingerprint = self._model.system_fingerprint
        return Completion(self._id, "text_completion", self._created, self._model.id, fingerprint, choices, usage)


class PromptEcho:
    """A prompt to repeat before its completions. `skip` tokens before it were not part of the client's prompt."""

    def __init__(
        self, model: ServedModel, tokens: list[int], text: str | None, skip: int = 0, top: int | None = None
    ) -> None:
        """`top` is the number of alternatives to return; None: all that the engine has scored."""
        self._top = top
        self._scores: list[TokenLogprobs | None] = []
        self._model, self._tokens, self._skip = model, tokens, skip
        if text is None:
            first = 1 if len(tokens) > 1 and tokens[0] == model.bos_token else 0
            text = model.decode_tokens(tokens[first:])
        self.text = text

    def score(self, scores: list[TokenLogprobs | None]) -> None:
        """Set the log-probabilities of all tokens of the engine's prompt."""
        own = scores[self._skip : self._skip + len(self._tokens)]
        self._scores = [each and TokenLogprobs(each.token, each.logprob, each.top[: self._top]) for each in own]

    def logprobs(self, token_text: Callable[[int], str]) -> Logprobs:
        """Return the log-probabilities of the prompt with offsets in `text`."""
        ends, decoder = [0], codecs.getincrementaldecoder("utf-8")("replace")
        for token in self._tokens:
            ends.append(ends[-1] + len(decoder.decode(self._model.tokenizer.token_bytes(token))))
        # Tokens may decode to more than the text: a BOS token, or a leading space that some tokenizers add.
        extra = max(0, ends[-1] - len(self.text))
        result = Logprobs([], [], [], [])
        scores = self._scores or [None] * len(self._tokens)
        for token, score, offset in zip(self._tokens, scores, ends, strict=False):
            _append(result, token_text, token, score, max(0, offset - extra))
        return result


def _append(
    logprobs: Logprobs, text: Callable[[int], str], token: int, scores: TokenLogprobs | None, offset: int
) -> None:
    logprobs.tokens.append(text(token))
    logprobs.text_offset.append(offset)
    if scores is None:
        logprobs.token_logprobs.append(None)
        logprobs.top_logprobs.append(None)
        return
    top: dict[str, float] = {}
    for other, value in scores.top:
        top.setdefault(text(other), value)
    # OpenAI lists the sampled token too, even if it is not among the most likely ones.
    top.setdefault(text(token), scores.logprob)
    logprobs.token_logprobs.append(scores.logprob)
    logprobs.top_logprobs.append(top)


def _join_choices(first: Choice, second: Choice) -> Choice:
    logprobs = None
    if first.logprobs is not None and second.logprobs is not None:
        logprobs = Logprobs(
            first.logprobs.tokens + second.logprobs.tokens,
            first.logprobs.token_logprobs + second.logprobs.token_logprobs,
            first.logprobs.top_logprobs + second.logprobs.top_logprobs,
            first.logprobs.text_offset + second.logprobs.text_offset,
        )
    return Choice(second.index, first.text + second.text, logprobs, second.finish_reason, second.tool_calls)
