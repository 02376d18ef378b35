"""`/v1/completions`: the request body, and its conversion to a generation request."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.completions.writer import CompletionWriter, PromptEcho
from syringa.api.fields.beam_search import read_beam_search
from syringa.api.fields.common import CacheSaltField, StreamOptionsField, check_choices, read_stream_options
from syringa.api.fields.compatibility import read_compatibility_fields
from syringa.api.fields.constraints import compose_grammar, constraint_name
from syringa.api.fields.defaults import apply_defaults
from syringa.api.fields.sampling import (
    MAX_COUNT,
    Count,
    check_tokens,
    constraint_field,
    read_stop,
    to_sampling,
    to_stop_conditions,
)
from syringa.api.fields.schema import doc, ignored_field, nullable
from syringa.api.fields.token_output import (
    MAX_LOGPROBS,
    TokenCounter,
    TokenFields,
    TruncationSide,
    read_token_output,
    truncate_prompt,
)
from syringa.api.fields.tools import HOSTED_TOOLS_DOC, ToolChoiceField, ToolsField, read_tools
from syringa.api.models.served_model import Models, ServedModel
from syringa.api.output_writer import PreparedRequest
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.events import GenerationRequest, OutputFormat
from syringa.ids import random_id
from syringa.prompt.chat.tools import tools_preamble
from syringa.prompt.tokens.fim import FimFormat, find_fim_format
from syringa.types import SamplingParams

MAX_PROMPTS = 2048
_INLINE_IDS = 10_000  # more are checked in a thread, so that other requests do not wait
UNLIMITED = -1  # value of `n_predict`
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = nullable(
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
    _IDS,
    {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
)


class CompletionRequest(TokenFields, kw_only=True):
    """The body of `POST /v1/completions` and `POST /api/v2/completions`."""

    model: Annotated[
        str | None, doc("Model id from `/v1/models`, an alias, or `default`. Default: the default model.")
    ] = None
    prompt: Annotated[
        Any,
        doc(
            "A string, an array of strings, an array of token ids, or an array of such arrays; at most 2048 prompts. "
            "Default: the beginning-of-sequence token.",
            **_PROMPT_SCHEMA,
        ),
    ] = None
    max_tokens: Annotated[
        Count | None,
        doc("Maximum number of output tokens; 0 requires `echo` or `prompt_logprobs` and only scores the prompt.", 16),
    ] = None
    stream: Annotated[bool | None, doc("Stream the output as server-sent events.", False)] = None
    stream_options: StreamOptionsField = None
    echo: Annotated[
        bool | None, doc("Return the prompt before the completion, with log-probabilities if `logprobs` is set.", False)
    ] = None
    suffix: Annotated[
        str | None,
        doc(
            "Text after the completion. Models with fill-in-the-middle tokens take it into account; otherwise it is "
            "appended."
        ),
    ] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        doc("Return log-probabilities, with this many most likely tokens at each position, 0 to 20."),
    ] = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=20)] | None,
        doc(
            "Generate this many candidates, at least `n`, and return the `n` with the highest mean log-probability. "
            "Cannot exceed `n` in a stream. Default: `n`."
        ),
    ] = None
    tools: Annotated[
        ToolsField,
        doc(
            "Functions that the model may call, at most 128; cannot be combined with a constraint, such as "
            f"`response_format`, or with `suffix`. {HOSTED_TOOLS_DOC}"
        ),
    ] = None
    tool_choice: ToolChoiceField = None
    add_special_tokens: Annotated[
        bool | None, doc("Add the tokenizer's special tokens, such as BOS, to prompts that are text.", True)
    ] = None
    user: Annotated[str | None, doc("End-user id, stored with the usage record.")] = None
    thinking_token_budget: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None,
        ignored_field("A raw prompt has no reasoning section; reported unless -1.", default=-1),
    ] = None
    cache_salt: CacheSaltField = None


class Prompt(msgspec.Struct):
    """One prompt. `text` is what the client sent, if it sent text.

    The first `before` and the last `after` tokens are not part of the client's prompt.
    """

    tokens: list[int]
    text: str | None = None
    before: int = 0
    after: int = 0

    @property
    def own(self) -> list[int]:
        """The tokens of the client's own prompt."""
        return self.tokens[self.before : len(self.tokens) - self.after]


async def prepare_completion(
    body: CompletionRequest, models: Models, ignored: list[str], tenant: str = "", *, always_include_usage: bool = False
) -> PreparedRequest:
    """Validate the request and tokenize its prompts.

    Raises before anything is submitted to the engine. The paths of ignored fields are appended to `ignored`.
    """
    model = await models.find(body.model)
    body = _resolve_names(read_compatibility_fields(body, ignored))
    if body.thinking_token_budget is not None and body.thinking_token_budget >= 0:
        ignored.append("thinking_token_budget")
    body = apply_defaults(body, model)
    choices = body.n or 1
    candidates = choices if body.best_of is None else body.best_of
    unlimited = body.n_predict == UNLIMITED
    max_tokens = 1 if unlimited else 16 if body.max_tokens is None else body.max_tokens
    _check_fields(body, choices, candidates, max_tokens)
    param = "prompt" if candidates == 1 else "n" if body.best_of is None else "best_of"
    check_choices(_count_prompts(body.prompt), candidates, model.max_choices, param)
    options = read_stream_options(
        body.stream_options, stream=bool(body.stream), ignored=ignored, always_include_usage=always_include_usage
    )
    # Output ends with the context in any case.
    stopping = to_stop_conditions(body, model, model.max_model_len if unlimited else max_tokens)
    stop = read_stop(body.stop)
    sampling = await to_sampling(body, model, ignored)
    tools = await read_tools(
        body.tools, body.tool_choice, ignored, constrain_arguments=True, unsupported=model.unsupported_tools
    )
    prompts = await read_prompts(
        body.prompt,
        model,
        truncate=_truncation_side(body),
        special=body.add_special_tokens is not False,
    )
    for prompt in prompts:
        kept = truncate_prompt(prompt.tokens, fields=body, model=model, max_tokens=max_tokens)
        if len(kept) < len(prompt.tokens):
            prompt.tokens, prompt.text = kept, None
    fim = find_fim_format(model.tokenizer) if body.suffix else None
    if tools is not None:
        _reject_with_tools(body, sampling)
        (preamble,) = await model.encode_all([tools_preamble(tools.use)])
        prompts = [_with_preamble(preamble, prompt, model) for prompt in prompts]
    elif fim is not None and body.suffix:
        stopping = msgspec.structs.replace(stopping, end_tokens=stopping.end_tokens | fim.end_tokens)
        suffix = await asyncio.to_thread(fim.encode_suffix, body.suffix)
        prompts = [_with_suffix(fim, prompt, suffix) for prompt in prompts]
    for index, prompt in enumerate(prompts):
        _fit(prompt, model.max_model_len, max_tokens, truncate=bool(body.truncate_sequence), index=index)
    tokens = read_token_output(
        body,
        model,
        [prompt.tokens for prompt in prompts],
        [_own_text(prompt) for prompt in prompts],
        logprobs=body.logprobs is not None,
    )
    scored = [each for each in (body.prompt_logprobs, body.logprobs if body.echo else None) if each is not None]
    grammar_field = constraint_field(body, tools)
    grammar = await compose_grammar(
        model,
        constraint=sampling.grammar,
        tools=tools.use if tools is not None else None,
        source_field=grammar_field,
        tenant=tenant,
        cache_salt=body.cache_salt,
    )
    sampling = msgspec.structs.replace(sampling, grammar=grammar)
    request = GenerationRequest(
        id=random_id("cmpl-"),
        prompts=[prompt.tokens for prompt in prompts],
        sampling=sampling,
        stopping=stopping,
        choices=choices,
        candidates=candidates,
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        space_special=bool(body.spaces_between_special_tokens),
        report_tokens=tokens.token_ids or bool(options.continuous_usage_stats),
        logprobs=body.logprobs,
        logprob_tokens=tuple(body.logprob_token_ids or ()),
        prompt_logprobs=max(scored, default=None),
        beam_length_penalty=read_beam_search(body, sampling, ignored),
        output=OutputFormat(
            tool_calls="plain", tool_schemas=tools.parameters, tool_calls_only=tools.use.mode == "required"
        )
        if tools is not None
        else OutputFormat(),
        grammar_param=grammar_field,
        tenant=tenant,
        cache_salt=body.cache_salt,
        use_cache=body.cache_prompt is not False,
        stream_interval=body.stream_interval or 1 if body.stream else 1,
        user=body.user,
        priority=body.priority or 0,
    )
    writer = CompletionWriter(
        # Not the id in the engine, which has to be unique among the requests of all clients.
        id=request.id if body.request_id is None else f"cmpl-{body.request_id}",
        created=int(time.time()),
        model=model,
        choices=choices,
        echo=[PromptEcho(model, prompt.own, prompt.text, prompt.before, body.logprobs) for prompt in prompts]
        if body.echo
        else None,
        # With fim-in-the-middle the suffix is part of the prompt, and returned only with `echo`.
        suffix=body.suffix or "" if fim is None or body.echo else "",
        logprobs=body.logprobs is not None,
        include_usage=bool(options.include_usage),
        tools=bool(body.tools),
        named_tool=tools is not None and tools.named,
        tokens=tokens,
        counter=TokenCounter(sum(len(prompt.tokens) for prompt in prompts)) if options.continuous_usage_stats else None,
    )
    return PreparedRequest(request=request, writer=writer, model=model, stream=bool(body.stream))


def _resolve_names(body: CompletionRequest) -> CompletionRequest:
    """Return the body with llama.cpp's names of fields resolved."""
    named: dict[str, Any] = {}
    if body.n_predict is not None and body.n_predict >= 0:
        named["max_tokens"] = body.n_predict
    if body.n is None and body.n_cmpl is not None:
        named["n"] = body.n_cmpl
    if body.logprobs is None and body.n_probs:
        named["logprobs"] = body.n_probs
    return msgspec.structs.replace(body, **named) if named else body


def _check_fields(body: CompletionRequest, choices: int, candidates: int, max_tokens: int) -> None:
    if candidates < choices:
        raise InvalidRequest(f"best_of ({candidates}) has to be at least n ({choices}).", param="best_of")
    if candidates > choices and body.stream:
        raise InvalidRequest("best_of above n cannot be streamed.", param="best_of")
    if max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest("max_tokens: 0 requires echo: true or prompt_logprobs.", param="max_tokens")


def _truncation_side(body: CompletionRequest) -> TruncationSide | None:
    """Return the side from which prompts that are too long are cut; None: they are refused."""
    if body.truncate_prompt_tokens is not None:
        return body.truncation_side or "left"
    return "left" if body.truncate_sequence else None


def _own_text(prompt: Prompt) -> str | None:
    """Return the client's text if it is the text of all tokens."""
    return None if prompt.before or prompt.after else prompt.text


def _reject_with_tools(body: CompletionRequest, sampling: SamplingParams) -> None:
    if sampling.grammar is not None:
        name = constraint_name(body)
        raise InvalidRequest(f"{name} and tools cannot be combined.", param=name)
    if body.suffix:
        raise InvalidRequest("suffix and tools cannot be combined.", param="suffix")


def _with_preamble(preamble: list[int], prompt: Prompt, model: ServedModel) -> Prompt:
    """Return the prompt after a preamble, which already starts with the tokenizer's special tokens."""
    start = model.tokenizer.encode("")
    own = prompt.tokens[len(start) :] if prompt.tokens[: len(start)] == start else prompt.tokens
    own = [] if prompt.text == "" else own
    return Prompt(preamble + own, prompt.text, before=len(preamble))


def _with_suffix(fim: FimFormat, prompt: Prompt, suffix: list[int]) -> Prompt:
    built = fim.build([] if prompt.text == "" else prompt.tokens, suffix)
    return Prompt(built.tokens, prompt.text, built.before, built.after)


async def read_prompts(
    given: Any, model: ServedModel, *, truncate: TruncationSide | None = None, special: bool = True
) -> list[Prompt]:
    """Validate and tokenize `prompt` in any of its forms. Absent or empty, it is the beginning-of-sequence token.

    `truncate` is the side from which texts are cut that are too long whatever their tokens are. `special` adds the
    tokenizer's special tokens to texts.
    """
    if given is None or isinstance(given, str):
        return await _encode([given or ""], model, truncate, special)
    if not isinstance(given, list) or not given:
        raise InvalidRequest(
            "prompt: expected a string, an array of strings, an array of token ids, or an array of such arrays.",
            param="prompt",
        )
    if isinstance(given[0], str | list):
        _check_number(given)
    if isinstance(given[0], str):
        for index, text in enumerate(given):
            if not isinstance(text, str):
                raise InvalidRequest(
                    f"prompt[{index}]: expected a string, like the first one.", param=f"prompt[{index}]"
                )
        return await _encode(given, model, truncate, special)
    lists = given if isinstance(given[0], list) else [given]
    if sum(len(each) for each in lists if isinstance(each, list)) <= _INLINE_IDS:
        return _read_ids(given, model)
    return await asyncio.to_thread(_read_ids, given, model)


def _read_ids(given: list[Any], model: ServedModel) -> list[Prompt]:
    if isinstance(given[0], list):
        return [Prompt(_ids(tokens, f"prompt[{index}]", model)) for index, tokens in enumerate(given)]
    return [Prompt(_ids(given, "prompt", model))]


def _count_prompts(given: Any) -> int:
    return len(given) if isinstance(given, list) and given and isinstance(given[0], str | list) else 1


def _check_number(given: list[Any]) -> None:
    if len(given) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt: at most {MAX_PROMPTS} in one request, got {len(given)}.", param="prompt")


async def _encode(texts: list[str], model: ServedModel, truncate: TruncationSide | None, special: bool) -> list[Prompt]:
    prompts = []
    encoded = await model.encode_all(texts, special=special, truncate=truncate)
    for tokens, text in zip(encoded, texts, strict=True):
        if not tokens:
            if model.start_token is None:
                raise InvalidRequest(
                    "prompt: this model has no beginning-of-sequence token and needs a prompt.", param="prompt"
                )
            tokens = [model.start_token]
        prompts.append(Prompt(tokens, text))
    return prompts


def _ids(given: Any, param: str, model: ServedModel) -> list[int]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest(f"{param}: expected a non-empty array of token ids.", param=param)
    tokens = [int(each) if type(each) is float and each.is_integer() else each for each in given]
    for index, token in enumerate(tokens):
        if type(token) is not int:
            raise InvalidRequest(f"{param}[{index}]: expected a token id.", param=f"{param}[{index}]")
    check_tokens(tokens, model.vocab_size, param)
    return tokens


def _fit(prompt: Prompt, limit: int, max_tokens: int, *, truncate: bool, index: int = 0) -> None:
    """Cut a prompt that is too long to its newest tokens if `truncate`. Raises `ContextLengthExceeded` otherwise."""
    available = limit - max_tokens
    if len(prompt.tokens) <= available:
        return
    excess = len(prompt.tokens) - available
    if truncate and excess < len(prompt.own):
        del prompt.tokens[prompt.before : prompt.before + excess]
        prompt.text = None
        return
    raise ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens; prompt {index} has {len(prompt.tokens)} and "
        f"max_tokens asks for {max_tokens} more.",
        param="prompt" if available > 0 else "max_tokens",
    )
