"""`/v1/completions`: the wire types, and the way from a body to a generation."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.common import Call, convert
from syringa.api.completions_writer import CompletionWriter
from syringa.api.model import Models, ServedModel
from syringa.api.sampling import Count, SamplingFields, check_tokens, to_sampling, to_stop, to_stopping
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.events import GenerationRequest

MAX_PROMPTS = 2048
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1},
    ]
}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions` and `POST /api/v2/completions`."""

    model: str | None = None
    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT_SCHEMA)] = None
    max_tokens: Count | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    user: str | None = None


class Prompt(msgspec.Struct):
    """One prompt; `text` is what the client sent, where it was text."""

    tokens: list[int]
    text: str | None = None


async def to_generation(body: CompletionRequest, models: Models, ignored: list[str], tenant: str = "") -> Call:
    """Checks what types alone cannot say, and tokenizes. Nothing has run when this raises."""
    model = models.find(body.model)
    choices = body.n or 1
    candidates = choices if body.best_of is None else body.best_of
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    _check(body, choices, candidates, max_tokens)
    options = convert(body.stream_options or {}, StreamOptions, path="stream_options", ignored=ignored)
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported.", param="stream_options.include_obfuscation"
        )
    stopping = to_stopping(body, model, max_tokens)
    stop = to_stop(body.stop)
    sampling = await to_sampling(body, model)
    prompts = await read_prompts(body.prompt, model)
    for index, prompt in enumerate(prompts):
        fit(prompt, model.max_model_len, max_tokens, truncate=bool(body.truncate_sequence), index=index)
    request = GenerationRequest(
        id=f"cmpl-{uuid.uuid4().hex}",
        prompts=[prompt.tokens for prompt in prompts],
        sampling=sampling,
        stopping=stopping,
        choices=choices,
        candidates=candidates,
        stop=stop,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
        tenant=tenant,
        user=body.user,
    )
    writer = CompletionWriter(
        id=request.id,
        created=int(time.time()),
        model=model,
        choices=choices,
        echo=[(prompt.tokens, prompt.text) for prompt in prompts] if body.echo else None,
        suffix=body.suffix or "",
        logprobs=body.logprobs is not None,
        include_usage=bool(options.include_usage),
    )
    return Call(request=request, writer=writer, model=model, stream=bool(body.stream))


def _check(body: CompletionRequest, choices: int, candidates: int, max_tokens: int) -> None:
    if candidates < choices:
        raise InvalidRequest(f"best_of ({candidates}) cannot be below n ({choices}).", param="best_of")
    if candidates > choices and body.stream:
        raise InvalidRequest("best_of above n cannot be streamed: the best is known at the end.", param="best_of")
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens: 0 needs echo, to score the prompt.", param="max_tokens")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    if body.tool_choice is not None and not isinstance(body.tool_choice, str | dict):
        raise InvalidRequest("tool_choice: expected a string or an object.", param="tool_choice")
    if body.tools and body.tool_choice != "none":
        raise InvalidRequest("tools are not supported yet; tool_choice: none ignores them.", param="tools")
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice asks for a tool, and there are no tools.", param="tool_choice")


async def read_prompts(given: Any, model: ServedModel) -> list[Prompt]:
    """Every form that `prompt` may have. Absent or empty, it is the token that starts a document."""
    if given is None or isinstance(given, str):
        return await _encode([given or ""], model, [given or ""])
    if not isinstance(given, list) or not given:
        raise InvalidRequest("prompt: expected a string, strings, token ids, or arrays of token ids.", param="prompt")
    if isinstance(given[0], str):
        for index, text in enumerate(given):
            if not isinstance(text, str):
                raise InvalidRequest(f"prompt[{index}]: expected a string, as before it.", param=f"prompt[{index}]")
        _check_number(given)
        return await _encode(given, model, given)
    if isinstance(given[0], list):
        _check_number(given)
        return [Prompt(_ids(tokens, f"prompt[{index}]", model)) for index, tokens in enumerate(given)]
    return [Prompt(_ids(given, "prompt", model))]


def _check_number(given: list[Any]) -> None:
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} in one request, got {len(given)}.", param="prompt")


async def _encode(texts: list[str], model: ServedModel, given: list[str]) -> list[Prompt]:
    prompts = []
    for tokens, text in zip(await model.encode_all(texts), given, strict=True):
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
    if truncate and room > 0:
        prompt.tokens = prompt.tokens[-room:]
        prompt.text = None
        return
    raise ContextLengthExceeded(
        f"The model's context is {limit} tokens; prompt {index} has {len(prompt.tokens)} and max_tokens asks for "
        f"{max_tokens} more.",
        param="prompt" if room > 0 else "max_tokens",
    )
