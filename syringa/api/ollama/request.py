"""`/api/chat` and `/api/generate`: the request bodies, and their conversion to generation requests.

A body becomes one of chat completions or completions, which are prepared as those are. `num_predict` does not make a
prompt too long: the output ends with the context.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.chat import request as chat
from syringa.api.completions import request as completions
from syringa.api.fields.sampling import check_tokens, read_stop
from syringa.api.fields.schema import doc, ignored_field, nullable
from syringa.api.fields.tools import ToolsField, read_tools
from syringa.api.models.served_model import ALL_KINDS, GENERATING, FixedModels, Models, ServedModel
from syringa.api.ollama.common import (
    KeepAliveField,
    ModelField,
    StreamField,
    check_template,
    find_model,
    rename_error,
    renamed,
)
from syringa.api.ollama.messages import (
    ImagesField,
    OllamaMessagesField,
    image_names,
    read_chat_messages,
    user_message,
)
from syringa.api.ollama.options import (
    OllamaOptions,
    OptionsField,
    max_tokens,
    read_options,
    request_fields_of,
    with_context,
)
from syringa.api.ollama.writer import OllamaChatWriter, OllamaGenerateWriter, OllamaWriter
from syringa.api.output_writer import PreparedRequest
from syringa.errors import ContextLengthExceeded, InvalidRequest, SyringaError
from syringa.events import GenerationRequest
from syringa.prompt.tokens.fim import find_fim_format
from syringa.types import ModelKind

_LEVELS = ["low", "medium", "high", "max"]
FormatField = Annotated[
    Any,
    doc(
        "`json`, or a JSON schema that the output fits. Keywords that cannot be enforced are reported as ignored.",
        **nullable({"enum": ["", "json"]}, {"type": "object"}),
    ),
]
ThinkField = Annotated[
    Any,
    doc(
        "Whether the model thinks before it answers, or how much. Refused for a model that cannot think. Default: as "
        "the model's chat template has it.",
        **nullable({"type": "boolean"}, {"enum": _LEVELS}),
    ),
]
TruncateField = Annotated[
    bool | None, doc("Drop the oldest part of a prompt that is too long; false: refuse it.", True)
]


class OllamaFields(msgspec.Struct, kw_only=True):
    """The fields of both endpoints."""

    model: ModelField
    stream: StreamField = None
    format: FormatField = None
    options: OptionsField = None
    think: ThinkField = None
    keep_alive: KeepAliveField = None
    truncate: TruncateField = None
    shift: Annotated[
        bool | None, ignored_field("The context is not shifted: output ends with it. Reported if true.", default=False)
    ] = None
    logprobs: Annotated[bool | None, doc("Return the log-probabilities of the output tokens.", False)] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        doc("Number of most likely tokens to return at each position, 0 to 20; applies with `logprobs`.", 0),
    ] = None


class OllamaChatRequest(OllamaFields, kw_only=True):
    """The body of `POST /api/chat`."""

    messages: Annotated[
        OllamaMessagesField,
        doc("The conversation. Empty or absent: load the model, or unload it with `keep_alive: 0`."),
    ] = None
    tools: Annotated[ToolsField, doc("Functions that the model may call, at most 128.")] = None

    @property
    def is_empty(self) -> bool:
        return not self.messages


class OllamaGenerateRequest(OllamaFields, kw_only=True):
    """The body of `POST /api/generate`."""

    prompt: Annotated[
        str | None,
        doc("A message of the user. Empty or absent: load the model, or unload it with `keep_alive: 0`."),
    ] = None
    suffix: Annotated[
        str | None, doc("Text after the output. Refused for a model without fill-in-the-middle tokens.")
    ] = None
    images: Annotated[ImagesField, doc("Image files in base64, for a model with vision.")] = None
    system: Annotated[str | None, doc("System message, instead of the model's own.")] = None
    template: Annotated[
        str | None,
        doc(
            "Chat template to use instead of the model's own, in Jinja; refused where the setting "
            "`request_chat_templates` does not allow it. Go templates are refused."
        ),
    ] = None
    raw: Annotated[bool | None, doc("The prompt is the whole prompt, and no chat template is applied.", False)] = None
    context: Annotated[
        list[Annotated[int, Meta(ge=0)]] | None,
        doc("The `context` of an earlier response, before the prompt. Refused for a model with vision."),
    ] = None

    @property
    def is_empty(self) -> bool:
        return not self.prompt


async def prepare_chat(
    body: OllamaChatRequest, models: Models, ignored: list[str], tenant: str = ""
) -> PreparedRequest:
    """Validate the request, render and tokenize its prompt, and fetch its images.

    Raises before anything is submitted to the engine. The paths of ignored fields are appended to `ignored`.
    """
    with _own_names(ignored) as names:
        model, options, limit = await _read(body, models, ignored)
        messages = await read_chat_messages(body.messages or [], ignored)
        names.update(image_names(messages))
        fields = _chat_fields(body, model, options)
        last = messages[-1]
        # Ollama continues a text of the assistant at the end of the conversation.
        continues = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
        request = chat.ChatRequest(
            messages=messages, tools=body.tools or None, continue_final_message=continues or None, **fields
        )
        prepared = await chat.prepare_chat(request, FixedModels([model]), ignored, tenant)
        writer = OllamaChatWriter(name=body.model, model=model)
        return _with_limits(prepared, writer, limit)


async def prepare_generate(
    body: OllamaGenerateRequest, models: Models, ignored: list[str], tenant: str = ""
) -> PreparedRequest:
    """Like `prepare_chat`, for a message of the user, a raw prompt, or a text to fill in."""
    with _own_names(ignored) as names:
        model, options, limit = await _read(body, models, ignored)
        if body.raw or body.suffix:
            prepared = await _prepare_completion(body, model, options, ignored, tenant)
            return _with_limits(prepared, OllamaGenerateWriter(name=body.model, model=model), limit)
        if body.template:
            check_template(body.template)
        context = body.context or []
        if context:
            _check_context(context, model)
            model = dataclasses.replace(model, system="", preset_messages=())  # they are part of the context
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, user_message(body.prompt or "", body.images)]
        names.update(image_names(messages, single=True))
        request = chat.ChatRequest(
            messages=messages,
            chat_template=body.template or None,
            **_chat_fields(body, model, options),
        )
        prepared = await chat.prepare_chat(request, FixedModels([model]), ignored, tenant)
        (tokens,) = prepared.request.prompts
        if context:
            tokens = _join(context, tokens, model, truncate=body.truncate is not False)
            generation = msgspec.structs.replace(prepared.request, prompts=[tokens])
            prepared = dataclasses.replace(prepared, request=generation)
        writer = OllamaGenerateWriter(name=body.model, model=model, context=None if model.supports_images else tokens)
        return _with_limits(prepared, writer, limit, report_tokens=not model.supports_images)


async def read_load_request(
    body: OllamaChatRequest | OllamaGenerateRequest, models: Models, ignored: list[str], *, unload: bool
) -> ServedModel:
    """Return the model of a request that only loads or unloads it. Its other fields are validated all the same.

    `ollama stop` sends such a request to unload a model of any kind.
    """
    with _own_names(ignored):
        model, options, _ = await _read(body, models, ignored, ALL_KINDS if unload else GENERATING)
        read_stop(options.stop)
        _format_fields(body.format)
        _check_think(body.think)
        if isinstance(body, OllamaChatRequest):
            await read_tools(body.tools, None, ignored, constrain_arguments=True)
        elif body.template:
            check_template(body.template)
        return model


async def _read(
    body: OllamaFields, models: Models, ignored: list[str], kinds: Sequence[ModelKind] = GENERATING
) -> tuple[ServedModel, OllamaOptions, int | None]:
    """Return the model with the context of the request, its options, and its maximum number of output tokens."""
    model = await find_model(lambda name: models.find(name, kinds), body.model)
    if body.shift:
        ignored.append("shift")
    options = read_options(body.options, ignored)
    return with_context(model, options, ignored), options, max_tokens(options, model)


def _chat_fields(body: OllamaFields, model: ServedModel, options: OllamaOptions) -> dict[str, Any]:
    return (
        _shared_fields(body, model, options)
        | _think_fields(body.think, body.model, model)
        | {"logprobs": body.logprobs or None, "top_logprobs": body.top_logprobs if body.logprobs else None}
    )


def _shared_fields(body: OllamaFields, model: ServedModel, options: OllamaOptions) -> dict[str, Any]:
    """Return the fields that chat completions and completions have in common."""
    fields = request_fields_of(options, model) | {
        "stream": body.stream is not False,
        "truncate_sequence": body.truncate is not False,
    }
    return fields | _format_fields(body.format)


def _format_fields(format: Any) -> dict[str, Any]:
    if isinstance(format, dict):
        return {"json_schema": format}
    if format not in (None, "", "json"):
        raise InvalidRequest("format: expected json or a JSON schema.", param="format")
    return {"response_format": {"type": "json_object"}} if format else {}


def _check_think(think: Any) -> None:
    if think is not None and not isinstance(think, bool) and think not in _LEVELS:
        raise InvalidRequest(f"think: expected true, false, {', '.join(_LEVELS[:-1])} or max.", param="think")


def _think_fields(think: Any, name: str, model: ServedModel) -> dict[str, Any]:
    _check_think(think)
    if think is None:
        return {}
    if think and model.formats.reasoning is None:
        raise InvalidRequest(f'"{name}" does not support thinking', param="think")
    if isinstance(think, str):
        return {"reasoning_effort": think}
    return {"chat_template_kwargs": {"enable_thinking": think}}


async def _prepare_completion(
    body: OllamaGenerateRequest, model: ServedModel, options: OllamaOptions, ignored: list[str], tenant: str
) -> PreparedRequest:
    kind = "raw" if body.raw else "suffix"
    for name in ("system", "template", "context", "images", "suffix"):
        if getattr(body, name) and name != kind:
            raise InvalidRequest(f"{name}: not possible with {kind}.", param=name)
    if body.suffix and find_fim_format(model.tokenizer) is None:
        raise InvalidRequest(f'"{body.model}" does not support insert', param="suffix")
    _check_think(body.think)
    if body.think is not None:
        ignored.append("think")  # a raw prompt has no reasoning section
    request = completions.CompletionRequest(
        prompt=body.prompt,
        suffix=body.suffix or None,
        n_predict=completions.UNLIMITED,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **_shared_fields(body, model, options),
    )
    return await completions.prepare_completion(request, FixedModels([model]), ignored, tenant)


def _check_context(context: list[int], model: ServedModel) -> None:
    if model.supports_images:  # images are not part of it
        raise InvalidRequest("context: not supported for a model with vision; use /api/chat.", param="context")
    check_tokens(context, model.vocab_size, "context")


def _join(context: list[int], tokens: list[int], model: ServedModel, *, truncate: bool) -> list[int]:
    """Return the tokens of a prompt after those of earlier requests, of which the newest that fit are kept."""
    own = tokens[1:] if model.bos_token is not None and tokens[:1] == [model.bos_token] else tokens
    available = model.max_model_len - 1 - len(own)
    if len(context) > available and not truncate:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens; context and prompt have "
            f"{len(context) + len(own)}.",
            param="context",
        )
    return [*context[max(0, len(context) - available) :], *own]


def _with_limits(
    prepared: PreparedRequest, writer: OllamaWriter, limit: int | None, *, report_tokens: bool = False
) -> PreparedRequest:
    """Return the request with another writer, and an output that fits in the context."""
    request: GenerationRequest = prepared.request
    available = prepared.model.max_model_len - len(request.prompts[0])
    length = available if limit is None else min(limit, available)
    stopping = request.stopping
    stopping = msgspec.structs.replace(
        stopping, max_tokens=min(length, stopping.max_tokens), min_tokens=min(length, stopping.min_tokens)
    )
    request = msgspec.structs.replace(request, stopping=stopping, report_tokens=report_tokens)
    return dataclasses.replace(prepared, request=request, writer=writer)


@contextlib.contextmanager
def _own_names(ignored: list[str]) -> Iterator[dict[str, str]]:
    """Give fields in errors, and those that are appended to `ignored`, the names that they have in this API.

    The block may add names of further fields in errors.
    """
    given = len(ignored)
    names: dict[str, str] = {}
    try:
        yield names
    except SyringaError as error:
        rename_error(error, names)
        raise
    finally:
        ignored[given:] = renamed(ignored[given:])
