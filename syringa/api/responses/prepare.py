"""`/v1/responses` and `/v1/responses/input_tokens`: conversion of a body to a generation request and its writer."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from syringa.api.chat.prompt import ChatPrompt
from syringa.api.decoding import convert
from syringa.api.fields.common import check_metadata
from syringa.api.fields.constraints import compose_grammar
from syringa.api.fields.defaults import apply_defaults
from syringa.api.fields.reasoning import ReasoningRequest
from syringa.api.fields.sampling import read_stop, to_sampling, to_stop_conditions
from syringa.api.models.served_model import Models, ServedModel
from syringa.api.responses.context import PreparedResponse, ResponseContext, encrypt_reasoning
from syringa.api.responses.input import item_type
from syringa.api.responses.items import new_id
from syringa.api.responses.prompt_builder import build_prompt, read_reasoning_field
from syringa.api.responses.request import REFUSED, CompactRequest, InputTokensRequest, ResponseRequest
from syringa.api.responses.response_object import ConversationReference, ReasoningEcho, RequestEcho
from syringa.api.responses.schemas import EMPTY_INCLUDES, HONORED_INCLUDES
from syringa.api.responses.text import TextFormat, read_text
from syringa.api.responses.tools import ResponseTools, read_response_tools
from syringa.api.responses.writer import ResponseWriter, WriterOptions
from syringa.errors import InvalidRequest
from syringa.events import GenerationRequest, OutputFormat
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.images.loader import fetch_images
from syringa.types import Grammar, SamplingParams

_INCLUDE_LOGPROBS, _INCLUDE_ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


def referenced_item_ids(body: ResponseRequest | InputTokensRequest | CompactRequest) -> list[str]:
    """Return the ids of the item references in the input, for the caller to look up."""
    items = body.input if isinstance(body.input, list) else []
    ids = [each.get("id") for each in items if item_type(each) == "item_reference"]
    return [id for id in ids if isinstance(id, str)]


@dataclass(frozen=True, kw_only=True)
class _ParsedFields:
    """The validated fields of a body."""

    include: set[str]
    sampling: SamplingParams
    text: TextFormat
    tools: ResponseTools
    reasoning: ReasoningRequest
    reasoning_echo: ReasoningEcho

    @property
    def tool_use(self) -> ToolUse | None:
        return self.tools.request.use if self.tools.request is not None else None


async def prepare_response(
    body: ResponseRequest, models: Models, ignored: list[str], context: ResponseContext
) -> PreparedResponse:
    """Validate the request, render and tokenize its prompt, and fetch its images.

    Raises before anything is submitted to the engine. The paths of ignored fields are appended to `ignored`.
    """
    model = await models.find(body.model)
    body = apply_defaults(body, model)
    _reject_unsupported(body)
    fields = await _read_fields(body, model, ignored, context)
    built = await build_prompt(
        body,
        model,
        context,
        ignored,
        tools=fields.tool_use,
        reasoning=fields.reasoning,
        max_tokens=body.max_output_tokens,
        truncate=body.truncation == "auto" or bool(body.truncate_sequence),
    )
    request = await _build_request(body, model, fields, built.prompt, context.tenant)
    writer = ResponseWriter(
        id=request.id,
        created=int(time.time()),
        echo=_echo(body, model, fields),
        options=WriterOptions(
            model=model,
            custom_tools=fields.tools.custom,
            max_tool_calls=body.max_tool_calls,
            encrypt_reasoning=functools.partial(encrypt_reasoning, context.cipher)
            if _INCLUDE_ENCRYPTED in fields.include
            else None,
            include_reasoning=body.include_reasoning is not False,
            open_mode=context.open_mode,
        ),
        prompt_tokens=len(built.prompt.tokens),
    )
    return PreparedResponse(request=request, writer=writer, model=model, stream=bool(body.stream), input=built.items)


async def count_input_tokens(
    body: InputTokensRequest, models: Models, ignored: list[str], context: ResponseContext
) -> dict[str, Any]:
    """Return the number of tokens of the prompt that a response would have.

    An image counts as its placeholder only: its number of tokens is known to the engine alone.
    """
    model = await models.find(body.model)
    check_conversation(body)
    if body.personality is not None:
        ignored.append("personality")
    await read_text(body.text, ignored, open_mode=context.open_mode)
    tools = await read_response_tools(
        body.tools,
        body.tool_choice,
        ignored,
        parallel=body.parallel_tool_calls is not False,
        constrain_arguments=model.formats.tool_calls == "plain",
        open_mode=context.open_mode,
    )
    reasoning, _ = read_reasoning_field(
        body.reasoning, body.chat_template_kwargs, None, model, ignored, open_mode=context.open_mode
    )
    built = await build_prompt(
        body,
        model,
        context,
        ignored,
        tools=tools.request.use if tools.request is not None else None,
        reasoning=reasoning,
        truncate=body.truncation == "auto",
    )
    return {"object": "response.input_tokens", "input_tokens": len(built.prompt.tokens)}


async def _read_fields(
    body: ResponseRequest, model: ServedModel, ignored: list[str], context: ResponseContext
) -> _ParsedFields:
    _read_stream_options(body, ignored)
    _report_ignored(body, ignored)
    include = _read_include(body.include or [], ignored)
    sampling = await to_sampling(body, model, ignored)
    text = await read_text(body.text, ignored, open_mode=context.open_mode)
    tools = await read_response_tools(
        body.tools,
        body.tool_choice,
        ignored,
        parallel=body.parallel_tool_calls is not False and body.max_tool_calls != 1,
        constrain_arguments=model.formats.tool_calls == "plain",
        open_mode=context.open_mode,
    )
    reasoning, reasoning_echo = read_reasoning_field(
        body.reasoning,
        body.chat_template_kwargs,
        body.thinking_token_budget,
        model,
        ignored,
        open_mode=context.open_mode,
    )
    return _ParsedFields(
        include=include,
        sampling=sampling,
        text=text,
        tools=tools,
        reasoning=reasoning,
        reasoning_echo=reasoning_echo,
    )


async def _build_request(
    body: ResponseRequest, model: ServedModel, fields: _ParsedFields, prompt: ChatPrompt, tenant: str
) -> GenerationRequest:
    remaining = model.max_model_len - len(prompt.tokens)
    stopping = to_stop_conditions(body, model, remaining if body.max_output_tokens is None else body.max_output_tokens)
    reasoning_options = fields.reasoning.for_prompt(prompt.text, model)
    calls = model.formats.tool_calls if fields.tool_use is not None else None
    grammar_field = "tools" if fields.tool_use is not None else "text.format.schema"
    if body.grammar is not None:
        grammar_field = "grammar.value"
    unenforced: list[str] = []
    grammar = await compose_grammar(
        model,
        reasoning=reasoning_options,
        constraint=_constraint(fields),
        tools=fields.tool_use,
        format=calls or "plain",
        source_field=grammar_field,
        tenant=tenant,
        cache_salt=body.cache_salt,
        unenforced=unenforced,
    )
    for tool in fields.tools.echo:
        if tool["name"] in unenforced:
            tool["strict"] = False
    scored = _INCLUDE_LOGPROBS in fields.include or bool(body.top_logprobs)
    return GenerationRequest(
        id=new_id("resp"),
        prompts=[prompt.tokens],
        sampling=msgspec.structs.replace(fields.sampling, grammar=grammar, opening=model.opening(fields.tool_use)),
        stopping=stopping,
        stop=read_stop(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        logprobs=body.top_logprobs or 0 if scored else None,
        images=tuple(await fetch_images(prompt.images, model.image_policy, tenant)) if prompt.images else (),
        output=OutputFormat(
            reasoning=model.formats.reasoning,
            reasoning_open=reasoning_options is not None and reasoning_options.opened,
            tool_calls=calls,
            tool_schemas=fields.tools.request.parameters if fields.tools.request is not None else {},
        ),
        grammar_param=grammar_field,
        tenant=tenant,
        cache_salt=body.cache_salt,
        user=body.safety_identifier if body.user is None else body.user,
        priority=body.priority or 0,
    )


def _reject_unsupported(body: ResponseRequest) -> None:
    for name, reason in REFUSED.items():
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name}: {reason}", param=name)
    if body.n not in (None, 1):
        raise InvalidRequest("n: a response has one output; n cannot exceed 1.", param="n")
    if body.background and body.store is False:
        raise InvalidRequest(
            "background: requires store, so that the response can be fetched later.", param="background"
        )
    check_conversation(body)
    check_metadata(body.metadata or {})


def check_conversation(body: ResponseRequest | InputTokensRequest) -> None:
    """Raise `InvalidRequest` if the conversation is invalid or combined with a previous response."""
    if body.conversation is not None:
        if not body.conversation_id:
            raise InvalidRequest("conversation: expected an id, or an object with one.", param="conversation")
        if body.previous_response_id is not None:
            raise InvalidRequest(
                "previous_response_id and conversation cannot be combined.", param="previous_response_id"
            )


def _read_stream_options(body: ResponseRequest, ignored: list[str]) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options requires stream: true.", param="stream_options")
    options = convert(body.stream_options, ResponseStreamOptions, path="stream_options", ignored=ignored)
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise InvalidRequest(f"{param} is not supported.", param=param)


def _read_include(given: list[str], ignored: list[str]) -> set[str]:
    """Validate `include`. Results of tools that OpenAI hosts do not exist here and are reported in `ignored`."""
    for index, each in enumerate(given):
        if each in EMPTY_INCLUDES:
            ignored.append(f"include[{index}]")
        elif each not in HONORED_INCLUDES:
            param = f"include[{index}]"
            known = ", ".join((*HONORED_INCLUDES, *EMPTY_INCLUDES))
            raise InvalidRequest(f"{param}: expected one of {known}.", param=param)
    return set(given)


def _report_ignored(body: ResponseRequest, ignored: list[str]) -> None:
    """Append the names of fields that ask for something unsupported to `ignored`."""
    unsupported = {
        "service_tier": body.service_tier not in (None, "auto", "default"),
        "prompt_cache_retention": body.prompt_cache_retention is not None,
        "prompt_cache_options": body.prompt_cache_options is not None,
        "request_id": body.request_id is not None,
    }
    ignored += [name for name, asked in unsupported.items() if asked]


def _constraint(fields: _ParsedFields) -> Grammar | None:
    """Return the constraint on the text of the output; output that consists of tool calls has no text."""
    grammar = fields.sampling.grammar
    if grammar is not None:
        for name, other in (("tools", fields.tool_use), ("text.format", fields.text.grammar)):
            if other is not None:
                raise InvalidRequest(f"grammar and {name} cannot be combined.", param="grammar")
        return grammar
    return None if fields.tool_use is not None and fields.tool_use.mode == "required" else fields.text.grammar


def _echo(body: ResponseRequest, model: ServedModel, fields: _ParsedFields) -> RequestEcho:
    choice: Any = "auto" if body.tool_choice is None else body.tool_choice
    return RequestEcho(
        model=model.id,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        conversation=None if body.conversation_id is None else ConversationReference(body.conversation_id),
        tools=fields.tools.echo,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_tool_calls=body.max_tool_calls,
        text=fields.text.echo,
        reasoning=fields.reasoning_echo,
        truncation=body.truncation or "disabled",
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        top_logprobs=body.top_logprobs or 0,
        max_output_tokens=body.max_output_tokens,
        store=body.store is not False,
        background=bool(body.background),
        metadata=body.metadata or {},
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        user=UNSET if body.user is None else body.user,
    )
