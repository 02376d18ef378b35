"""`/v1/completions`: the wire types, and the way from a body to a generation."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.completions.writer import CompletionWriter, Echo
from syringa.api.decoding import Call
from syringa.api.fields.annotations import nullable, says
from syringa.api.fields.constraints import compose
from syringa.api.fields.defaults import with_defaults
from syringa.api.fields.sampling import (
    Count,
    SamplingFields,
    check_tokens,
    constraint_field,
    to_sampling,
    to_stop,
    to_stopping,
)
from syringa.api.fields.stream_options import StreamOptionsField, read_stream_options
from syringa.api.fields.tools import ToolChoiceField, ToolsField, read_tools
from syringa.api.models.served_model import Models, ServedModel
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.events import GenerationRequest, OutputFormat
from syringa.ids import fresh_id
from syringa.prompt.chat.tools import preamble
from syringa.prompt.tokens.fim import FillIn, find_fill_in
from syringa.types import Sampling

MAX_PROMPTS = 2048
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = nullable(
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
    _IDS,
    {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
)


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions` and `POST /api/v2/completions`."""

    model: Annotated[
        str | None, says("An id from `/v1/models`, an alias, or `default`; absent: the default model.")
    ] = None
    prompt: Annotated[
        Any,
        says(
            "A string, strings, token ids, or arrays of token ids; absent: the document-start token.", **_PROMPT_SCHEMA
        ),
    ] = None
    max_tokens: Annotated[Count | None, says("Tokens to generate at most; 0 with `echo`, to score a text.", 16)] = None
    stream: Annotated[bool | None, says("Answer in server-sent events.", False)] = None
    stream_options: StreamOptionsField = None
    echo: Annotated[
        bool | None, says("The prompt before the completion, with its log-probabilities if `logprobs` is set.", False)
    ] = None
    suffix: Annotated[
        str | None, says("What follows: a model with tokens for it fills in the middle, others append it.")
    ] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=5)] | None, says("Log-probabilities, with this many alternatives per token.")
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=20)] | None,
        says(
            "Draw this many, at least `n`, and return the `n` best by mean log-probability; not above `n` in a stream."
        ),
    ] = None
    tools: Annotated[
        ToolsField, says("Functions that the model may call; not with `grammar`, `response_format` or `suffix`.")
    ] = None
    tool_choice: ToolChoiceField = None
    user: Annotated[str | None, says("Kept with the usage record.")] = None


class Prompt(msgspec.Struct):
    """One prompt; `text` is what the client sent, where it was text. `before` and `after` of its tokens were put around
    what the client sent."""

    tokens: list[int]
    text: str | None = None
    before: int = 0
    after: int = 0

    @property
    def own(self) -> list[int]:
        """The tokens of what the client sent."""
        return self.tokens[self.before : len(self.tokens) - self.after]


async def to_generation(body: CompletionRequest, models: Models, ignored: list[str], tenant: str = "") -> Call:
    """Checks what types alone cannot say, and tokenizes. Nothing has run when this raises."""
    model = await models.find(body.model)
    body = with_defaults(body, model)
    choices = body.n or 1
    candidates = choices if body.best_of is None else body.best_of
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    _check(body, choices, candidates, max_tokens)
    options = read_stream_options(body.stream_options, stream=bool(body.stream), ignored=ignored)
    stopping = to_stopping(body, model, max_tokens)
    stop = to_stop(body.stop)
    sampling = await to_sampling(body, model, ignored)
    tools = await read_tools(body.tools, body.tool_choice, ignored, hold=True)
    prompts = await read_prompts(body.prompt, model, truncate=bool(body.truncate_sequence))
    fill = find_fill_in(model.tokenizer) if body.suffix else None
    if tools is not None:
        _refuse_with_tools(body, sampling)
        grammar = await compose(model, tools=tools.use)
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
        (before,) = await model.encode_all([preamble(tools.use)])
        prompts = [_behind(before, prompt, model) for prompt in prompts]
    elif fill is not None and body.suffix:
        stopping = msgspec.structs.replace(stopping, end_tokens=stopping.end_tokens | fill.ends)
        suffix = await asyncio.to_thread(fill.encode_suffix, body.suffix)
        prompts = [_filled(fill, prompt, suffix) for prompt in prompts]
    for index, prompt in enumerate(prompts):
        fit(prompt, model.max_model_len, max_tokens, truncate=bool(body.truncate_sequence), index=index)
    request = GenerationRequest(
        id=fresh_id("cmpl-"),
        prompts=[prompt.tokens for prompt in prompts],
        sampling=sampling,
        stopping=stopping,
        choices=choices,
        candidates=candidates,
        stop=stop,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        output=OutputFormat(calls="plain", parameters=tools.parameters, only_calls=tools.use.mode == "required")
        if tools is not None
        else OutputFormat(),
        constraint=constraint_field(body, tools),
        tenant=tenant,
        user=body.user,
    )
    writer = CompletionWriter(
        id=request.id,
        created=int(time.time()),
        model=model,
        choices=choices,
        echo=[Echo(model, prompt.own, prompt.text, prompt.before) for prompt in prompts] if body.echo else None,
        # A filled-in middle stands alone, unless the text around it was asked for.
        suffix=body.suffix or "" if fill is None or body.echo else "",
        logprobs=body.logprobs is not None,
        include_usage=bool(options.include_usage),
        tools=bool(body.tools),
        named_tool=tools is not None and tools.named,
    )
    return Call(request=request, writer=writer, model=model, stream=bool(body.stream))


def _check(body: CompletionRequest, choices: int, candidates: int, max_tokens: int) -> None:
    if candidates < choices:
        raise InvalidRequest(f"best_of ({candidates}) cannot be below n ({choices}).", param="best_of")
    if candidates > choices and body.stream:
        raise InvalidRequest("best_of above n cannot be streamed: the best is known at the end.", param="best_of")
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens: 0 needs echo, to score the prompt.", param="max_tokens")


def _refuse_with_tools(body: CompletionRequest, sampling: Sampling) -> None:
    if sampling.grammar is not None:
        name = "grammar" if body.grammar is not None else "response_format"
        raise InvalidRequest(f"{name} and tools cannot both constrain the answer.", param=name)
    if body.suffix:
        raise InvalidRequest("suffix and tools do not go together: a call is no middle of a text.", param="suffix")


def _behind(before: list[int], prompt: Prompt, model: ServedModel) -> Prompt:
    """The prompt behind other text. What stands before every text stands before that."""
    start = model.tokenizer.encode("")
    own = prompt.tokens[len(start) :] if prompt.tokens[: len(start)] == start else prompt.tokens
    own = [] if prompt.text == "" else own
    return Prompt(before + own, prompt.text, before=len(before))


def _filled(fill: FillIn, prompt: Prompt, suffix: list[int]) -> Prompt:
    built = fill.build([] if prompt.text == "" else prompt.tokens, suffix)
    return Prompt(built.tokens, prompt.text, built.before, built.after)


async def read_prompts(given: Any, model: ServedModel, *, truncate: bool = False) -> list[Prompt]:
    """Every form that `prompt` may have. Absent or empty, it is the token that starts a document."""
    if given is None or isinstance(given, str):
        return await _encode([given or ""], model, truncate)
    if not isinstance(given, list) or not given:
        raise InvalidRequest("prompt: expected a string, strings, token ids, or arrays of token ids.", param="prompt")
    if isinstance(given[0], str):
        for index, text in enumerate(given):
            if not isinstance(text, str):
                raise InvalidRequest(f"prompt[{index}]: expected a string, as before it.", param=f"prompt[{index}]")
        _check_number(given)
        return await _encode(given, model, truncate)
    if isinstance(given[0], list):
        _check_number(given)
        return [Prompt(_ids(tokens, f"prompt[{index}]", model)) for index, tokens in enumerate(given)]
    return [Prompt(_ids(given, "prompt", model))]


def _check_number(given: list[Any]) -> None:
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} in one request, got {len(given)}.", param="prompt")


async def _encode(texts: list[str], model: ServedModel, truncate: bool) -> list[Prompt]:
    prompts = []
    for tokens, text in zip(await model.encode_all(texts, truncate=truncate), texts, strict=True):
        if not tokens:
            if model.start_token is None:
                raise InvalidRequest("prompt: this model cannot start from nothing.", param="prompt")
            tokens = [model.start_token]
        prompts.append(Prompt(tokens, text))
    return prompts


def _ids(given: Any, param: str, model: ServedModel) -> list[int]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{param}: expected an array of token ids that is not empty.", param=param)
    tokens = [int(each) if type(each) is float and each.is_integer() else each for each in given]
    for index, token in enumerate(tokens):
        if type(token) is not int:
            raise InvalidRequest(f"{param}[{index}]: expected a token id.", param=f"{param}[{index}]")
    check_tokens(tokens, model.vocab_size, param)
    return tokens


def fit(prompt: Prompt, limit: int, max_tokens: int, *, truncate: bool, index: int = 0) -> None:
    """Refuses what the context cannot hold, or keeps the newest tokens that fit beside the answer."""
    room = limit - max_tokens
    if len(prompt.tokens) <= room:
        return
    excess = len(prompt.tokens) - room
    if truncate and excess < len(prompt.own):
        del prompt.tokens[prompt.before : prompt.before + excess]
        prompt.text = None
        return
    raise ContextLengthExceeded(
        f"The model's context is {limit} tokens; prompt {index} has {len(prompt.tokens)} and max_tokens asks for "
        f"{max_tokens} more.",
        param="prompt" if room > 0 else "max_tokens",
    )
